"""Launches of the offset kernels: outputs, grids and tile sizes.  Nothing here reads a device value."""

from __future__ import annotations

import functools
import os
from typing import Sequence

import torch
import triton
from torch import Tensor

from ..spec import Band
from . import kernels, reference
from .types import MAX_GROUPS, Metadata, Origins

_MAX_BLOCK = 1024
# Sequences compared at a time where they lie in no order: 64 spill registers (sm_90, Triton 3.2 and 3.7), 32 do not.
_PAIRS = 32
_MAX_TARGETS = 3
_TILE_ELEMENTS = 4096
_PROGRAMS_PER_MULTIPROCESSOR = 4
_INTERVAL_ROWS = 256
_SIDES = ("q", "kv")


def runs_kernels(tensor: Tensor) -> bool:
    """Whether Triton kernels run on this tensor: on CUDA, or on a CPU through Triton's interpreter."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def widen(
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    groups: Sequence[Origins],
    band: Band,
    capacity: int,
    ragged: Sequence[tuple[int, int]],
) -> Metadata:
    """The widened metadata of everything bound, in one launch.

    cu_seqlens_q, cu_seqlens_kv: int32 or int64 [B+1].  groups: at most 9.  capacity: at least B.
    ragged: (group, row stride in elements) of each wanted vector of element offsets, at most 9.

    Values that break a layout's promises give other numbers, never an access outside a tensor by the other functions of
    this package.  Synchronises nowhere and can be captured.
    """
    if not 1 <= len(groups) <= MAX_GROUPS or len(ragged) > MAX_GROUPS:
        raise ValueError(f"groups, ragged: got {len(groups)} and {len(ragged)}; accepted are 1 to {MAX_GROUPS} and up to {MAX_GROUPS}")
    into = _allocate(cu_seqlens_q, len(groups), capacity, len(ragged))
    if not runs_kernels(cu_seqlens_q):
        reference.widen(cu_seqlens_q, cu_seqlens_kv, groups, band, into, ragged)
        return into
    fields: list[int] = []
    for group in groups:
        values = group.values
        fields += [values.data_ptr(), values.dtype == torch.int64, group.numerator, group.denominator, values.shape[0], group.side == "kv", group.rows]
    fields += [0] * (7 * (MAX_GROUPS - len(groups)))
    for group, stride in ragged:
        fields += [group, stride]
    fields += [0] * (2 * (MAX_GROUPS - len(ragged)))
    kernels.widen[(len(groups),)](
        cu_seqlens_q,
        cu_seqlens_kv,
        into.lengths,
        into.cu_lengths,
        into.origins,
        into.gap_starts,
        into.gap_ends_cum,
        into.ragged,
        into.batch,
        capacity,
        band.left,
        band.right,
        *(int(field) for field in fields),
        bottom_right=band.bottom_right,
        n_ragged=len(ragged),
        block=_block(capacity),
        pairs=_PAIRS,
    )
    return into


def _allocate(cu_seqlens_q: Tensor, groups: int, capacity: int, ragged: int) -> Metadata:
    device = cu_seqlens_q.device
    shapes = ((2, capacity + 1), (groups, capacity), (groups, capacity + 1), (groups, capacity + 2), (ragged, capacity + 1))
    sizes = [rows * columns for rows, columns in shapes]
    pieces = torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes)
    lengths = torch.empty((2, capacity), dtype=torch.int32, device=device)
    return Metadata(cu_seqlens_q.shape[0] - 1, capacity, lengths, *(piece.view(shape) for piece, shape in zip(pieces, shapes)))


def clear(targets: Sequence[tuple[Tensor, int, float]], metadata: Metadata) -> None:
    """Write a value into the gap rows of up to three tensors, and touch no other row, in one launch.

    targets: (tensor [T, H, D] or [T, H] with channels of stride 1, its group, the value).
    The cost is that of writing the gap rows; it does not depend on how they are spread.
    """
    if not runs_kernels(targets[0][0]):
        reference.clear(targets, metadata)
        return
    arguments, widths, tiles = [], [], []
    for tensor, group, fill in targets:
        row_stride, head_stride, width, head_width = _geometry(tensor)
        arguments += [tensor, group, fill, row_stride, head_stride, width]
        widths.append(head_width)
        tiles += _tile(width)
    idle = _MAX_TARGETS - len(targets)
    kernels.clear[(_programs(targets[0][0].device), len(targets))](
        metadata.gap_starts,
        metadata.gap_ends_cum,
        metadata.capacity,
        *arguments,
        *(arguments[:6] * idle),
        *widths,
        *(widths[:1] * idle),
        _steps(metadata),
        *tiles,
        *(tiles[:2] * idle),
    )


def gather_rows(source: Tensor, out: Tensor, metadata: Metadata, group: int, side: str) -> None:
    """Packed copy: the live rows of a padded tensor, sequence after sequence from row 0 on; zeros behind them.

    source: [T, H, D] or [T, H], channels of stride 1.  out: the same but for the number of rows.  side: "q" or "kv",
    whose lengths the rows have.
    """
    index = _SIDES.index(side)
    if not runs_kernels(source):
        reference.gather_rows(source, out, metadata, group, index)
        return
    _move(source, out, metadata, group, index, 0.0, from_packed=False, to_packed=True)


def scatter_rows(packed: Tensor, out: Tensor, metadata: Metadata, group: int, side: str, fill: float = 0.0) -> None:
    """The inverse of `gather_rows`; gap rows of out get ``fill`` in the same pass."""
    index = _SIDES.index(side)
    if not runs_kernels(packed):
        reference.scatter_rows(packed, out, metadata, group, index, fill)
        return
    _move(packed, out, metadata, group, index, fill, from_packed=True, to_packed=False)


def sanitise_rows(source: Tensor, out: Tensor, metadata: Metadata, group: int, side: str) -> None:
    """out = source at live rows and 0 at gap rows, whatever source holds there."""
    index = _SIDES.index(side)
    if not runs_kernels(source):
        reference.sanitise_rows(source, out, metadata, group, index)
        return
    _move(source, out, metadata, group, index, 0.0, from_packed=False, to_packed=False)


def scrub_(targets: Sequence[tuple[Tensor, int]], metadata: Metadata) -> None:
    """Overwrite with 0, in place, what isn't finite in the gap rows of up to three tensors; one launch, live rows unread."""
    if not runs_kernels(targets[0][0]):
        reference.scrub_(targets, metadata)
        return
    arguments, widths, tiles = [], [], []
    for tensor, group in targets:
        row_stride, head_stride, width, head_width = _geometry(tensor)
        arguments += [tensor, group, row_stride, head_stride, width]
        widths.append(head_width)
        tiles += _tile(width)
    idle = _MAX_TARGETS - len(targets)
    kernels.scrub[(_programs(targets[0][0].device), len(targets))](
        metadata.gap_starts,
        metadata.gap_ends_cum,
        metadata.capacity,
        *arguments,
        *(arguments[:5] * idle),
        *widths,
        *(widths[:1] * idle),
        _steps(metadata),
        *tiles,
        *(tiles[:2] * idle),
    )


