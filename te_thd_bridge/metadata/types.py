"""What the offset kernels take and give.

Legend: B sequences, C capacity (a bucket of at least B), G groups of ports that share where their sequences start.

A row is *live* when it sees a key; under a band the live rows of a sequence are contiguous.  Everything else in a buffer
is a *gap* row: rows between, before and after sequences, and real rows that see nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

#: q k v o stats do dq dk dv: no attention binds more.
MAX_GROUPS = 9


@dataclass(frozen=True, eq=False)
class Origins:
    """Where one group of ports starts each sequence.

    values: int32 or int64, [B] or [B+1]; sequence i starts at row values[i] * numerator // denominator.
    side:   "q" or "kv", the lengths that go with it.
    rows:   T, the row count of the group's tensors.
    """

    values: Tensor
    numerator: int
    denominator: int
    side: str
    rows: int


@dataclass(slots=True)
class Metadata:
    """The widened metadata of a layout, on the device; int64 but for lengths.

    lengths:      int32 [2, C], live lengths of q and kv; 0 past B.
    cu_lengths:   [2, C+1], their running totals from 0.
    origins:      [G, C], row of each sequence's first live row.
    gap_starts:   [G, C+1], first row of each gap; together the gaps are what no live row takes of [0, rows).
                  Where sequences lie in index order, gap i is what lies before sequence i and the last one is the tail.
    gap_ends_cum: [G, C+2], running totals of the gaps' sizes from 0; the last is the number of gap rows.
    ragged:       [R, C+1], element offsets: origins times a row stride, the end of the last sequence behind them.
    """

    batch: int
    capacity: int
    lengths: Tensor
    cu_lengths: Tensor
    origins: Tensor
    gap_starts: Tensor
    gap_ends_cum: Tensor
    ragged: Tensor
