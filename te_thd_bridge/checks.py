"""What can be said of a call's arguments without a look at the device; every message names the argument."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from .layout import ThdLayout
from .plans.select import PLAN_NAMES
from .spec import MASKS, Band

#: cuDNN and the copy kernels move 16 bytes at a time.
ALIGNMENT_BYTES = 16


def band_of(mask: str, window: tuple[int, int]) -> Band:
    """The keys a mask and a window leave; a causal mask bounds the right side at the diagonal whatever the window says."""
    if not isinstance(mask, str) or mask not in MASKS:
        raise ValueError(f"mask: got {mask!r}; accepted are {', '.join(map(repr, MASKS))}")
    try:
        left, right = (operator.index(bound) for bound in window)
    except (TypeError, ValueError):
        raise TypeError(f"window: got {window!r}; accepted is a pair of ints (left, right)") from None
    if left < -1 or right < -1:
        raise ValueError(f"window: got {(left, right)}; accepted are tokens to the left and right of the diagonal, -1 for unbounded")
    mask_right, bottom_right = MASKS[mask]
    return Band(left, mask_right if mask_right >= 0 else right, bottom_right)


def check(q, k, v, layout, options, softmax_offset=None, out=None) -> None:
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
    if not isinstance(options.deterministic, bool):
        raise TypeError(f"deterministic: got {options.deterministic!r}; accepted are True and False")
    if not isinstance(options.plan, str) or (options.plan not in PLAN_NAMES and not options.plan.startswith("cudnn:")):
        raise ValueError(f"plan: got {options.plan!r}; accepted are {', '.join(map(repr, PLAN_NAMES))} and 'cudnn:' with part of an engine's name")
    _check_softmax_offset(softmax_offset, q, options)
    _check_out(out, q, v)


def check_address(out: Tensor) -> None:
    """Refuse an ``out`` that starts where an engine can't write; strides are `check`'s."""
    if out.is_cuda and out.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(f"out: got an address of {out.data_ptr() % ALIGNMENT_BYTES} modulo {ALIGNMENT_BYTES}; accepted is one on a {ALIGNMENT_BYTES}-byte boundary")


def _check_softmax_offset(softmax_offset: Any, q: Tensor, options) -> None:
    if softmax_offset is None:
        return
    by_reference = options.plan == "reference" or not q.is_cuda
    if softmax_offset.dtype != torch.float32 and not (by_reference and softmax_offset.dtype == torch.float64):
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
    if out.stride(-1) != 1 or (out.is_cuda and not all(strides_fit(out))):
        raise ValueError(
            f"out: got strides {out.stride()}; accepted is a last dimension of stride 1 and everything else on {ALIGNMENT_BYTES}-byte boundaries"
        )


def strides_fit(tensor: Tensor) -> tuple[bool, bool]:
    """Whether rows and heads of a [T, H, D] tensor lie where a kernel can read them."""
    unit = ALIGNMENT_BYTES // tensor.element_size()
    row, head, _ = tensor.stride()
    return row % unit == 0 and (row > 0 or tensor.shape[0] == 1), head % unit == 0 and (head > 0 or tensor.shape[1] == 1)
