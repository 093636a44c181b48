"""`thd_attention` as torch operators, which torch.compile traces without a graph break.

An operator takes tensors and plain values only, so a layout is taken apart at the call and put together again inside; its
device products are made anew on every compiled call.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from . import execution
from .execution import Options
from .layout import PORTS, UNITS, RaggedOffset, ThdLayout


def traced_attention(q, k, v, layout: ThdLayout, options: Options, softmax_offset, out):
    """(out, lse, max_logit) through the operators; called while torch.compile traces."""
    offsets = layout.distinct_offsets
    rng_state = execution.draw_rng_state(q.device) if options.dropout_p else None
    rows_out = q.shape[0] if out is None else out.shape[0]
    result, lse, max_logit = attention(
        q,
        k,
        v,
        layout.cu_seqlens_q,
        layout.cu_seqlens_kv,
        [offset.values for offset in offsets],
        [UNITS.index(offset.unit) for offset in offsets],
        [offset.multiplier for offset in offsets],
        list(layout.offset_of_port),
        layout.max_seqlen_q,
        layout.max_seqlen_kv,
        layout.padding,
        softmax_offset,
        rng_state,
        rows_out,
        options.mask,
        options.scale,
        list(options.window),
        float(options.dropout_p),
        options.deterministic,
        options.max_logit,
        options.plan,
    )
    if out is not None:
        result = out.copy_(result)
    return result, lse, max_logit if options.max_logit else None


def _layout(cu_q, cu_kv, values, units, multipliers, ports, max_q, max_kv, padding) -> ThdLayout:
    # Inside an operator cu_seqlens_q and cu_seqlens_kv are different objects even where the caller passed one tensor.
    same = cu_kv.data_ptr() == cu_q.data_ptr() and cu_kv.shape == cu_q.shape
    distinct = [RaggedOffset(value, UNITS[unit], multiplier) for value, unit, multiplier in zip(values, units, multipliers)]
    return ThdLayout(cu_q, cu_q if same else cu_kv, {port: distinct[index] for port, index in zip(PORTS, ports)}, max_q, max_kv, padding)


@torch.library.custom_op("te_thd_bridge::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    offset_values: list[Tensor],
    offset_units: list[int],
    offset_multipliers: list[int],
    offset_of_port: list[int],
    max_seqlen_q: int,
    max_seqlen_kv: int,
    padding: str,
    softmax_offset: Optional[Tensor],
    rng_state: Optional[Tensor],
    rows_out: int,
    mask: str,
    scale: Optional[float],
    window: list[int],
    dropout_p: float,
    deterministic: bool,
    max_logit: bool,
    plan: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """out [rows_out, H_q, D_v], lse [T_q, H_q], max_logit [H_q] (empty where it is not asked for)."""
    layout = _layout(
        cu_seqlens_q, cu_seqlens_kv, offset_values, offset_units, offset_multipliers, offset_of_port, max_seqlen_q, max_seqlen_kv, padding
    )
    options = Options(mask, scale, (window[0], window[1]), dropout_p, deterministic, max_logit, plan)
    out = q.new_empty((rows_out, q.shape[1], v.shape[2]))
    _, lse, row_max, _ = execution.forward(
        q, k, v, layout, options, softmax_offset=softmax_offset, rng_state=rng_state, out=out, needs_lse=True
    )
    return out, lse, q.new_empty((0,)) if row_max is None else row_max


@attention.register_fake
def _(q, k, v, *arguments):
    rows_out, max_logit = arguments[11], arguments[17]
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((rows_out, q.shape[1], v.shape[2]))
    lse = q.new_empty((q.shape[0], q.shape[1]), dtype=statistics)
    return out, lse, q.new_empty((q.shape[1],), dtype=statistics) if max_logit else q.new_empty((0,))


@torch.library.custom_op("te_thd_bridge::attention_backward", mutates_args=())
def attention_backward(
    do: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    offset_values: list[Tensor],
    offset_units: list[int],
    offset_multipliers: list[int],
    offset_of_port: list[int],
    max_seqlen_q: int,
    max_seqlen_kv: int,
    padding: str,
    softmax_offset: Optional[Tensor],
    rng_state: Optional[Tensor],
    rows_out: int,
    mask: str,
    scale: Optional[float],
    window: list[int],
    dropout_p: float,
    deterministic: bool,
    max_logit: bool,
    plan: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv as q, k, v; d_softmax_offset [H_q] (empty where there is no softmax_offset)."""
    layout = _layout(
        cu_seqlens_q, cu_seqlens_kv, offset_values, offset_units, offset_multipliers, offset_of_port, max_seqlen_q, max_seqlen_kv, padding
    )
    options = Options(mask, scale, (window[0], window[1]), dropout_p, deterministic, max_logit, plan)
    q, k, v, call = execution.find_call(q, k, v, layout, options, softmax_offset, out, needs_lse=True, needs_backward=True)
    dq, dk, dv, d_sink = execution.backward(
        q, k, v, out, lse, do, layout, call, softmax_offset=softmax_offset, rng_state=rng_state, needs_sink_gradient=softmax_offset is not None
    )
    return dq, dk, dv, q.new_empty((0,)) if d_sink is None else d_sink


@attention_backward.register_fake
def _(do, out, lse, q, k, v, *arguments):
    softmax_offset = arguments[9]
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    return (*gradients, q.new_empty((0,)) if softmax_offset is None else torch.empty_like(softmax_offset))


def _keep_for_backward(ctx, inputs, output):
    out, lse, max_logit = output
    ctx.mark_non_differentiable(lse, max_logit)
    ctx.tensors_of = [index for index, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.offset_count = len(inputs[5])
    ctx.save_for_backward(out, lse, *(inputs[index] for index in ctx.tensors_of), *inputs[5])
    ctx.values = [None if isinstance(value, Tensor) or index == 5 else value for index, value in enumerate(inputs)]


def _backward(ctx, do, _lse_gradient, _max_logit_gradient):
    out, lse, *saved = ctx.saved_tensors
    inputs = list(ctx.values)
    for index, tensor in zip(ctx.tensors_of, saved):
        inputs[index] = tensor
    inputs[5] = saved[len(ctx.tensors_of) :]
    dq, dk, dv, d_sink = attention_backward(do, out, lse, *inputs)
    gradients = [None] * len(inputs)
    gradients[0:3] = dq, dk, dv
    gradients[5] = [None] * ctx.offset_count
    if inputs[12] is not None:
        gradients[12] = d_sink
    return tuple(gradients)


attention.register_autograd(_backward, setup_context=_keep_for_backward)
