"""Plain-torch twins of the kernels: same arguments, same results, any device, values read on the host."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from ..spec import Band
from .types import Metadata, Origins


def live_range(n_q: int, n_kv: int, band: Band) -> tuple[int, int]:
    """(first live row, live length) of a sequence; (0, 0) where no row sees a key."""
    shift = n_kv - n_q if band.bottom_right else 0
    first = max(0, -band.right - shift) if band.right >= 0 else 0
    end = min(n_q, n_kv + band.left - shift) if band.left >= 0 else n_q
    return (first, end - first) if n_kv > 0 and end > first else (0, 0)


def widen(cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, groups: Sequence[Origins], band: Band, into: Metadata, ragged: Sequence[tuple[int, int]]) -> None:
    prefix_q, prefix_kv = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
    live_q = [live_range(prefix_q[i + 1] - prefix_q[i], prefix_kv[i + 1] - prefix_kv[i], band) for i in range(into.batch)]
    live_kv = [prefix_kv[i + 1] - prefix_kv[i] if live_q[i][1] else 0 for i in range(into.batch)]
    idle = [0] * (into.capacity - into.batch)
    into.lengths.copy_(torch.tensor([[n for _, n in live_q] + idle, live_kv + idle], dtype=torch.int32))
    into.cu_lengths[:, 0] = 0
    into.cu_lengths[:, 1:] = into.lengths.cumsum(1)
    for g, group in enumerate(groups):
        values = [value * group.numerator // group.denominator for value in group.values.tolist()]
        if group.side == "q":
            ranges = [(values[i] + first, n) for i, (first, n) in enumerate(live_q)]
        else:
            ranges = [(values[i], n) for i, n in enumerate(live_kv)]
        behind = values[into.batch] if len(values) > into.batch else sum(ranges[-1]) if ranges else 0
        starts = [start for start, _ in ranges] + [behind] * len(idle)
        into.origins[g] = torch.tensor(starts, dtype=torch.int64)
        for r, (ragged_group, stride) in enumerate(ragged):
            if ragged_group == g:
                into.ragged[r] = torch.tensor([*starts, behind], dtype=torch.int64) * stride
        _write_gaps(ranges, group.rows, into.gap_starts[g], into.gap_ends_cum[g])


def _write_gaps(ranges: list[tuple[int, int]], rows: int, gap_starts: Tensor, gap_ends_cum: Tensor) -> None:
    starts, sizes, reached = [0] * len(ranges), [0] * len(ranges), 0
    in_buffer_order = sorted((i for i, (_, length) in enumerate(ranges) if length > 0), key=lambda i: ranges[i])
    for i in in_buffer_order:
        start, length = ranges[i]
        starts[i], sizes[i] = reached, max(0, min(start, rows) - reached)
        reached = min(rows, max(reached, start + length))
    idle = [0] * (len(gap_starts) - len(ranges) - 1)
    gap_starts.copy_(torch.tensor([*starts, *idle, reached]))
    gap_ends_cum[0] = 0
    gap_ends_cum[1:] = torch.tensor([*sizes, *idle, rows - reached]).cumsum(0)


def gap_rows(metadata: Metadata, group: int) -> Tensor:
    """Indices of a group's gap rows, ascending."""
    ends = metadata.gap_ends_cum[group].tolist()
    pieces = [torch.arange(start, start + after - before) for start, before, after in zip(metadata.gap_starts[group].tolist(), ends, ends[1:])]
    return torch.cat(pieces).sort().values.to(metadata.gap_starts.device)


def clear(targets: Sequence[tuple[Tensor, int, float]], metadata: Metadata) -> None:
    for tensor, group, fill in targets:
        tensor[gap_rows(metadata, group)] = fill


def live_rows(metadata: Metadata, group: int, side: int) -> Tensor:
    """Indices of a group's live rows, sequence after sequence; side 0 is q, 1 is kv."""
    ranges = zip(metadata.origins[group].tolist(), metadata.lengths[side].tolist())
    pieces = [torch.arange(start, start + length) for start, length in ranges]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *pieces]).to(metadata.origins.device)


def gather_rows(source: Tensor, out: Tensor, metadata: Metadata, group: int, side: int) -> None:
    rows = live_rows(metadata, group, side)
    out[: len(rows)] = source[rows]
    out[len(rows) :] = 0


def scatter_rows(packed: Tensor, out: Tensor, metadata: Metadata, group: int, side: int, fill: float) -> None:
    rows = live_rows(metadata, group, side)
    out.fill_(fill)
    out[rows] = packed[: len(rows)]


def sanitise_rows(source: Tensor, out: Tensor, metadata: Metadata, group: int, side: int) -> None:
    rows = live_rows(metadata, group, side)
    out.zero_()
    out[rows] = source[rows]


def scrub_(targets: Sequence[tuple[Tensor, int]], metadata: Metadata) -> None:
    for tensor, group in targets:
        rows = gap_rows(metadata, group)
        held = tensor[rows]
        tensor[rows] = torch.where(held.isfinite(), held, torch.zeros_like(held))


def gap_sequences(metadata: Metadata, group_q: int, group_kv: int, lengths: Tensor, exact: Tensor) -> None:
    lengths.zero_()
    exact.fill_(1)
    for side, group in enumerate((group_q, group_kv)):
        total = metadata.gap_ends_cum[group, :-1]
        live = metadata.lengths[side] > 0
        derived = total[1:] + metadata.cu_lengths[side, :-1]
        exact &= (derived == metadata.origins[group])[live].all().to(torch.int32)
        lengths[side, side::3] = total.diff().to(torch.int32)
        lengths[side, 2::3] = metadata.lengths[side]
    lengths *= exact


def key_intervals(metadata: Metadata, group_q: int, band: Band, first_key: Tensor, end_key: Tensor) -> None:
    first_key.zero_()
    end_key.zero_()
    for start, n, m in zip(metadata.origins[group_q].tolist(), *metadata.lengths.tolist()):
        position = torch.arange(n, device=first_key.device) + (m - n if band.bottom_right else 0)
        first_key[start : start + n] = (position - band.left).clamp(min=0) if band.left >= 0 else 0
        end_key[start : start + n] = (position + band.right + 1).clamp(max=m) if band.right >= 0 else m
