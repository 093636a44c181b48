"""cuDNN graphs through the frontend's Python API, forward and backward, one ragged offset per port.

Legend: B sequences, S an upper bound of their lengths, T rows, H heads, D channels.  A graph declares every tensor as
[B, H, S, D] over the caller's [T, H, D] memory; where a sequence starts comes from the port's ragged offset alone, so
the declared batch stride is never read.

An engine is given the *live* rows only (see `metadata.widen`): rows that see no key are trimmed off and written by the
clearing launch, with the padding.  cuDNN before 9.25 answers NaN for sequences without keys (cudnn-frontend issue 943);
no engine meets one here.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from contextlib import contextmanager
from typing import Any, Iterator

import torch
from torch import Tensor

from .. import metadata
from ..layout import PORTS, ThdLayout
from ..spec import AttentionSpec
from . import BackwardTensors, ForwardTensors
from .buckets import batch_bucket
from .products import PortGeometry, Widened, WidenRequest, widen_request, widened
from .rowwise import pad_stats, sink_gradient, unpad_stats

UID = {name: i + 1 for i, name in enumerate(PORTS)}
UID.update({f"off_{port}": i + 21 for i, port in enumerate(PORTS)})
UID.update(len_q=10, len_kv=11, sink=12, seed=13, rng_offset=14, row_max=15)

_DTYPE_NAMES = {torch.float16: "HALF", torch.bfloat16: "BFLOAT16"}
#: Names of the frontend's Python engines (FROST) begin so; what remains is cuDNN's own.
_PYTHON_ENGINE_PREFIX = "sdpa_"
#: Above this, cuDNN >= 9.25 is asked for its ordered dQ accumulation, whose workspace is linear in the length.
_DETERMINISTIC_WORKSPACE_BYTES = 4 << 30


class UnsupportedByGraph(ValueError):
    """The installed frontend and cuDNN have no engine for this attention on this GPU."""


def frontend() -> Any:
    """The cudnn module, imported where a graph is first built and not with the package."""
    try:
        import cudnn
    except ImportError as error:
        raise UnsupportedByGraph(f"nvidia-cudnn-frontend can't be imported ({error}); GPU plans need it") from error
    return cudnn


@functools.lru_cache(maxsize=None)
def compute_capability(device_index: int) -> int:
    """10 * major + minor."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


def reads_packed_stats(cc: int) -> bool:
    """Whether the backend's backward reads Stats by ragged offset; sm8x and sm12x want the padded (b, h, s, 1)."""
    return cc // 10 not in (8, 12)


def served_head_dims(cc: int, direction: str) -> str:
    """What the engines of a GPU serve, for error messages; the rule is cuDNN frontend's support surface (1.32)."""
    major = cc // 10
    if direction == "fwd":
        return "multiples of 8 up to 512" if major in (9, 10) else "multiples of 8 up to 256"
    if major == 9:
        return "multiples of 8 up to 256"
    if major == 10:
        return "multiples of 8 up to 128, (192, 128) and (256, 256)"
    return "multiples of 8 up to 128"


def ports_of(direction: str, needs_lse: bool) -> tuple[str, ...]:
    if direction == "bwd":
        return PORTS
    return ("q", "k", "v", "o", "stats") if needs_lse else ("q", "k", "v", "o")


def direct_form(spec: AttentionSpec, layout: ThdLayout) -> tuple[tuple[str, int], ...]:
    """`AttentionSpec.bound` where a forward can bind the caller's prefixes as they are (cuDNN >= 9.24), else ().

    That leaves nothing to convert, but nothing to trim either: each sequence must have a key for every query row, which
    one tensor of lengths for both sides guarantees under every mask.  The batch must be a bucket, because cuDNN reads
    as many entries as the graph declares.
    """
    if frontend().backend_version() < 92400 or spec.dropout_p or not layout.same_lengths or not reads_packed_stats(compute_capability(spec.device.index)):
        return ()
    if layout.cu_seqlens_q.dtype != torch.int32 or spec.batch != batch_bucket(spec.batch):
        return ()
    row_strides = {**{port: pair[0] for port, pair in spec.strides}, "stats": spec.heads_q}
    multipliers = []
    for port in ("q", "k", "v", "o", "stats"):
        offset = layout.offsets[port]
        if offset.unit != "token" or offset.values.dtype != torch.int32 or offset.values.shape[0] != spec.batch + 1:
            return ()
        multipliers.append((port, offset.multiplier * row_strides[port]))
    return tuple(multipliers)


