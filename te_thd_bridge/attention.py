"""`thd_attention`: attention within packed sequences, whatever lies between them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import execution
from .checks import check
from .execution import Options
from .layout import ThdLayout
from .ops import traced_attention


def thd_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: ThdLayout,
    *,
    mask: str = "padding_causal",
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softmax_offset: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    out: Tensor | None = None,
    plan: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Attend within packed sequences, whatever lies between them.

    Legend: T rows of a buffer, padding included; H heads; D channels; lengths and windows in tokens.

    q: [T_q, H_q, D_qk], k: [T_kv, H_kv, D_qk], v: [T_kv, H_kv, D_v]; H_kv divides H_q.  float16 or bfloat16 on a GPU, any
        float dtype on a CPU.  Strided views are read in place (slices of a fused QKV buffer are) when channels have
        stride 1 and rows and heads lie on 16-byte boundaries; else a contiguous copy is made, with a warning.
    layout: lengths and starts; starts are in each offset's own unit.
    mask: "padding", "padding_causal" (row i sees keys up to i) or "padding_causal_bottom_right" (the last row sees the last
        key); "no_mask", "causal" and "causal_bottom_right" mean the same, as in TransformerEngine's THD format.
    scale: factor of the logits; None is 1/sqrt(D_qk).
    window: (left, right) keys besides the diagonal's that a row sees, inclusive, -1 for unbounded; it narrows the mask.
    softmax_offset: attention sink, [H_q] or [1, H_q, 1, 1] fp32: one more logit a head in the softmax's denominator.
    dropout_p: probability of dropping an attention weight, drawn from torch's current generator of the device.
    deterministic: the same inputs give bitwise the same gradients (the forward always does), at the cost of workspace.
    return_lse: also return lse [T_q, H_q] fp32: natural-log softmax normaliser, sink included, at the rows of the
        stats port; -inf in padding and for rows that see no key.  Not differentiable.
    return_max_logit: also return [H_q] fp32, the largest scaled logit of the real rows over the keys they see.
    out: [T_o, H_q, D_v] to write into, needed where O's offsets reach past T_q rows; it is returned.
    plan: "auto", or "reference", "cudnn", "cudnn:<part of an engine's name>" to insist on one.

    Returns out [T_q, H_q, D_v], or (out, lse), (out, max_logit), (out, lse, max_logit).  Rows between, before and after
    sequences are exactly 0 in out and in the gradients of q, k and v, whatever the inputs and the incoming gradient hold
    there, NaN included; so are rows that see no key.

    Raises TypeError or ValueError before anything is launched, naming the argument.  Device values are not checked
    (`te_thd_bridge.debug_checks` does) and nothing synchronises; every call can be captured in a CUDA graph once the same
    call has run.  Differentiable in q, k, v and softmax_offset.
    """
    if softmax_offset is not None:
        if not isinstance(softmax_offset, Tensor):
            raise TypeError(f"softmax_offset: got {type(softmax_offset).__name__}; accepted is a float32 tensor")
        if softmax_offset.dim() == 4 and softmax_offset.shape[0] == softmax_offset.shape[2] == softmax_offset.shape[3] == 1:
            softmax_offset = softmax_offset.reshape(-1)
    options = Options(mask, scale, window if type(window) is tuple else _pair(window), dropout_p, deterministic, return_max_logit, plan)
    if torch.compiler.is_compiling():
        out, lse, max_logit = traced_attention(q, k, v, layout, options, softmax_offset, out)
    else:
        if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(layout, ThdLayout)):
            check(q, k, v, layout, options)
        if not (out is None or isinstance(out, Tensor)):
            check(q, k, v, layout, options, out=out)
        rng_state = execution.draw_rng_state(q.device) if dropout_p else None
        if torch.is_grad_enabled() and _requires_grad(q, k, v, softmax_offset):
            out, lse, max_logit = _Attention.apply(q, k, v, softmax_offset, out, rng_state, layout, options)
        else:
            out, lse, max_logit, _ = execution.forward(
                q, k, v, layout, options, softmax_offset=softmax_offset, rng_state=rng_state, out=out, needs_lse=return_lse
            )
    if not (return_lse or return_max_logit):
        return out
    return (out, *((lse,) if return_lse else ()), *((max_logit,) if return_max_logit else ()))


def _pair(window) -> tuple[int, int]:
    try:
        left, right = window
    except (TypeError, ValueError):
        raise TypeError(f"window: got {window!r}; accepted is a pair of ints (left, right)") from None
    return left, right


def _requires_grad(q, k, v, softmax_offset) -> bool:
    return q.requires_grad or k.requires_grad or v.requires_grad or (softmax_offset is not None and softmax_offset.requires_grad)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, softmax_offset, out, rng_state, layout, options):
        given_out = out
        out, lse, max_logit, call = execution.forward(
            q, k, v, layout, options, softmax_offset=softmax_offset, rng_state=rng_state, out=out, needs_backward=True
        )
        if given_out is not None:
            ctx.mark_dirty(given_out)
        ctx.save_for_backward(q, k, v, out, lse, softmax_offset, rng_state)
        ctx.layout, ctx.call = layout, call
        ctx.mark_non_differentiable(*(statistic for statistic in (lse, max_logit) if statistic is not None))
        ctx.set_materialize_grads(False)
        return out, lse, max_logit

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, _lse_gradient, _max_logit_gradient):
        if do is None:
            return (None,) * 8
        q, k, v, out, lse, softmax_offset, rng_state = ctx.saved_tensors
        dq, dk, dv, d_sink = execution.backward(
            q,
            k,
            v,
            out,
            lse,
            do,
            ctx.layout,
            ctx.call,
            softmax_offset=softmax_offset,
            rng_state=rng_state,
            needs_sink_gradient=ctx.needs_input_grad[3],
        )
        return dq, dk, dv, d_sink, None, None, None, None
