"""Row statistics around a graph: Stats in the padded form that some engines want, the sink and its gradient.

Legend: T rows, H heads, D channels, B sequences, S the graph's length bound.  A live row is one that an engine computes;
live row number r of the batch is row r - cu_lengths[s] of sequence s (see `te_thd_bridge.metadata`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..metadata import Metadata, runs_kernels
from ..metadata.kernels import sequence_of
from . import BackwardTensors

_ROWS = 32


@triton.jit(do_not_specialize=["batch", "lse_stride", "padded_rows"])
def _move_stats(lse, padded, cu_lengths, origins, batch, heads, lse_stride, padded_rows, to_padded: tl.constexpr, steps: tl.constexpr, rows: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    head = tl.program_id(1)
    live = row < tl.load(cu_lengths + batch)
    sequence = sequence_of(row, cu_lengths, batch, steps)
    position = row - tl.load(cu_lengths + sequence)
    packed_at = lse + (tl.load(origins + sequence) + position) * lse_stride + head
    padded_at = padded + (sequence.to(tl.int64) * heads + head) * padded_rows + position
    if to_padded:
        tl.store(padded_at, tl.load(packed_at, live), live)
    else:
        tl.store(packed_at, tl.load(padded_at, live), live)


def pad_stats(lse: Tensor, padded: Tensor, metadata: Metadata, group: int) -> None:
    """padded[b, h, i] = lse[start of b + i, h] for live rows; lse [T, H] fp32, padded [B, H, S] fp32."""
    _stats(lse, padded, metadata, group, to_padded=True)


def unpad_stats(padded: Tensor, lse: Tensor, metadata: Metadata, group: int) -> None:
    """lse[start of b + i, h] = padded[b, h, i] for live rows; the other rows of lse are left alone."""
    _stats(lse, padded, metadata, group, to_padded=False)


def _stats(lse: Tensor, padded: Tensor, metadata: Metadata, group: int, *, to_padded: bool) -> None:
    if not runs_kernels(lse):
        for b, (start, length) in enumerate(_live_ranges(metadata, group)):
            if to_padded:
                padded[b, :, :length] = lse[start : start + length].T
            else:
                lse[start : start + length] = padded[b, :, :length].T
        return
    grid = (triton.cdiv(lse.shape[0], _ROWS), lse.shape[1])
    _move_stats[grid](
        lse,
        padded,
        metadata.cu_lengths,
        metadata.origins[group],
        metadata.capacity,
        lse.shape[1],
        lse.stride(0),
        padded.shape[2],
        to_padded,
        _steps(metadata),
        _ROWS,
    )


@triton.jit(do_not_specialize=["batch", "o_row", "o_head", "do_row", "do_head", "lse_row"])
def _sink_partials(
    o, do, lse, sink, partials, cu_lengths, o_origins, do_origins, lse_origins, batch,
    heads, o_row, o_head, do_row, do_head, lse_row, dim, steps: tl.constexpr, rows: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    head = tl.program_id(1).to(tl.int64)
    live = row < tl.load(cu_lengths + batch)
    sequence = sequence_of(row, cu_lengths, batch, steps)
    position = row - tl.load(cu_lengths + sequence)
    channel = tl.arange(0, block_d)
    inside = live[:, None] & (channel < dim)[None, :]
    o_at = o + ((tl.load(o_origins + sequence) + position) * o_row + head * o_head)[:, None] + channel[None, :]
    do_at = do + ((tl.load(do_origins + sequence) + position) * do_row + head * do_head)[:, None] + channel[None, :]
    product = tl.load(o_at, inside, other=0.0).to(tl.float32) * tl.load(do_at, inside, other=0.0).to(tl.float32)
    normaliser = tl.load(lse + (tl.load(lse_origins + sequence) + position) * lse_row + head, live, other=float("inf"))
    weight = tl.exp(tl.load(sink + head) - normaliser)
    tl.store(partials + tl.program_id(0).to(tl.int64) * heads + head, -tl.sum(weight * tl.sum(product, 1), 0))


def sink_gradient(tensors: BackwardTensors, metadata: Metadata, group: dict[str, int]) -> None:
    """d_softmax_offset[h] = -sum over live rows of exp(softmax_offset[h] - lse) * (do . out), in fp32.

    The sink has no value vector, so its gradient is minus its weight times the row's gradient of the normaliser.  Partial
    sums are reduced in a fixed order: the result is deterministic.
    """
    o, do, lse, sink = tensors.out, tensors.do, tensors.lse, tensors.softmax_offset
    if not runs_kernels(o):
        total = torch.zeros_like(sink)
        ranges = (_live_ranges(metadata, group[port]) for port in ("o", "do", "stats"))
        for (o_start, n), (do_start, _), (lse_start, _) in zip(*ranges):
            products = (o[o_start : o_start + n].to(sink.dtype) * do[do_start : do_start + n].to(sink.dtype)).sum(-1)
            total -= ((sink - lse[lse_start : lse_start + n]).exp() * products).sum(0)
        tensors.d_softmax_offset.copy_(total)
        return
    grid = (triton.cdiv(lse.shape[0], _ROWS), o.shape[1])
    partials = torch.empty(grid, dtype=torch.float32, device=o.device)
    origins = metadata.origins
    _sink_partials[grid](
        o, do, lse, sink, partials, metadata.cu_lengths, origins[group["o"]], origins[group["do"]], origins[group["stats"]],
        metadata.capacity, o.shape[1], o.stride(0), o.stride(1), do.stride(0), do.stride(1), lse.stride(0), o.shape[2],
        _steps(metadata), _ROWS, triton.next_power_of_2(o.shape[2]),
    )  # fmt: skip
    torch.sum(partials, 0, out=tensors.d_softmax_offset)


@triton.jit(do_not_specialize=["batch", "o_row", "o_head", "lse_row"])
def _scale_by_sink(
    o, lse, sink, cu_lengths, o_origins, lse_origins, batch, o_row, o_head, lse_row, dim,
    steps: tl.constexpr, rows: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    head = tl.program_id(1).to(tl.int64)
    live = row < tl.load(cu_lengths + batch)
    sequence = sequence_of(row, cu_lengths, batch, steps)
    position = row - tl.load(cu_lengths + sequence)
    lse_at = lse + (tl.load(lse_origins + sequence) + position) * lse_row + head
    normaliser, logit = tl.load(lse_at, live, other=0.0), tl.load(sink + head)
    largest = tl.maximum(normaliser, logit)
    total = largest + tl.log(tl.exp(normaliser - largest) + tl.exp(logit - largest))
    channel = tl.arange(0, block_d)
    inside = live[:, None] & (channel < dim)[None, :]
    o_at = o + ((tl.load(o_origins + sequence) + position) * o_row + head * o_head)[:, None] + channel[None, :]
    value = tl.load(o_at, inside, other=0.0).to(tl.float32) * tl.exp(normaliser - total)[:, None]
    tl.store(o_at, value.to(o.dtype.element_ty), inside)
    tl.store(lse_at, total, live)


def add_sink(out: Tensor, lse: Tensor, sink: Tensor, metadata: Metadata, out_group: int, lse_group: int) -> None:
    """Turn a softmax without a sink into one with it, in place at live rows.

    The sink adds exp(sink[h]) to a row's denominator and nothing to its numerator: out shrinks by
    exp(lse - logaddexp(lse, sink)) and lse becomes logaddexp(lse, sink).
    """
    if not runs_kernels(out):
        for (o_start, n), (lse_start, _) in zip(_live_ranges(metadata, out_group), _live_ranges(metadata, lse_group)):
            rows = lse[lse_start : lse_start + n]
            total = torch.logaddexp(rows, sink.expand_as(rows))
            out[o_start : o_start + n] *= (rows - total).exp()[:, :, None].to(out.dtype)
            rows.copy_(total)
        return
    origins = metadata.origins
    _scale_by_sink[(triton.cdiv(lse.shape[0], _ROWS), out.shape[1])](
        out, lse, sink, metadata.cu_lengths, origins[out_group], origins[lse_group], metadata.capacity,
        out.stride(0), out.stride(1), lse.stride(0), out.shape[2], _steps(metadata), _ROWS, triton.next_power_of_2(out.shape[2]),
    )  # fmt: skip


def _live_ranges(metadata: Metadata, group: int) -> list[tuple[int, int]]:
    return list(zip(metadata.origins[group].tolist(), metadata.lengths[0].tolist()))


def _steps(metadata: Metadata) -> int:
    """Bisection steps that tell the sequences apart; the capacity is a bucket, so few kernels are compiled."""
    return metadata.capacity.bit_length()