def build_graph(spec: AttentionSpec, direction: str, *, packed_stats: bool = True, **graph_arguments: Any) -> Any:
    """The validated pygraph of a spec with its plans created, none built.

    graph_arguments go to cudnn.pygraph: a handle, or the properties of a GPU that isn't there.
    Raises UnsupportedByGraph with the frontend's reason.
    """
    cudnn = frontend()
    try:
        with _deterministic_workspace_limit(spec, direction):
            graph = _declare(cudnn, spec, direction, packed_stats, graph_arguments)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
    except (RuntimeError, ValueError, NotImplementedError, cudnn.cudnnGraphNotSupportedError) as error:
        raise UnsupportedByGraph(str(error)) from error
    return graph


def _declare(cudnn: Any, spec: AttentionSpec, direction: str, packed_stats: bool, graph_arguments: dict[str, Any]) -> Any:
    io, f32 = getattr(cudnn.data_type, _DTYPE_NAMES[spec.dtype]), cudnn.data_type.FLOAT
    i32, i64 = cudnn.data_type.INT32, cudnn.data_type.INT64
    graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=f32, compute_data_type=f32, **graph_arguments)
    b, bound = spec.batch, dict(spec.bound)
    heads = {"k": spec.heads_kv, "v": spec.heads_kv, "dk": spec.heads_kv, "dv": spec.heads_kv}
    widths = {"v": spec.dim_v, "o": spec.dim_v, "do": spec.dim_v, "dv": spec.dim_v, "stats": 1}

    def geometry(port: str) -> tuple[list[int], list[int]]:
        h, s = heads.get(port, spec.heads_q), spec.max_kv if port in heads else spec.max_q
        if port == "stats":
            return [b, h, s, 1], [h * s, 1, h, 1] if packed_stats else [h * s, s, 1, 1]
        row, head = spec.stride(port)
        return [b, h, s, widths.get(port, spec.dim_qk)], [s * row, head, row, 1]

    def vector(name: str, size: int, data_type: Any) -> Any:
        return graph.tensor(name=name, dim=[size, 1, 1, 1], stride=[1, 1, 1, 1], data_type=data_type, uid=UID[name])

    offsets: dict[str, Any] = {}

    def place(tensor: Any, port: str) -> Any:
        if port == "stats" and not packed_stats:
            return tensor
        if port not in offsets:
            offsets[port] = vector(f"off_{port}", b + 1, i32 if bound else i64)
        tensor.set_ragged_offset(offsets[port])
        if bound:
            tensor.set_ragged_offset_multiplier(bound[port])
        return tensor

    def source(port: str) -> Any:
        dim, stride = geometry(port)
        return place(graph.tensor(name=port, dim=dim, stride=stride, data_type=f32 if port == "stats" else io, uid=UID[port]), port)

    def result(tensor: Any, port: str) -> None:
        dim, stride = geometry(port)
        tensor.set_uid(UID[port]).set_output(True).set_dim(dim).set_stride(stride).set_data_type(f32 if port == "stats" else io)
        place(tensor, port)

    band = spec.band
    arguments: dict[str, Any] = dict(attn_scale=spec.scale, use_padding_mask=True)
    if bound:
        arguments.update(cu_seq_len_q=vector("len_q", b + 1, i32), cu_seq_len_kv=vector("len_kv", b + 1, i32))
    else:
        arguments.update(seq_len_q=vector("len_q", b, i32), seq_len_kv=vector("len_kv", b, i32))
    if band.left >= 0:
        arguments["diagonal_band_left_bound"] = band.left + 1  # cuDNN's left bound is exclusive
    if band.right >= 0:
        arguments["diagonal_band_right_bound"] = band.right
    if band.bottom_right:
        arguments["diagonal_alignment"] = cudnn.diagonal_alignment.BOTTOM_RIGHT
    if spec.dropout_p:
        arguments["dropout"] = (spec.dropout_p, vector("seed", 1, i64), vector("rng_offset", 1, i64))

    if direction == "fwd":
        q, k, v = source("q"), source("k"), source("v")
        if spec.sink:
            shape = dict(dim=[1, spec.heads_q, 1, 1], stride=[spec.heads_q, 1, 1, 1])
            arguments["sink_token"] = graph.tensor(name="sink", data_type=f32, uid=UID["sink"], **shape)
        if spec.max_logit:
            dim, stride = geometry("stats")
            row_max = graph.tensor(name="row_max", dim=dim, stride=stride, data_type=f32, uid=UID["row_max"])
            arguments["score_max"] = place(row_max, "stats")
        o, stats = graph.sdpa(name="sdpa", q=q, k=k, v=v, generate_stats=spec.needs_lse, **arguments)
        result(o, "o")
        if spec.needs_lse:
            result(stats, "stats")
        return graph

    # The sink takes part through Stats, whose normaliser holds it; its own gradient is `rowwise.sink_gradient`'s.  The
    # frontend refuses sinks in a ragged backward below cuDNN 9.26, whose pre-pass read out of bounds.
    inputs = {name: source(port) for name, port in zip(("q", "k", "v", "o", "dO", "stats"), ("q", "k", "v", "o", "do", "stats"))}
    if packed_stats:
        arguments.update(max_total_seq_len_q=spec.tokens_q, max_total_seq_len_kv=spec.tokens_kv)
    arguments["use_deterministic_algorithm"] = spec.deterministic
    for tensor, port in zip(graph.sdpa_backward(name="sdpa_backward", **inputs, **arguments), ("dq", "dk", "dv")):
        result(tensor, port)
    return graph