def gap_sequences(metadata: Metadata, group_q: int, group_kv: int) -> tuple[Tensor, Tensor]:
    """Lengths whose running totals are the bound origins, for lowerings that derive starts from lengths.

    Returns (lengths int32 [2, 3C], exact int32 [1]).  Sequence i becomes (gap of q before it, 0), (0, gap of kv before
    it), (len_q, len_kv); rows behind the last sequence need no entry.  exact is 0, and all lengths are 0, where the
    sequences of a group don't lie in index order.
    """
    capacity, device = metadata.capacity, metadata.origins.device
    lengths = torch.empty((2, 3 * capacity), dtype=torch.int32, device=device)
    exact = torch.empty((1,), dtype=torch.int32, device=device)
    if not runs_kernels(lengths):
        reference.gap_sequences(metadata, group_q, group_kv, lengths, exact)
        return lengths, exact
    kernels.gap_sequences[(1,)](
        lengths[0],
        lengths[1],
        exact,
        metadata.cu_lengths[0],
        metadata.cu_lengths[1],
        metadata.origins[group_q],
        metadata.origins[group_kv],
        metadata.gap_ends_cum[group_q],
        metadata.gap_ends_cum[group_kv],
        capacity,
        _block(capacity),
    )
    return lengths, exact


def key_intervals(metadata: Metadata, group_q: int, band: Band, rows: int) -> tuple[Tensor, Tensor]:
    """int32 [rows] each: the half-open interval of keys, within its sequence, that a row sees; (0, 0) at gap rows."""
    first_key, end_key = torch.empty((2, rows), dtype=torch.int32, device=metadata.origins.device)
    if not runs_kernels(first_key):
        reference.key_intervals(metadata, group_q, band, first_key, end_key)
        return first_key, end_key
    kernels.key_intervals[(triton.cdiv(rows, _INTERVAL_ROWS),)](
        first_key,
        end_key,
        metadata.cu_lengths[0],
        metadata.cu_lengths[1],
        metadata.origins[group_q],
        metadata.gap_starts[group_q],
        metadata.gap_ends_cum[group_q],
        metadata.capacity,
        rows,
        band.left,
        band.right,
        band.bottom_right,
        _steps(metadata),
        _INTERVAL_ROWS,
    )
    return first_key, end_key


