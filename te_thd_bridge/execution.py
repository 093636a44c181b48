"""One attention, forward or backward, on tensors: checks, plan, outputs, launch.  No autograd here.

`thd_attention`, its torch.compile operators and the hosts' hooks all come through this room.  What depends on shapes and
options alone is worked out once per signature (`Call`) and found again by one dict look-up.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import debug
from .layout import ThdLayout
from .plans import BackwardTensors, ForwardTensors
from .plans.graph import UnsupportedByGraph, compute_capability, direct_form, served_head_dims
from .plans.no_rows import NoRowsPlan
from .plans.select import PLAN_NAMES, BuiltPlan, plan_cache
from .spec import MASKS, AttentionSpec, Band

#: cuDNN and the copy kernels move 16 bytes at a time.
_ALIGNMENT_BYTES = 16
_CALLS_KEPT = 4096


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
    #: backward plans by do's strides; {} until a backward is first prepared
    backward_plans: dict[tuple[int, ...], BuiltPlan]


_calls: OrderedDict[tuple, Call] = OrderedDict()


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
    if q.is_cuda:
        q, k, v = (_readable(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v)))
    call = find_call(q, k, v, layout, options, softmax_offset, out, needs_lse, needs_backward)
    spec = call.spec
    if debug.enabled():
        debug.check_values(layout, {"q": q, "k": k, "v": v} if out is None else {"q": q, "k": k, "v": v, "o": out})
    if out is None:
        out = q.new_empty((call.rows_out, spec.heads_q, spec.dim_v))
    lse = q.new_empty((q.shape[0], spec.heads_q), dtype=_statistics_dtype(q.dtype)) if spec.needs_lse else None
    max_logit = q.new_empty((spec.heads_q,), dtype=_statistics_dtype(q.dtype)) if spec.max_logit else None
    call.forward_plan.calls += 1
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
        q, k, v = (_readable(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v)))
        do = _readable("the gradient of out", do, quiet=True)
    built = _backward_plan(call, q, do)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    d_sink = torch.empty_like(softmax_offset) if needs_sink_gradient else None
    built.calls += 1
    built.plan.backward(BackwardTensors(q, k, v, out, lse, do, dq, dk, dv, softmax_offset, d_sink, rng_state), layout)
    return dq, dk, dv, d_sink


def draw_rng_state(device: torch.device) -> Tensor:
    """[2] int64 (seed, offset) on the device, from torch's current generator there; capturable in a CUDA graph."""
    return torch.randint(0, 1 << 31, (2,), dtype=torch.int64, device=device)


def plan_report() -> list[dict[str, Any]]:
    """The plans that are kept in this process: name, direction, device, what they serve, and how often each ran."""
    return plan_cache.report()


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _readable(name: str, tensor: Tensor, quiet: bool = False) -> Tensor:
    """The tensor, or a contiguous copy where a kernel can't read it as it lies."""
    if tensor.stride(-1) == 1 and tensor.data_ptr() % _ALIGNMENT_BYTES == 0 and all(_strides_fit(tensor)):
        return tensor
    if not quiet:
        warnings.warn(
            f"{name}: got strides {tensor.stride()}; a contiguous copy is made on every call "
            f"(read as they are: a last dimension of stride 1, everything else on {_ALIGNMENT_BYTES}-byte boundaries)",
            stacklevel=4,
        )
    return tensor.clone(memory_format=torch.contiguous_format)


def _strides_fit(tensor: Tensor) -> tuple[bool, bool]:
    unit = _ALIGNMENT_BYTES // tensor.element_size()
    row, head, _ = tensor.stride()
    return row % unit == 0 and (row > 0 or tensor.shape[0] == 1), head % unit == 0 and (head > 0 or tensor.shape[1] == 1)


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
) -> Call:
    """The call of this signature; raises as `thd_attention` does where it can't be served."""
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
        (q.get_device(), k.get_device(), v.get_device()),
        options,
        layout.signature,
        None if softmax_offset is None else (softmax_offset.shape, softmax_offset.dtype, softmax_offset.get_device()),
        None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
        needs_lse or needs_backward,
        needs_backward,
    )
    call = _calls.get(key)
    if call is None:
        call = _prepare(q, k, v, layout, options, softmax_offset, out, needs_lse or needs_backward, needs_backward)
        if len(_calls) >= _CALLS_KEPT:
            _calls.popitem(last=False)
        _calls[key] = call
    return call


def _prepare(q, k, v, layout, options, softmax_offset, out, needs_lse, needs_backward) -> Call:
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
    if 0 in (spec.batch, spec.max_q, spec.max_kv):
        built = BuiltPlan(NoRowsPlan(spec), "both")
        return Call(spec, options, rows_out, built, {(): built})
    pinned = _pinned(options.plan, q)
    built = None
    bound = direct_form(spec, layout) if pinned != "reference" else ()
    if bound:
        try:
            built = plan_cache.get(replace(spec, bound=bound), "fwd", pinned)
        except UnsupportedByGraph:
            pass  # this frontend or GPU wants converted offsets
    call = Call(spec, options, rows_out, built or _plan(spec, "fwd", pinned), {})
    if needs_backward:
        _backward_plan(call, q, None)
    return call


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
        wanted = replace(spec, needs_lse=True, max_logit=False, strides=tuple(sorted(strides.items())), **sizes)
        built = call.backward_plans[do_strides] = _plan(wanted, "bwd", _pinned(call.options.plan, q))
    return built


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


