"""What the caller said about a packed batch, in one place.

A THD buffer holds ``B`` sequences end to end, with any rows between and after them.  A
``ThdLayout`` carries, as tensors that are never read on the host, how long each sequence is
(``cu_seqlens``) and where each tensor of the attention starts it (one ragged offset per port).

Legend: B sequences, T rows of a buffer (real and padding), H heads, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

import torch
from torch import Tensor

#: The tensors of an attention graph that carry a ragged offset.
PORTS = ("q", "k", "v", "o", "stats", "do", "dq", "dk", "dv")
#: Ports whose rows are query rows; the others hold key rows.
QUERY_PORTS = frozenset(("q", "o", "stats", "do", "dq"))
#: A gradient lies where the tensor it belongs to lies, unless its own offset says otherwise.
GRADIENT_OF = {"do": "o", "dq": "q", "dk": "k", "dv": "v"}

UNITS = ("token", "element", "byte")
PADDING_MODES = ("any", "finite", "scrub")
_INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class RaggedOffset:
    """Where each sequence starts in one tensor.

    Sequence ``i`` starts ``values[i] * multiplier`` units behind the tensor's first element.

    values:     int32 or int64, [B] or [B+1], on the device of the tensors; never read on the host.
    unit:       "token" (rows), "element" (of the tensor's dtype) or "byte".
    multiplier: positive int.  For elements and bytes it must divide the tensor's row stride, the
                rule of cuDNN's ragged_offset_multiplier; that is checked when the stride is known.

    Raises TypeError or ValueError for anything else.
    """

    values: Tensor
    unit: str = "token"
    multiplier: int = 1

    def __post_init__(self) -> None:
        _check_index_vector("RaggedOffset.values", self.values)
        if self.unit not in UNITS:
            raise ValueError(f"RaggedOffset.unit: got {self.unit!r}; accepted are {', '.join(map(repr, UNITS))}")
        if isinstance(self.multiplier, bool) or not isinstance(self.multiplier, int):
            raise TypeError(f"RaggedOffset.multiplier: got {type(self.multiplier).__name__}; accepted is an int")
        if self.multiplier < 1:
            raise ValueError(f"RaggedOffset.multiplier: got {self.multiplier}; accepted is an int of at least 1")

    def tokens_as_fraction(self, token_stride_bytes: int, itemsize: int, port: str) -> tuple[int, int]:
        """``(n, d)`` such that sequence i starts at row ``values[i] * n // d`` of a tensor with this row stride."""
        if self.unit == "token":
            return self.multiplier, 1
        stride = token_stride_bytes if self.unit == "byte" else token_stride_bytes // itemsize
        if stride == 0:
            raise ValueError(
                f"offsets[{port!r}]: {self.unit} offsets need rows that do not overlap, but {port} has a row stride of 0; "
                "accepted are token offsets, or a tensor whose rows lie apart"
            )
        if stride % self.multiplier:
            raise ValueError(
                f"offsets[{port!r}].multiplier: got {self.multiplier} {self.unit}s, which does not divide the row stride "
                f"of {port} ({stride} {self.unit}s); accepted are its divisors"
            )
        return 1, stride // self.multiplier


class ThdLayout:
    """How long the sequences of a packed batch are, and where each port starts them.

    cu_seqlens_q, cu_seqlens_kv: int32 or int64 [B+1], running totals of the real lengths in tokens; the first entry
        need not be 0, only differences count.
    offsets: one RaggedOffset for each of q, k, v, o, stats, do, dq, dk, dv.
    max_seqlen_q, max_seqlen_kv: host ints, no sequence is longer (the contract of PackedSeqParams and of
        TransformerEngine); a longer one is undefined, and `te_thd_bridge.debug_checks` finds it.
    padding: what is known of the rows between sequences. "any": nothing, they may hold NaN. "finite": the caller
        promises finite values. "scrub": non-finite values there may be overwritten with 0 in place.

    Build it with `from_cu_seqlens` or `from_packed_seq_params`.  Nothing here touches a device: products that a
    plan derives from the values are made at first use and kept, so one layout should serve all layers of a
    microbatch.  In-place changes of the tensors through torch are noticed; after a change that torch cannot see
    (a raw kernel, a graph replay) call `refresh`.
    """

    __slots__ = (
        "cu_seqlens_q",
        "cu_seqlens_kv",
        "offsets",
        "max_seqlen_q",
        "max_seqlen_kv",
        "padding",
        "distinct_offsets",
        "offset_of_port",
        "units",
        "signature",
        "products",
    )

    def __init__(
        self,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        offsets: Mapping[str, RaggedOffset],
        max_seqlen_q: int,
        max_seqlen_kv: int,
        padding: str,
    ) -> None:
        self.cu_seqlens_q = cu_seqlens_q
        self.cu_seqlens_kv = cu_seqlens_kv
        self.offsets = dict(offsets)
        self.max_seqlen_q = max_seqlen_q
        self.max_seqlen_kv = max_seqlen_kv
        self.padding = padding
        distinct: list[RaggedOffset] = []
        of_port = []
        for port in PORTS:
            place = 0
            while place < len(distinct) and distinct[place] is not self.offsets[port]:
                place += 1
            if place == len(distinct):
                distinct.append(self.offsets[port])
            of_port.append(place)
        #: The RaggedOffsets without repetition, and each port's place among them.
        self.distinct_offsets = tuple(distinct)
        self.offset_of_port = tuple(of_port)
        #: (unit, multiplier) of each distinct offset, or () where all count tokens by one.
        units = tuple((offset.unit, offset.multiplier) for offset in distinct)
        self.units = () if all(unit == ("token", 1) for unit in units) else (self.offset_of_port, units)
        #: All that a plan may depend on besides the values: sizes, units, and which ports share an offset.
        self.signature = (
            self.device.type,
            self.device.index,
            self.batch,
            max_seqlen_q,
            max_seqlen_kv,
            padding,
            cu_seqlens_q is cu_seqlens_kv,
            cu_seqlens_q.dtype,
            self.offset_of_port,
            tuple((o.unit, o.multiplier, o.values.dtype, o.values.shape[0], o.values is cu_seqlens_q) for o in self.distinct_offsets),
        )
        #: Device products by plan request; see `te_thd_bridge.plans.products`.
        self.products: dict[Any, Any] = {}

    @property
    def batch(self) -> int:
        """B, the number of sequences (zero-length ones count)."""
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens_q.device

    @property
    def same_lengths(self) -> bool:
        """Query and key lengths are one tensor: then every query row has a key under every causal mask."""
        return self.cu_seqlens_q is self.cu_seqlens_kv

    def refresh(self) -> None:
        """Forget what was derived from the tensors' values; call it after changing them where torch cannot see it."""
        self.products.clear()

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor | None = None,
        *,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int,
        max_seqlen_kv: int | None = None,
        offsets: Mapping[str, RaggedOffset] | None = None,
        padding: str = "any",
    ) -> "ThdLayout":
        """Layout from prefix sums, as TransformerEngine and Megatron-Core pass them.

        cu_seqlens_q, cu_seqlens_kv: int32 or int64 [B+1] in tokens; kv defaults to q.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 or int64 [B+1], first row of each sequence; None means the
            sequences lie end to end.  Without cu_seqlens_kv, the padded kv prefix defaults to the padded q prefix.
        max_seqlen_q, max_seqlen_kv: int, at least the longest sequence, in tokens; kv defaults to q when
            cu_seqlens_kv does.  A 0-d CPU tensor is read; a CUDA tensor would need a synchronisation and is refused.
        offsets: {port: RaggedOffset} for the ports that do not follow the padded prefix of their side.
        padding: "any" | "finite" | "scrub", see `ThdLayout`.

        Raises TypeError or ValueError, naming the argument; no tensor is read.
        """
        _check_index_vector("cu_seqlens_q", cu_seqlens_q)
        if cu_seqlens_q.shape[0] < 1:
            raise ValueError("cu_seqlens_q: got an empty tensor; accepted are B+1 entries, [0] for a batch of no sequences")
        batch, device = cu_seqlens_q.shape[0] - 1, cu_seqlens_q.device
        self_attention = cu_seqlens_kv is None or cu_seqlens_kv is cu_seqlens_q
        if cu_seqlens_kv is None:
            cu_seqlens_kv = cu_seqlens_q
            if cu_seqlens_kv_padded is None:
                cu_seqlens_kv_padded = cu_seqlens_q_padded
        for name, prefix in (
            ("cu_seqlens_kv", cu_seqlens_kv),
            ("cu_seqlens_q_padded", cu_seqlens_q_padded),
            ("cu_seqlens_kv_padded", cu_seqlens_kv_padded),
        ):
            if prefix is not None:
                _check_index_vector(name, prefix, device=device, lengths=(batch + 1,), batch=batch)

        max_q = _host_int("max_seqlen_q", max_seqlen_q)
        if max_seqlen_kv is None and self_attention:
            max_kv = max_q
        else:
            max_kv = _host_int("max_seqlen_kv", max_seqlen_kv)

        starts_q = RaggedOffset(cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded)
        if cu_seqlens_kv_padded is None:
            starts_kv = starts_q if self_attention and cu_seqlens_q_padded is None else RaggedOffset(cu_seqlens_kv)
        else:
            starts_kv = starts_q if cu_seqlens_kv_padded is starts_q.values else RaggedOffset(cu_seqlens_kv_padded)
        bound = {port: starts_q if port in QUERY_PORTS else starts_kv for port in PORTS}
        own = _check_offsets(offsets, device, batch)
        bound.update(own)
        for gradient, tensor in GRADIENT_OF.items():
            if gradient not in own:
                bound[gradient] = bound[tensor]

        if padding not in PADDING_MODES:
            raise ValueError(f"padding: got {padding!r}; accepted are {', '.join(map(repr, PADDING_MODES))}")
        return cls(cu_seqlens_q, cu_seqlens_kv, bound, max_q, max_kv, padding)

    @classmethod
    def from_packed_seq_params(cls, params: Any, *, padding: str = "any") -> "ThdLayout":
        """Layout from Megatron-Core's PackedSeqParams, or from any object with its attributes.

        Reads cu_seqlens_{q,kv}, cu_seqlens_{q,kv}_padded and max_seqlen_{q,kv} (megatron-core 0.16 .. 0.19); kv
        attributes that are missing or None follow q.  `pad_between_seqs` is not consulted: where a padded prefix is
        bound it is honoured, which is right for packed batches too.  The layout is kept on the object and reused as
        long as the object holds the same tensors, so that the layers of a microbatch share its products.

        Raises TypeError for an object that lacks the attributes, ValueError where qkv_format is set and not "thd".
        """
        qkv_format = getattr(params, "qkv_format", None)
        if qkv_format not in (None, "thd"):
            raise ValueError(f"params.qkv_format: got {qkv_format!r}; accepted is 'thd'")
        if not hasattr(params, "cu_seqlens_q") or not hasattr(params, "max_seqlen_q"):
            raise TypeError(
                f"params: got {type(params).__name__}; accepted is a PackedSeqParams or an object with its attributes (cu_seqlens_q, max_seqlen_q, ...)"
            )
        read = [getattr(params, name, None) for name in _PARAMS_FIELDS]
        kept = getattr(params, _KEPT_LAYOUT, None)
        if kept is not None and kept[1].padding == padding and len(kept[0]) == len(read) and all(a is b for a, b in zip(kept[0], read)):
            return kept[1]
        cu_q, cu_kv, padded_q, padded_kv, max_q, max_kv = read
        if cu_q is None:
            raise ValueError("params.cu_seqlens_q: got None; accepted is an int32 or int64 tensor [B+1]")
        if padded_kv is None:
            padded_kv = padded_q
        layout = cls.from_cu_seqlens(
            cu_q,
            cu_kv,
            cu_seqlens_q_padded=padded_q,
            cu_seqlens_kv_padded=padded_kv,
            max_seqlen_q=max_q,
            max_seqlen_kv=max_kv,
            padding=padding,
        )
        try:
            setattr(params, _KEPT_LAYOUT, (read, layout))
        except (AttributeError, TypeError):
            pass  # a frozen or slotted object: the caller keeps the layout
        return layout

    def __repr__(self) -> str:
        return f"ThdLayout(B={self.batch}, max_seqlen_q={self.max_seqlen_q}, max_seqlen_kv={self.max_seqlen_kv}, padding={self.padding!r}, device={self.device})"


