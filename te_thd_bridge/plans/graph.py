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
from dataclasses import replace
from typing import Any, Iterator

import torch
from torch import Tensor

from .. import metadata
from ..layout import PORTS, ThdLayout
from ..spec import AttentionSpec
from . import BackwardTensors, ForwardTensors
from .buckets import batch_bucket
from .products import PortGeometry, Widened, WidenRequest, widen_request, widened
from .rowwise import add_sink, pad_stats, sink_gradient, unpad_stats

UID = {name: i + 1 for i, name in enumerate(PORTS)}
UID.update({f"off_{port}": i + 21 for i, port in enumerate(PORTS)})
UID.update(len_q=10, len_kv=11, sink=12, seed=13, rng_offset=14, row_max=15, row_sum=16)

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


def has_stats(spec: AttentionSpec) -> bool:
    """Whether a forward graph outputs Stats; with max_logit the lse comes from its two parts instead."""
    return spec.needs_lse and not spec.max_logit


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
        if spec.max_logit:  # cuDNN gives a row's (max, sum of exponentials) or their combination, Stats, but not both
            dim, stride = geometry("stats")
            for argument, name in (("score_max", "row_max"), ("score_sum_exp", "row_sum")):
                arguments[argument] = place(graph.tensor(name=name, dim=dim, stride=stride, data_type=f32, uid=UID[name]), "stats")
        o, stats = graph.sdpa(name="sdpa", q=q, k=k, v=v, generate_stats=has_stats(spec), **arguments)
        result(o, "o")
        if has_stats(spec):
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


def build_first(graph: Any, pinned: str | None) -> tuple[int, str]:
    """(index, name) of the first offered plan that may run and builds: cuDNN's own engines read every bound offset.

    The frontend's Python engines are passed over; most of them rebuild starts from lengths.
    pinned: part of a plan's name.  Raises UnsupportedByGraph, naming what was offered and why it didn't build.
    """
    names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
    failures = []
    for index, name in enumerate(names):
        if name.startswith(_PYTHON_ENGINE_PREFIX) or (pinned is not None and pinned not in name):
            continue
        try:
            graph.build_plan_at_index(index)
            return index, name
        except (RuntimeError, NotImplementedError, frontend().cudnnGraphNotSupportedError) as error:
            failures.append(f"{name}: {error}")
    wanted = "no cuDNN engine" if pinned is None else f"no cuDNN engine whose name contains {pinned!r}"
    raise UnsupportedByGraph("; ".join(failures) or f"{wanted} among the plans offered: {', '.join(names) or 'none'}")