def _move(source: Tensor, out: Tensor, metadata: Metadata, group: int, side: int, fill: float, *, from_packed: bool, to_packed: bool) -> None:
    rows = out.shape[0]
    source_row, source_head, width, head_width = _geometry(source)
    out_row, out_head, _, _ = _geometry(out)
    tile_rows, tile_columns = _tile(width)
    if rows == 0:
        return
    kernels.move[(triton.cdiv(rows, tile_rows),)](
        source,
        out,
        metadata.cu_lengths[side],
        metadata.origins[group],
        metadata.gap_starts[group],
        metadata.gap_ends_cum[group],
        metadata.capacity,
        source.shape[0],
        rows,
        fill,
        source_row,
        source_head,
        out_row,
        out_head,
        width,
        head_width,
        from_packed,
        to_packed,
        _steps(metadata),
        tile_rows,
        tile_columns,
    )


def _tile(width: int) -> tuple[int, int]:
    """(rows, columns) of a program's tile: whole rows where they are narrow."""
    columns = min(_TILE_ELEMENTS, triton.next_power_of_2(width))
    return max(1, _TILE_ELEMENTS // columns), columns


def _steps(metadata: Metadata) -> int:
    """Bisection steps that tell C+1 entries apart; the capacity is a bucket, so few kernels are compiled."""
    return (metadata.capacity + 1).bit_length()


def _block(capacity: int) -> int:
    return min(_MAX_BLOCK, max(16, triton.next_power_of_2(capacity)))


def _geometry(tensor: Tensor) -> tuple[int, int, int, int]:
    """(row stride, head stride, elements of a row, elements of a head); a head is what lies contiguously."""
    if tensor.dim() == 2:
        heads, channels, head_stride = 1, tensor.shape[1], tensor.shape[1]
    else:
        heads, channels, head_stride = tensor.shape[1], tensor.shape[2], tensor.stride(1)
    if tensor.stride(-1) != 1 and channels > 1:
        raise ValueError(f"tensor: got strides {tensor.stride()}; accepted is a last dimension of stride 1")
    return tensor.stride(0), head_stride, heads * channels, channels


@functools.lru_cache(maxsize=None)
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return _PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
