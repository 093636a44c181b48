"""One attention, forward or backward, on tensors: checks, plan, outputs, launch.  No autograd here.

`thd_attention`, its torch.compile operators and the hosts' hooks all come through this room.  What depends on shapes and
options alone is worked out once per signature (`Call`) and found again by one dict look-up.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import debug
from .checks import ALIGNMENT_BYTES, band_of, check, check_address, strides_fit
from .layout import GRADIENT_OF, ThdLayout
from .plans import BackwardTensors, ForwardTensors
from .plans.graph import UnsupportedByGraph, compute_capability, direct_form, served_head_dims
from .plans.no_rows import NoRowsPlan
from .plans.select import BuiltPlan, plan_cache
from .spec import AttentionSpec

_CALLS_KEPT = 4096
_ADDRESSED_ELEMENTS = 1 << 31


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller chose besides tensors and layout; see `thd_attention` for each."""

    mask: str = "padding_causal"
    scale: float | None = None
    window: tuple[int, int] = (-1, -1)
    dropout_p: float = 0.0
    deterministic: bool = False
    max_logit: bool = False
    plan: str = "auto"


@dataclass(slots=True)
class Call:
    """All that follows from one signature of a call: its description and the plan that runs it."""

    spec: AttentionSpec
    options: Options
    rows_out: int
    forward_plan: BuiltPlan
    #: Slices of heads that the backward takes one by one; 1 unless a tensor has 2^31 elements or more.
    head_slices: int
    #: Backward plans by do's strides; () where one plan takes any.
    backward_plans: dict[tuple[int, ...], BuiltPlan]


_calls: OrderedDict[tuple, Call] = OrderedDict()
plan_cache.on_eviction.append(_calls.clear)  # a call must not keep a plan alive that the cache let go


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: ThdLayout,
    options: Options,
    *,
    softmax_offset: Tensor | None = None,
    rng_state: Tensor | None = None,
    out: Tensor | None = None,
    needs_lse: bool = False,
    needs_backward: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Call]:
    """(out, lse or None, max_logit or None, the call to hand to `backward`).

    Shapes as in `thd_attention`; rng_state is `draw_rng_state`'s where options.dropout_p is not 0.
    needs_backward: the backward's plan is found now, so that a refusal comes before anything is launched.
    """
    if softmax_offset is not None:
        softmax_offset = softmax_offset.contiguous()  # kernels and engines read [H_q] fp32 in a row
    q, k, v, call = find_call(q, k, v, layout, options, softmax_offset, out, needs_lse, needs_backward)
    spec = call.spec
    if out is not None:
        check_address(out)  # not part of a signature
    if debug.enabled():
        rows = {"q": q.shape[0], "k": k.shape[0], "v": v.shape[0], "o": call.rows_out, "stats": q.shape[0]}
        debug.check_values(layout, spec, rows)
    if out is None:
        out = q.new_empty((call.rows_out, spec.heads_q, spec.dim_v))
    lse = q.new_empty((q.shape[0], spec.heads_q), dtype=_statistics_dtype(q.dtype)) if spec.needs_lse else None
    max_logit = q.new_empty((spec.heads_q,), dtype=_statistics_dtype(q.dtype)) if spec.max_logit else None
    call.forward_plan.calls += 1
    with _current_device(q):
        call.forward_plan.plan.forward(ForwardTensors(q, k, v, out, lse, max_logit, softmax_offset, rng_state), layout)
    return out, lse, max_logit, call


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    do: Tensor,
    layout: ThdLayout,
    call: Call,
    *,
    softmax_offset: Tensor | None = None,
    rng_state: Tensor | None = None,
    needs_sink_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, d_softmax_offset or None), contiguous, for the call that `forward` returned."""
    if q.is_cuda:
        q, k, v, do = (_readable(name, tensor, quiet=True) for name, tensor in (("q", q), ("k", k), ("v", v), ("do", do)))
    if softmax_offset is not None:
        softmax_offset = softmax_offset.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    d_sink = torch.empty_like(softmax_offset) if needs_sink_gradient else None
    tensors = BackwardTensors(q, k, v, out, lse, do, dq, dk, dv, softmax_offset, d_sink, rng_state)
    with _current_device(q):
        if call.head_slices > 1:
            _backward_by_heads(tensors, layout, call)
        else:
            built = _backward_plan(call, q, do)
            built.calls += 1
            built.plan.backward(tensors, layout)
    return dq, dk, dv, d_sink


def _backward_by_heads(tensors: BackwardTensors, layout: ThdLayout, call: Call) -> None:
    """The backward in slices of heads, each copied so that no tensor outgrows what cuDNN's kernels address."""
    t, built = tensors, _backward_plan(call, tensors.q, None)
    for part in range(call.head_slices):
        heads = {}
        for name, tensor in (("q", t.q), ("k", t.k), ("v", t.v), ("out", t.out), ("lse", t.lse), ("do", t.do)):
            heads[name] = tensor.chunk(call.head_slices, 1)[part].clone(memory_format=torch.contiguous_format)
        sinks = [None if x is None else x.chunk(call.head_slices)[part].contiguous() for x in (t.softmax_offset, t.d_softmax_offset)]
        gradients = [torch.empty_like(heads[name]) for name in ("q", "k", "v")]
        built.calls += 1
        built.plan.backward(BackwardTensors(*heads.values(), *gradients, *sinks), layout)
        for whole, gradient in zip((t.dq, t.dk, t.dv), gradients):
            whole.chunk(call.head_slices, 1)[part].copy_(gradient)
        if sinks[1] is not None:
            t.d_softmax_offset.chunk(call.head_slices)[part].copy_(sinks[1])