class GraphPlan:
    """One built cuDNN graph, for one direction.

    Raises UnsupportedByGraph, with the frontend's reasons, where no engine takes the spec.
    """

    def __init__(self, spec: AttentionSpec, direction: str, pinned: str | None = None) -> None:
        self.spec, self.direction = spec, direction
        self._device_index = spec.device.index
        self.packed_stats = reads_packed_stats(compute_capability(self._device_index))
        self._lock = threading.Lock()
        self._requests: dict[tuple, WidenRequest] = {}
        declared = spec
        if direction == "fwd" and spec.sink and spec.max_logit:
            declared = _without_sink(spec)  # the parts of the lse are wanted without the sink
        try:
            self._build(declared, pinned)
        except UnsupportedByGraph:
            # cuDNN 9.19 offers engines for a sink on Hopper whose compilation then fails: it is added afterwards.
            if direction == "bwd" or not declared.sink:
                raise
            declared = _without_sink(spec)
            self._build(declared, pinned)
        self._adds_sink = spec.sink and not declared.sink and direction == "fwd"
        names = self._operand_names(declared)
        self._uids = tuple(UID[name] for name in names)
        self._offset_ports = tuple(name[4:] for name in names if name.startswith("off_"))
        self._ordered = "tensor_uids" in inspect.signature(self._graph.execute_plan_at_index).parameters

    def _build(self, declared: AttentionSpec, pinned: str | None) -> None:
        with torch.cuda.device(self._device_index):
            graph = build_graph(declared, self.direction, packed_stats=self.packed_stats, handle=_handle(self._device_index))
            self._index, self.engine = build_first(graph, pinned)
        self._graph, self.name = graph, f"cudnn:{self.engine}"
        self.workspace_bytes = max(1, graph.get_workspace_size_plan_at_index(self._index))

    def _operand_names(self, declared: AttentionSpec) -> list[str]:
        """Names of the bound tensors in the order in which `forward` and `backward` list them."""
        if self.direction == "bwd":
            ports, extra = list(PORTS), []
        else:
            ports = ["q", "k", "v", "o"] + ["stats"] * has_stats(declared)
            extra = ["sink"] * declared.sink + ["row_max", "row_sum"] * declared.max_logit
        placed = [port for port in ports if port != "stats"]
        if self.packed_stats and ("stats" in ports or "row_max" in extra):
            placed.append("stats")
        return [*ports, *extra, "len_q", "len_kv", *(f"off_{port}" for port in placed), *["seed", "rng_offset"] * bool(declared.dropout_p)]

    def forward(self, tensors: ForwardTensors, layout: ThdLayout) -> None:
        product = self._product(layout, tensors.q, tensors.k, tensors.out)
        lse = tensors.lse
        if lse is None and self._adds_sink:
            lse = self._row_statistic(tensors.q)
        operands, row_max = [tensors.q, tensors.k, tensors.v, tensors.out], None
        if self.spec.max_logit:
            row_max, row_sum = self._statistic_for_engine(tensors.q), self._statistic_for_engine(tensors.q)
        elif lse is not None:
            stats = lse if self.packed_stats else self._statistic_for_engine(tensors.q)
            operands.append(stats)
        if tensors.softmax_offset is not None and not self._adds_sink:
            operands.append(tensors.softmax_offset)
        if row_max is not None:
            operands += [row_max, row_sum]
        self._execute(operands, product, layout, tensors.rng_state)

        group = product.group["stats"]
        if row_max is not None:
            row_max, row_sum = (self._packed(statistic, tensors.q.shape[0], product) for statistic in (row_max, row_sum))
            if lse is not None:
                torch.log(row_sum, out=lse).add_(row_max)
        elif lse is not None and not self.packed_stats:
            unpad_stats(stats, lse, product.metadata, group)
        if self._adds_sink:
            add_sink(tensors.out, lse, tensors.softmax_offset, product.metadata, product.group["o"], group)
        targets = [("o", tensors.out, 0.0)]
        targets += [("stats", statistic, float("-inf")) for statistic in (tensors.lse, row_max) if statistic is not None]
        _clear(targets, product)
        if row_max is not None:
            torch.amax(row_max, 0, out=tensors.max_logit)

    def backward(self, tensors: BackwardTensors, layout: ThdLayout) -> None:
        product = self._product(layout, tensors.q, tensors.k, tensors.out)
        stats = tensors.lse
        if not self.packed_stats:
            stats = self._statistic_for_engine(tensors.q)
            pad_stats(tensors.lse, stats, product.metadata, product.group["stats"])
        operands = [tensors.q, tensors.k, tensors.v, tensors.out, stats, tensors.do, tensors.dq, tensors.dk, tensors.dv]
        self._execute(operands, product, layout, tensors.rng_state)
        _clear([("dq", tensors.dq, 0.0), ("dk", tensors.dk, 0.0), ("dv", tensors.dv, 0.0)], product)
        if tensors.d_softmax_offset is not None:
            sink_gradient(tensors, product.metadata, product.group)

    def _row_statistic(self, q: Tensor) -> Tensor:
        return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    def _statistic_for_engine(self, q: Tensor) -> Tensor:
        spec = self.spec
        return self._row_statistic(q) if self.packed_stats else torch.empty(spec.batch, spec.heads_q, spec.max_q, dtype=torch.float32, device=q.device)

    def _packed(self, statistic: Tensor, rows: int, product: Widened) -> Tensor:
        if self.packed_stats:
            return statistic
        packed = torch.empty((rows, self.spec.heads_q), dtype=torch.float32, device=statistic.device)
        unpad_stats(statistic, packed, product.metadata, product.group["stats"])
        return packed

    def _product(self, layout: ThdLayout, q: Tensor, k: Tensor, out: Tensor) -> Widened:
        rows = (q.shape[0], k.shape[0], out.shape[0])
        key = (rows, layout.units)
        request = self._requests.get(key)
        if request is None:
            if len(self._requests) >= 1024:
                self._requests.clear()
            request = self._requests[key] = self._request(layout, *rows)
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        return widened(layout, request, stream, torch.cuda.is_current_stream_capturing())

    def _request(self, layout: ThdLayout, rows_q: int, rows_kv: int, rows_o: int) -> WidenRequest:
        """Training asks for all nine ports in the forward, so that one launch serves the backward too."""
        spec = self.spec
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
            ports.append(PortGeometry(port, rows.get(port, rows_q), row_stride, spec.offset_fraction(layout.offsets[port], port)))
        return widen_request(tuple(ports), spec.band, spec.batch)

    def _execute(self, operands: list[Tensor], product: Widened, layout: ThdLayout, rng_state: Tensor | None) -> None:
        if self.spec.bound:
            lengths = [layout.cu_seqlens_q, layout.cu_seqlens_kv]
            offsets = [layout.offsets[port].values for port in self._offset_ports]
        else:
            lengths = list(product.lengths)
            offsets = [product.ragged[port] for port in self._offset_ports]
        buffers = [*operands, *lengths, *offsets]
        if rng_state is not None:
            buffers += [rng_state[0:1], rng_state[1:2]]
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=operands[0].device)
        handle = _handle(self._device_index)
        frontend().set_stream(handle, torch._C._cuda_getCurrentRawStream(self._device_index))
        with self._lock:
            if self._ordered:
                self._graph.execute_plan_at_index(buffers, workspace, self._index, handle, tensor_uids=self._uids)
            else:
                self._graph.execute_plan_at_index(dict(zip(self._uids, buffers)), workspace, self._index, handle)


def _without_sink(spec: AttentionSpec) -> AttentionSpec:
    """What an engine computes for a sink that is added afterwards: the plain softmax, with its lse."""
    return replace(spec, sink=False, needs_lse=True)


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