def band_of(mask: str, window: tuple[int, int]) -> Band:
    """The keys a mask and a window leave; a causal mask bounds the right side at the diagonal whatever the window says."""
    if mask not in MASKS:
        raise ValueError(f"mask: got {mask!r}; accepted are {', '.join(map(repr, MASKS))}")
    try:
        left, right = (int(bound) for bound in window)
    except (TypeError, ValueError):
        raise TypeError(f"window: got {window!r}; accepted is a pair of ints (left, right)") from None
    if left < -1 or right < -1:
        raise ValueError(f"window: got {(left, right)}; accepted are tokens to the left and right of the diagonal, -1 for unbounded")
    mask_right, bottom_right = MASKS[mask]
    return Band(left, mask_right if mask_right >= 0 else right, bottom_right)


def check(q, k, v, layout, options: Options, softmax_offset=None, out=None) -> None:
    """Everything that can be said without a look at the device; see `thd_attention` for the contract."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}; accepted is a tensor [T, H, D]")
        if tensor.dim() != 3:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; accepted is [T, H, D]")
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise TypeError(f"{name}: got dtype {tensor.dtype}; accepted are torch.float16, bfloat16, float32 and float64")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {tensor.dtype}; accepted is the dtype of q, {q.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: got device {tensor.device}; accepted is the device of q, {q.device}")
    if not isinstance(layout, ThdLayout):
        raise TypeError(f"layout: got {type(layout).__name__}; accepted is a ThdLayout (ThdLayout.from_packed_seq_params makes one)")
    if layout.device != q.device:
        raise ValueError(f"layout: got tensors on {layout.device}; accepted is the device of q, {q.device}")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"v: got {v.shape[0]} rows; accepted are the {k.shape[0]} rows of k")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"v: got {v.shape[1]} heads; accepted are the {k.shape[1]} heads of k")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"k: got head dim {k.shape[2]}; accepted is the head dim of q, {q.shape[2]}")
    if 0 in (q.shape[1], k.shape[1], q.shape[2], v.shape[2]):
        raise ValueError(f"q, k, v: got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; accepted are at least one head and one channel")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k: got {k.shape[1]} heads for {q.shape[1]} of q; accepted are numbers of heads that divide it")
    band_of(options.mask, options.window)
    if options.scale is not None and not (isinstance(options.scale, (int, float)) and math.isfinite(options.scale)):
        raise TypeError(f"scale: got {options.scale!r}; accepted is a finite float or None for 1/sqrt(head dim)")
    if not isinstance(options.dropout_p, (int, float)) or not 0.0 <= options.dropout_p < 1.0:
        raise ValueError(f"dropout_p: got {options.dropout_p!r}; accepted is a float of at least 0 and below 1")
    if options.dropout_p and options.mask.endswith("bottom_right") and q.is_cuda and options.plan != "reference":
        raise ValueError("dropout_p: cuDNN's backward has no dropout under a bottom-right causal mask; accepted there is 0")
    if options.plan not in PLAN_NAMES and not options.plan.startswith("cudnn:"):
        raise ValueError(f"plan: got {options.plan!r}; accepted are {', '.join(map(repr, PLAN_NAMES))} and 'cudnn:' with part of an engine's name")
    _check_softmax_offset(softmax_offset, q)
    _check_out(out, q, v)


def _check_softmax_offset(softmax_offset: Any, q: Tensor) -> None:
    if softmax_offset is None:
        return
    if softmax_offset.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"softmax_offset: got dtype {softmax_offset.dtype}; accepted is torch.float32")
    if softmax_offset.shape != (q.shape[1],):
        raise ValueError(f"softmax_offset: got shape {tuple(softmax_offset.shape)}; accepted are [{q.shape[1]}] and [1, {q.shape[1]}, 1, 1]")
    if softmax_offset.device != q.device:
        raise ValueError(f"softmax_offset: got device {softmax_offset.device}; accepted is the device of q, {q.device}")


def _check_out(out: Any, q: Tensor, v: Tensor) -> None:
    if out is None:
        return
    if not isinstance(out, Tensor) or out.dim() != 3 or tuple(out.shape[1:]) != (q.shape[1], v.shape[2]):
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"out: got {got}; accepted is a tensor [T_o, {q.shape[1]}, {v.shape[2]}]")
    if out.dtype != q.dtype:
        raise TypeError(f"out: got dtype {out.dtype}; accepted is the dtype of q, {q.dtype}")
    if out.device != q.device:
        raise ValueError(f"out: got device {out.device}; accepted is the device of q, {q.device}")
    if out.stride(-1) != 1 or (out.is_cuda and (out.data_ptr() % _ALIGNMENT_BYTES or not all(_strides_fit(out)))):
        raise ValueError(
            f"out: got strides {out.stride()}; accepted is a last dimension of stride 1 and everything else on {_ALIGNMENT_BYTES}-byte boundaries"
        )