def draw_rng_state(device: torch.device) -> Tensor:
    """[2] int64 (seed, offset) on the device, from torch's current generator there; capturable in a CUDA graph."""
    return torch.randint(0, 1 << 31, (2,), dtype=torch.int64, device=device)


def plan_report() -> list[dict[str, Any]]:
    """The plans that are kept in this process: name, direction, device, what they serve, and how often each ran."""
    return plan_cache.report()


def _current_device(tensor: Tensor) -> AbstractContextManager[None]:
    """Kernels launch on the current device, which need not be the tensors'."""
    if not tensor.is_cuda or torch.cuda.current_device() == tensor.get_device():
        return nullcontext()
    return torch.cuda.device(tensor.get_device())


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _readable(name: str, tensor: Tensor, quiet: bool = False) -> Tensor:
    """The tensor, or a contiguous copy where a kernel can't read it as it lies."""
    if tensor.dim() != 3:
        return tensor  # `check` has the words for it
    if tensor.stride(-1) == 1 and tensor.data_ptr() % ALIGNMENT_BYTES == 0 and all(strides_fit(tensor)):
        return tensor
    if not quiet:
        warnings.warn(
            f"{name}: got strides {tensor.stride()}; a contiguous copy is made on every call "
            f"(read as they are: a last dimension of stride 1, everything else on {ALIGNMENT_BYTES}-byte boundaries)",
            stacklevel=5,
        )
    return tensor.clone(memory_format=torch.contiguous_format)


def find_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: ThdLayout,
    options: Options,
    softmax_offset: Tensor | None,
    out: Tensor | None,
    needs_lse: bool,
    needs_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Call]:
    """(q, k, v as a plan can read them, the call of this signature); raises as `thd_attention` does."""
    given_strides = (q.stride(0), k.stride(0), v.stride(0)) if layout.units and q.dim() == k.dim() == v.dim() == 3 else None
    if q.is_cuda:
        q, k, v = (_readable(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v)))
    key = (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        (q.device, k.device, v.device),
        options,
        layout.signature,
        None if softmax_offset is None else (softmax_offset.shape, softmax_offset.dtype, softmax_offset.device),
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        needs_lse or needs_backward,
        needs_backward,
        given_strides,
    )
    try:
        call = _calls.get(key)
    except TypeError:  # an option that can't be hashed is of no accepted type
        check(q, k, v, layout, options, softmax_offset, out)
        raise
    if call is None:
        call = _prepare(q, k, v, layout, options, softmax_offset, out, needs_lse or needs_backward, needs_backward, given_strides)
        if len(_calls) >= _CALLS_KEPT:
            _calls.popitem(last=False)
        _calls[key] = call
    return q, k, v, call