_PARAMS_FIELDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv")
_KEPT_LAYOUT = "_te_thd_bridge_layout"


def _check_index_vector(name: str, value: Any, *, device: torch.device | None = None, lengths: tuple[int, ...] = (), batch: int = 0) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}; accepted is an int32 or int64 tensor")
    if value.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name}: got dtype {value.dtype}; accepted are torch.int32 and torch.int64")
    if value.dim() != 1:
        raise ValueError(f"{name}: got shape {tuple(value.shape)}; accepted is one dimension")
    if value.shape[0] > 1 and value.stride(0) != 1:
        raise ValueError(f"{name}: got a stride of {value.stride(0)}; accepted is a contiguous tensor")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: got device {value.device}; accepted is the device of cu_seqlens_q, {device}")
    if lengths and value.shape[0] not in lengths:
        accepted = " or ".join(map(str, lengths))
        raise ValueError(f"{name}: got {value.shape[0]} entries; accepted are {accepted} for the {batch} sequences of cu_seqlens_q")


def _check_offsets(offsets: Any, device: torch.device, batch: int) -> dict[str, RaggedOffset]:
    if offsets is None:
        return {}
    if not isinstance(offsets, Mapping):
        raise TypeError(f"offsets: got {type(offsets).__name__}; accepted is a mapping of port names to RaggedOffset")
    for port, offset in offsets.items():
        if port not in PORTS:
            raise ValueError(f"offsets: got port {port!r}; accepted are {', '.join(PORTS)}")
        if not isinstance(offset, RaggedOffset):
            raise TypeError(f"offsets[{port!r}]: got {type(offset).__name__}; accepted is a RaggedOffset")
        _check_index_vector(f"offsets[{port!r}].values", offset.values, device=device, lengths=(batch, batch + 1), batch=batch)
    return dict(offsets)


def _host_int(name: str, value: Any) -> int:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_floating_point():
            raise TypeError(f"{name}: got a {value.dtype} tensor of shape {tuple(value.shape)}; accepted is an int")
        if value.device.type != "cpu":
            raise TypeError(
                f"{name}: got a tensor on {value.device}, and reading it would synchronise; pass an int (any bound that no sequence exceeds, "
                "the row count of the buffer at worst) or a CPU tensor"
            )
        value = int(value.item())
    if value is None:
        raise TypeError(f"{name}: got None; accepted is an int that no sequence exceeds (the row count of the buffer at worst)")
    # SymInt stands for an int while torch.compile traces.
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        if hasattr(value, "__index__") and not isinstance(value, bool):
            value = value.__index__()
        else:
            raise TypeError(f"{name}: got {type(value).__name__}; accepted is an int")
    if value < 0:
        raise ValueError(f"{name}: got {value}; accepted is an int of at least 0")
    return value
