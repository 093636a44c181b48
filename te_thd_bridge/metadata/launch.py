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
_MAX_TARGETS = 3
_TILE_ELEMENTS = 4096
_PROGRAMS_PER_MULTIPROCESSOR = 4


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
        block=min(_MAX_BLOCK, max(16, triton.next_power_of_2(capacity))),
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
    arguments, tiles, flat = [], [], True
    for tensor, group, fill in targets:
        row_stride, head_stride, width, head_width = _geometry(tensor)
        arguments += [tensor, group, fill, row_stride, head_stride, width, head_width]
        flat = flat and head_stride == head_width
        columns = min(_TILE_ELEMENTS, triton.next_power_of_2(width))
        tiles += [max(1, _TILE_ELEMENTS // columns), columns]
    idle = _MAX_TARGETS - len(targets)
    kernels.clear[(_programs(targets[0][0].device), len(targets))](
        metadata.gap_starts,
        metadata.gap_ends_cum,
        metadata.capacity,
        *arguments,
        *(arguments[:7] * idle),
        flat,
        (metadata.capacity + 1).bit_length(),
        *tiles,
        *(tiles[:2] * idle),
    )


def _geometry(tensor: Tensor) -> tuple[int, int, int, int]:
    """(row stride, head stride, elements of a row, elements of a head); a head is what lies contiguously."""
    if tensor.dim() == 2:
        return tensor.stride(0), tensor.shape[1], tensor.shape[1], tensor.shape[1]
    _, heads, channels = tensor.shape
    return tensor.stride(0), tensor.stride(1), heads * channels, channels


@functools.lru_cache(maxsize=None)
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return _PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