def _prepare(q, k, v, layout, options, softmax_offset, out, needs_lse, needs_backward, given_strides) -> Call:
    check(q, k, v, layout, options, softmax_offset, out)
    rows_out = q.shape[0] if out is None else out.shape[0]
    strides = {"q": q.stride()[:2], "k": k.stride()[:2], "v": v.stride()[:2]}
    strides["o"] = (q.shape[1] * v.shape[2], v.shape[2]) if out is None else out.stride()[:2]
    spec = AttentionSpec(
        device=q.device,
        dtype=q.dtype,
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        dim_qk=q.shape[2],
        dim_v=v.shape[2],
        batch=layout.batch,
        max_q=min(layout.max_seqlen_q, q.shape[0]),
        max_kv=min(layout.max_seqlen_kv, k.shape[0]),
        tokens_q=q.shape[0],
        tokens_kv=k.shape[0],
        tokens_o=rows_out,
        band=band_of(options.mask, options.window),
        scale=1.0 / math.sqrt(q.shape[2]) if options.scale is None else float(options.scale),
        sink=softmax_offset is not None,
        dropout_p=options.dropout_p,
        deterministic=options.deterministic,
        needs_lse=needs_lse,
        max_logit=options.max_logit,
        strides=tuple(sorted(strides.items())),
    )
    if given_strides is not None:
        spec = replace(spec, offset_strides=_offset_strides(spec, layout, given_strides))
    if 0 in (spec.batch, spec.max_q, spec.max_kv):
        built = BuiltPlan(NoRowsPlan(spec), "both")
        return Call(spec, options, rows_out, built, 1, {(): built})
    pinned = _pinned(options.plan, q)
    built = None
    bound = direct_form(spec, layout) if pinned != "reference" else ()
    if bound:
        try:
            built = plan_cache.get(replace(spec, bound=bound), "fwd", pinned)
        except UnsupportedByGraph:
            pass  # this frontend or GPU wants converted offsets
    slices = _head_slices(spec) if needs_backward and pinned != "reference" else 1
    call = Call(spec, options, rows_out, built or _plan(spec, "fwd", pinned), slices, {})
    if needs_backward:
        _backward_plan(call, q, None)
    return call


def _offset_strides(spec: AttentionSpec, layout: ThdLayout, given: tuple[int, int, int]) -> tuple[tuple[str, int], ...]:
    """`AttentionSpec.offset_strides`: element and byte offsets count in the tensor that the caller holds."""
    strides = {"q": given[0], "k": given[1], "v": given[2], "o": spec.stride("o")[0], "stats": spec.heads_q}
    strides |= {"do": spec.heads_q * spec.dim_v, "dq": spec.heads_q * spec.dim_qk, "dk": spec.heads_kv * spec.dim_qk, "dv": spec.heads_kv * spec.dim_v}
    for gradient, tensor in GRADIENT_OF.items():
        if layout.offsets[gradient] is layout.offsets[tensor]:
            strides[gradient] = strides[tensor]
    counted = {port: stride * spec.itemsize(port) for port, stride in strides.items() if layout.offsets[port].unit != "token"}
    for port in strides:  # a multiplier that doesn't divide the stride is refused here, before anything is launched
        layout.offsets[port].tokens_as_fraction(counted.get(port, 0), spec.itemsize(port), port)
    return tuple(sorted(counted.items()))