@contextmanager
def _deterministic_workspace_limit(spec: AttentionSpec, direction: str) -> Iterator[None]:
    """Let cuDNN >= 9.25 leave the quadratic workspace of Hopper's deterministic backward; older ones ignore it."""
    name = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"
    if direction == "fwd" or not spec.deterministic or name in os.environ:
        yield
        return
    os.environ[name] = str(_DETERMINISTIC_WORKSPACE_BYTES)
    try:
        yield
    finally:
        del os.environ[name]


def choose(graph: Any, pinned: str | None) -> tuple[int, str]:
    """(index, name) of the first plan that may run: cuDNN's own engines read every bound offset.

    The frontend's Python engines are passed over; most of them rebuild starts from lengths.
    pinned: part of a plan's name.  Raises UnsupportedByGraph, naming what was offered.
    """
    names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
    for index, name in enumerate(names):
        if not name.startswith(_PYTHON_ENGINE_PREFIX) and (pinned is None or pinned in name):
            return index, name
    wanted = "no cuDNN engine" if pinned is None else f"no cuDNN engine whose name contains {pinned!r}"
    raise UnsupportedByGraph(f"{wanted} among the plans offered: {', '.join(names) or 'none'}")


class GraphPlan:
    """One built cuDNN graph, for one direction.

    Raises UnsupportedByGraph, with the frontend's reasons, where no engine takes the spec.
    """

    def __init__(self, spec: AttentionSpec, direction: str, pinned: str | None = None) -> None:
        self.spec, self.direction = spec, direction
        self._device_index = spec.device.index
        self.packed_stats = reads_packed_stats(compute_capability(self._device_index))
        with torch.cuda.device(self._device_index):
            graph = build_graph(spec, direction, packed_stats=self.packed_stats, handle=_handle(self._device_index))
            self._index, self.engine = choose(graph, pinned)
            try:
                graph.build_plan_at_index(self._index)
            except Exception as error:
                raise UnsupportedByGraph(f"{self.engine} was offered but can't be built: {error}") from error
        self.name = f"cudnn:{self.engine}"
        self.workspace_bytes = max(1, graph.get_workspace_size_plan_at_index(self._index))
        self._graph, self._lock = graph, threading.Lock()
        self._requests: dict[tuple[int, ...], WidenRequest] = {}
        names = self._operands()
        self._uids = tuple(UID[name] for name in names)
        self._offset_ports = tuple(name[4:] for name in names if name.startswith("off_"))
        self._ordered = "tensor_uids" in inspect.signature(graph.execute_plan_at_index).parameters

    def _operands(self) -> list[str]:
        """Names of the bound tensors in the order of `_bind`."""
        ports = ports_of(self.direction, self.spec.needs_lse)
        placed = [port for port in ports if port != "stats" or self.packed_stats]
        if self.direction == "fwd" and self.spec.max_logit:
            placed += ["stats"] * (self.packed_stats and "stats" not in placed)
        names = [*ports, "len_q", "len_kv", *(f"off_{port}" for port in placed)]
        if self.direction == "fwd":
            names += ["sink"] * self.spec.sink + ["row_max"] * self.spec.max_logit
        return names + ["seed", "rng_offset"] * bool(self.spec.dropout_p)

    def forward(self, tensors: ForwardTensors, layout: ThdLayout) -> None:
        product = self._product(layout, tensors.q, tensors.k, tensors.out)
        stats = row_max = None
        if tensors.lse is not None:
            stats = tensors.lse if self.packed_stats else self._padded_stats()
        if tensors.max_logit is not None:
            row_max = tensors.q.new_empty(tensors.q.shape[:2], dtype=torch.float32) if self.packed_stats else self._padded_stats()
        operands = [tensors.q, tensors.k, tensors.v, tensors.out]
        if stats is not None:
            operands.append(stats)
        extra = [tensor for tensor in (tensors.softmax_offset, row_max) if tensor is not None]
        self._execute(operands, extra, product, layout, tensors.rng_state)

        targets = [("o", tensors.out, 0.0)]
        if stats is not None:
            if stats is not tensors.lse:
                unpad_stats(stats, tensors.lse, product.metadata, product.group["stats"])
            targets.append(("stats", tensors.lse, float("-inf")))
        if row_max is not None:
            if not self.packed_stats:
                padded, row_max = row_max, tensors.q.new_empty(tensors.q.shape[:2], dtype=torch.float32)
                unpad_stats(padded, row_max, product.metadata, product.group["stats"])
            targets.append(("stats", row_max, float("-inf")))
        _clear(targets, product)
        if row_max is not None:
            torch.amax(row_max, 0, out=tensors.max_logit)

    def backward(self, tensors: BackwardTensors, layout: ThdLayout) -> None:
        product = self._product(layout, tensors.q, tensors.k, tensors.out)
        stats = tensors.lse
        if not self.packed_stats:
            stats = self._padded_stats()
            pad_stats(tensors.lse, stats, product.metadata, product.group["stats"])
        operands = [tensors.q, tensors.k, tensors.v, tensors.out, stats, tensors.do, tensors.dq, tensors.dk, tensors.dv]
        self._execute(operands, [], product, layout, tensors.rng_state)
        _clear([("dq", tensors.dq, 0.0), ("dk", tensors.dk, 0.0), ("dv", tensors.dv, 0.0)], product)
        if tensors.d_softmax_offset is not None:
            sink_gradient(tensors, product.metadata, product.group)

    def _padded_stats(self) -> Tensor:
        spec = self.spec
        return torch.empty((spec.batch, spec.heads_q, spec.max_q), dtype=torch.float32, device=spec.device)

    def _product(self, layout: ThdLayout, q: Tensor, k: Tensor, out: Tensor) -> Widened:
        rows = (q.shape[0], k.shape[0], out.shape[0])
        request = self._requests.get(rows)
        if request is None:
            if len(self._requests) >= 1024:
                self._requests.clear()
            request = self._requests[rows] = self._request(*rows)
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        return widened(layout, request, stream, torch.cuda.is_current_stream_capturing())

    def _request(self, rows_q: int, rows_kv: int, rows_o: int) -> WidenRequest:
        """Training asks for all nine ports in the forward, so that one launch serves the backward too."""
        spec, itemsize = self.spec, self.spec.dtype.itemsize
        rows = {"k": rows_kv, "v": rows_kv, "dk": rows_kv, "dv": rows_kv, "o": rows_o, "do": rows_o}
        strides = dict(spec.strides)
        contiguous = {
            "do": spec.heads_q * spec.dim_v,
            "dq": spec.heads_q * spec.dim_qk,
            "dk": spec.heads_kv * spec.dim_qk,
            "dv": spec.heads_kv * spec.dim_v,
        }
        ports = []
        for port in PORTS if spec.needs_lse else ("q", "k", "v", "o", "stats"):
            stats = port == "stats"
            row_stride = spec.heads_q if stats else strides[port][0] if port in strides else contiguous[port]
            ports.append(PortGeometry(port, rows.get(port, rows_q), row_stride, 4 if stats else itemsize))
        return widen_request(tuple(ports), spec.band, spec.batch)

    def _execute(self, operands: list[Tensor], extra: list[Tensor], product: Widened, layout: ThdLayout, rng_state: Tensor | None) -> None:
        if self.spec.bound:
            lengths = [layout.cu_seqlens_q, layout.cu_seqlens_kv]
            offsets = [layout.offsets[port].values for port in self._offset_ports]
        else:
            lengths = list(product.lengths)
            offsets = [product.ragged[port] for port in self._offset_ports]
        buffers = [*operands, *lengths, *offsets, *extra]
        if rng_state is not None:
            buffers += [rng_state[0:1], rng_state[1:2]]
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.spec.device)
        handle = _handle(self._device_index)
        frontend().set_stream(handle, torch._C._cuda_getCurrentRawStream(self._device_index))
        with self._lock:
            if self._ordered:
                self._graph.execute_plan_at_index(buffers, workspace, self._index, handle, tensor_uids=self._uids)
            else:
                self._graph.execute_plan_at_index(dict(zip(self._uids, buffers)), workspace, self._index, handle)


def _clear(targets: list[tuple[str, Tensor, float]], product: Widened) -> None:
    """One launch writes the rows outside the live ranges; none where the device has told that there are no such rows."""
    gappy = [(tensor, product.group[port], fill) for port, tensor, fill in targets if product.may_have_gaps(port)]
    if gappy:
        metadata.clear(gappy, product.metadata)


_handles = threading.local()


def _handle(device_index: int) -> Any:
    """A cuDNN handle of this thread on this device; a handle carries the stream, so threads can't share one."""
    by_device = getattr(_handles, "by_device", None)
    if by_device is None:
        by_device = _handles.by_device = {}
    handle = by_device.get(device_index)
    if handle is None:
        with torch.cuda.device(device_index):
            handle = by_device[device_index] = frontend().create_handle()
    return handle