def _head_slices(spec: AttentionSpec) -> int:
    """The fewest slices of heads whose tensors cuDNN's backward addresses.

    On an H200 with cuDNN 9.19, 4200 sequences of 128 tokens and 32 heads of 128 (2.2e9 elements) gave wrong gradients
    without an error; slices below 2^31 elements give the right ones.
    """
    largest = max(spec.tokens_q, spec.tokens_o) * spec.heads_q * max(spec.dim_qk, spec.dim_v)
    largest = max(largest, spec.tokens_kv * spec.heads_q * max(spec.dim_qk, spec.dim_v))  # dK and dV before heads are reduced
    if largest < _ADDRESSED_ELEMENTS:
        return 1
    for slices in range(2, spec.heads_kv + 1):
        if spec.heads_kv % slices == 0 and largest // slices < _ADDRESSED_ELEMENTS and not spec.dropout_p:
            return slices
    raise ValueError(
        f"q, k, v: {spec.tokens_q} and {spec.tokens_kv} rows of {spec.heads_q} heads and {spec.dim_qk} channels are more elements than cuDNN's "
        f"backward addresses ({_ADDRESSED_ELEMENTS}), and {spec.heads_kv} key heads{' with dropout' if spec.dropout_p else ''} can't be taken in "
        "slices that fit; accepted are fewer rows a call"
    )


def _backward_plan(call: Call, q: Tensor, do: Tensor | None) -> BuiltPlan:
    """do=None stands for a contiguous gradient, which is what nearly every caller sends."""
    spec = call.spec
    do_strides = (spec.heads_q * spec.dim_v, spec.dim_v) if do is None else do.stride()[:2]
    built = call.backward_plans.get(do_strides) or call.backward_plans.get(())
    if built is None:
        forward_sizes = call.forward_plan.plan.spec
        strides = dict(spec.strides)
        strides["do"] = do_strides
        strides["dq"] = (spec.heads_q * spec.dim_qk, spec.dim_qk)
        strides["dk"] = (spec.heads_kv * spec.dim_qk, spec.dim_qk)
        strides["dv"] = (spec.heads_kv * spec.dim_v, spec.dim_v)
        # The batch is the forward's, whose metadata the backward reads; with dropout the lengths are too, because the
        # mask depends on the declared sizes.
        sizes = {"batch": forward_sizes.batch}
        if spec.dropout_p:
            sizes.update(max_q=forward_sizes.max_q, max_kv=forward_sizes.max_kv)
        if call.head_slices > 1:
            h, h_kv = spec.heads_q // call.head_slices, spec.heads_kv // call.head_slices
            sizes.update(heads_q=h, heads_kv=h_kv)
            strides = {port: (heads * dim, dim) for port, heads, dim in _contiguous_ports(h, h_kv, spec.dim_qk, spec.dim_v)}
        wanted = replace(spec, needs_lse=True, max_logit=False, strides=tuple(sorted(strides.items())), **sizes)
        built = call.backward_plans[do_strides] = _plan(wanted, "bwd", _pinned(call.options.plan, q))
    return built


def _contiguous_ports(heads_q: int, heads_kv: int, dim_qk: int, dim_v: int) -> list[tuple[str, int, int]]:
    """(port, heads, channels) of every port but stats."""
    wide = [(port, heads_q, dim_qk) for port in ("q", "dq")] + [(port, heads_q, dim_v) for port in ("o", "do")]
    return wide + [(port, heads_kv, dim_qk) for port in ("k", "dk")] + [(port, heads_kv, dim_v) for port in ("v", "dv")]


def _plan(spec: AttentionSpec, direction: str, pinned: str) -> BuiltPlan:
    try:
        return plan_cache.get(spec, direction, pinned)
    except UnsupportedByGraph as error:
        cc = compute_capability(spec.device.index)
        what = {"fwd": "forward", "bwd": "backward"}[direction]
        raise ValueError(
            f"no {what} plan for head dims ({spec.dim_qk}, {spec.dim_v}), {spec.dtype}, {spec.band}, dropout_p={spec.dropout_p}, "
            f"deterministic={spec.deterministic} on {torch.cuda.get_device_name(spec.device)} (sm{cc}); served head dims are "
            f"{served_head_dims(cc, direction)}. The frontend says: {error}"
        ) from error


def _pinned(plan: str, q: Tensor) -> str:
    if not q.is_cuda:
        if plan.startswith("cudnn"):
            raise ValueError(f"plan: got {plan!r} for tensors on {q.device}; accepted there are 'auto' and 'reference'")
        return "reference"
    if plan == "reference":
        return plan
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"q: got dtype {q.dtype}; GPU plans take torch.float16 and torch.bfloat16 (plan='reference' takes any float dtype)")
    return "" if plan == "auto" else plan
