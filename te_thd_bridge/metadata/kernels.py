"""Triton kernels of device offset consumption; `reference` has their plain-torch twins.

All row and element arithmetic is int64.  Sizes that change from batch to batch are not specialised, so that a training
run compiles each kernel once.  Values that break the layout's promises never lead to a write outside a tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

# One group's parameters are plain integers (Triton has no arrays of pointers): address and width of its values, fraction,
# entries, side, rows.
_GROUP_FIELDS = ("address", "wide", "numerator", "denominator", "entries", "of_kv", "rows")
_UNSPECIALISED = (
    ["batch", "capacity", "left", "right"]
    + [f"{field}{g}" for g in range(9) for field in _GROUP_FIELDS]
    + [f"ragged_{field}{r}" for r in range(9) for field in ("group", "stride")]
)
# Rows of the metadata, whose alignment changes with the capacity and the group: no reason to compile again.
_UNALIGNED = [
    "lengths", "cu_lengths", "origins", "gap_starts", "gap_ends_cum", "ragged", "starts_row", "ends_row",
    "cu_q", "cu_kv", "origins_q", "origins_kv", "ends_q", "ends_kv", "out_q", "out_kv", "ordered", "first_key", "end_key",
]  # fmt: skip


@triton.jit
def _pick(g, a0, a1, a2, a3, a4, a5, a6, a7, a8):
    """The g-th of nine integers, as int64."""
    low = tl.where(g == 0, a0, tl.where(g == 1, a1, tl.where(g == 2, a2, tl.where(g == 3, a3, a4))))
    high = tl.where(g == 5, a5, tl.where(g == 6, a6, tl.where(g == 7, a7, a8)))
    return tl.where(g < 5, low.to(tl.int64), high.to(tl.int64))


@triton.jit
def _load_index(address, wide, i, mask):
    """Entry i of an int32 or int64 vector."""
    if wide != 0:
        value = tl.load(address.to(tl.pointer_type(tl.int64)) + i, mask, other=0)
    else:
        value = tl.load(address.to(tl.pointer_type(tl.int32)) + i, mask, other=0).to(tl.int64)
    return value


@triton.jit
def _live(cu_q, cu_kv, i, mask, left, right, bottom_right: tl.constexpr):
    """(first live row within the sequence, live length of q, live length of kv)."""
    n_q = tl.load(cu_q + i + 1, mask, other=0).to(tl.int64) - tl.load(cu_q + i, mask, other=0).to(tl.int64)
    n_kv = tl.load(cu_kv + i + 1, mask, other=0).to(tl.int64) - tl.load(cu_kv + i, mask, other=0).to(tl.int64)
    shift = n_kv - n_q if bottom_right else n_kv * 0
    first = tl.where(right >= 0, tl.maximum(-right - shift, 0), 0)
    end = tl.where(left >= 0, tl.minimum(n_q, n_kv + left - shift), n_q)
    alive = (n_kv > 0) & (end > first)
    return tl.where(alive, first, 0), tl.where(alive, end - first, 0), tl.where(alive, n_kv, 0)


@triton.jit
def _range(cu_q, cu_kv, address, wide, numerator, denominator, of_kv, i, mask, left, right, bottom_right: tl.constexpr):
    """(row of the first live row, live length) of sequence i in a group."""
    first, n_q, n_kv = _live(cu_q, cu_kv, i, mask, left, right, bottom_right)
    start = _load_index(address, wide, i, mask) * numerator // denominator
    return tl.where(of_kv != 0, start, start + first), tl.where(of_kv != 0, n_kv, n_q)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _write_lengths(cu_q, cu_kv, lengths, cu_lengths, batch, capacity, left, right, bottom_right: tl.constexpr, block: tl.constexpr):
    lane = tl.arange(0, block)
    total_q = tl.sum(tl.zeros([block], tl.int64), 0)
    total_kv = total_q
    tl.store(cu_lengths, total_q)
    tl.store(cu_lengths + capacity + 1, total_kv)
    for base in range(0, capacity, block):
        i = base + lane
        _, n_q, n_kv = _live(cu_q, cu_kv, i, i < batch, left, right, bottom_right)
        kept = i < capacity
        tl.store(lengths + i, n_q.to(tl.int32), kept)
        tl.store(lengths + capacity + i, n_kv.to(tl.int32), kept)
        tl.store(cu_lengths + i + 1, total_q + tl.cumsum(n_q, 0), kept)
        tl.store(cu_lengths + capacity + 1 + i + 1, total_kv + tl.cumsum(n_kv, 0), kept)
        total_q += tl.sum(n_q, 0)
        total_kv += tl.sum(n_kv, 0)


@triton.jit(do_not_specialize=_UNSPECIALISED, do_not_specialize_on_alignment=_UNALIGNED)
def widen(
    cu_q, cu_kv, lengths, cu_lengths, origins, gap_starts, gap_ends_cum, ragged, batch, capacity, left, right,
    address0, wide0, numerator0, denominator0, entries0, of_kv0, rows0,
    address1, wide1, numerator1, denominator1, entries1, of_kv1, rows1,
    address2, wide2, numerator2, denominator2, entries2, of_kv2, rows2,
    address3, wide3, numerator3, denominator3, entries3, of_kv3, rows3,
    address4, wide4, numerator4, denominator4, entries4, of_kv4, rows4,
    address5, wide5, numerator5, denominator5, entries5, of_kv5, rows5,
    address6, wide6, numerator6, denominator6, entries6, of_kv6, rows6,
    address7, wide7, numerator7, denominator7, entries7, of_kv7, rows7,
    address8, wide8, numerator8, denominator8, entries8, of_kv8, rows8,
    ragged_group0, ragged_stride0, ragged_group1, ragged_stride1, ragged_group2, ragged_stride2,
    ragged_group3, ragged_stride3, ragged_group4, ragged_stride4, ragged_group5, ragged_stride5,
    ragged_group6, ragged_stride6, ragged_group7, ragged_stride7, ragged_group8, ragged_stride8,
    bottom_right: tl.constexpr, n_ragged: tl.constexpr, block: tl.constexpr, pairs: tl.constexpr,
):  # fmt: skip
    """One program a group; the first also writes the lengths."""
    g = tl.program_id(0)
    address = _pick(g, address0, address1, address2, address3, address4, address5, address6, address7, address8)
    wide = _pick(g, wide0, wide1, wide2, wide3, wide4, wide5, wide6, wide7, wide8)
    numerator = _pick(g, numerator0, numerator1, numerator2, numerator3, numerator4, numerator5, numerator6, numerator7, numerator8)
    denominator = _pick(g, denominator0, denominator1, denominator2, denominator3, denominator4, denominator5, denominator6, denominator7, denominator8)
    entries = _pick(g, entries0, entries1, entries2, entries3, entries4, entries5, entries6, entries7, entries8)
    of_kv = _pick(g, of_kv0, of_kv1, of_kv2, of_kv3, of_kv4, of_kv5, of_kv6, of_kv7, of_kv8)
    rows = _pick(g, rows0, rows1, rows2, rows3, rows4, rows5, rows6, rows7, rows8)
    g64 = g.to(tl.int64)
    lane = tl.arange(0, block)

    if g == 0:
        _write_lengths(cu_q, cu_kv, lengths, cu_lengths, batch, capacity, left, right, bottom_right, block)

    # What lies behind the last sequence: its own entry of a [B+1] vector, or its end.
    last = tl.maximum(batch - 1, 0)
    last_start, last_length = _range(cu_q, cu_kv, address, wide, numerator, denominator, of_kv, last, batch > 0, left, right, bottom_right)
    behind = last_start + last_length
    if entries > batch:
        behind = _load_index(address, wide, batch, True) * numerator // denominator

    # Gaps, as long as the sequences lie in index order: each reaches from the end of what came before.
    total = rows * 0
    reached = rows * 0
    disorder = rows * 0
    starts_row = gap_starts + g64 * (capacity + 1)
    ends_row = gap_ends_cum + g64 * (capacity + 2)
    tl.store(ends_row, total)
    for base in range(0, capacity, block):
        i = base + lane
        known = i < batch
        kept = i < capacity
        start, length = _range(cu_q, cu_kv, address, wide, numerator, denominator, of_kv, i, known, left, right, bottom_right)
        placed = tl.where(known, start, behind)
        tl.store(origins + g64 * capacity + i, placed, kept)
        for r in range(0, n_ragged):
            group = _pick(r, ragged_group0, ragged_group1, ragged_group2, ragged_group3, ragged_group4, ragged_group5, ragged_group6, ragged_group7, ragged_group8)
            stride = _pick(r, ragged_stride0, ragged_stride1, ragged_stride2, ragged_stride3, ragged_stride4, ragged_stride5, ragged_stride6, ragged_stride7, ragged_stride8)
            if group == g64:
                row = ragged + (capacity + g64 * 0 + 1) * r
                tl.store(row + i, placed * stride, kept)
                tl.store(row + capacity, behind * stride)
        earlier = known & (i > 0)
        start_before, length_before = _range(
            cu_q, cu_kv, address, wide, numerator, denominator, of_kv, tl.maximum(i - 1, 0), earlier, left, right, bottom_right
        )
        end_before = tl.where(earlier & (length_before > 0), start_before + length_before, 0)
        before = tl.maximum(tl.associative_scan(end_before, 0, _larger), reached)
        live = known & (length > 0)
        disorder += tl.sum((live & (start < before)).to(tl.int64), 0)
        gap_start = tl.minimum(before, rows)
        size = tl.where(live, tl.maximum(tl.minimum(start, rows) - gap_start, 0), 0)
        tl.store(starts_row + i, gap_start, kept)
        tl.store(ends_row + i + 1, total + tl.cumsum(size, 0), kept)
        total += tl.sum(size, 0)
        reached = tl.maximum(reached, tl.max(tl.where(live, start + length, 0), 0))
    reached = tl.minimum(reached, rows)

    if disorder > 0:
        # Any order: a gap reaches from each end to the nearest start behind it, which costs B^2 comparisons.  An end that lies
        # within another sequence, or that an earlier sequence shares, opens no gap, so that no row is listed twice.
        total = rows * 0
        reached = rows * 0
        nearest = rows
        few = tl.arange(0, pairs)
        for base in range(0, capacity, pairs):
            i = base + few
            start, length = _range(cu_q, cu_kv, address, wide, numerator, denominator, of_kv, i, i < batch, left, right, bottom_right)
            live = (i < batch) & (length > 0)
            end = start + length
            nearest = tl.minimum(nearest, tl.min(tl.where(live, start, rows), 0))
            until = tl.zeros([pairs], tl.int64) + rows
            covered = tl.zeros([pairs], tl.int32)
            for other_base in range(0, batch, pairs):
                j = other_base + few
                other, other_length = _range(cu_q, cu_kv, address, wide, numerator, denominator, of_kv, j, j < batch, left, right, bottom_right)
                other_live = ((j < batch) & (other_length > 0))[None, :]
                other_end = (other + other_length)[None, :]
                ahead = other_live & (other[None, :] >= end[:, None])
                until = tl.minimum(until, tl.min(tl.where(ahead, other[None, :], rows), 1))
                within = (other[None, :] < end[:, None]) & (other_end > end[:, None])
                shared = (other_end == end[:, None]) & (j[None, :] < i[:, None])
                covered = tl.maximum(covered, tl.max((other_live & (within | shared)).to(tl.int32), 1))
            gap_start = tl.minimum(tl.maximum(end, 0), rows)
            size = tl.where(live & (covered == 0), tl.maximum(until - gap_start, 0), 0)
            kept = i < capacity
            tl.store(starts_row + i, gap_start, kept)
            tl.store(ends_row + i + 1, total + tl.cumsum(size, 0), kept)
            total += tl.sum(size, 0)
        # The last entry is the rows before the first sequence here, the rows behind the last one otherwise.
        tl.store(starts_row + capacity, reached)
        tl.store(ends_row + capacity + 1, total + tl.maximum(nearest, 0))
    else:
        tl.store(starts_row + capacity, reached)
        tl.store(ends_row + capacity + 1, total + rows - reached)


@triton.jit
def sequence_of(rank, cu_lengths, capacity, steps: tl.constexpr):
    """The sequence that holds each live row number: the last whose running total does not exceed it, by bisection."""
    low = tl.zeros_like(rank).to(tl.int32)
    high = low + capacity - 1
    for _ in tl.static_range(steps):
        middle = (low + high + 1) // 2
        starts_before = tl.load(cu_lengths + middle) <= rank
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle - 1)
    return low


@triton.jit
def live_row(rank, cu_lengths, origins, capacity, steps: tl.constexpr):
    """The row of a group's tensors that is live row number ``rank``."""
    sequence = sequence_of(rank, cu_lengths, capacity, steps)
    return tl.load(origins + sequence) + rank - tl.load(cu_lengths + sequence)


@triton.jit
def gap_row(rank, starts_row, ends_row, capacity, steps: tl.constexpr):
    """The row that is gap row number ``rank``: bisection over the running totals of the gaps' sizes."""
    low = tl.zeros_like(rank).to(tl.int32)
    high = low + capacity
    for _ in tl.static_range(steps):
        middle = (low + high + 1) // 2
        starts_before = tl.load(ends_row + middle) <= rank
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle - 1)
    return tl.load(starts_row + low) + rank - tl.load(ends_row + low)


@triton.jit
def column_offset(column, head_width: tl.constexpr, head_stride):
    """Elements between a row's start and its columns; int64, because heads may lie further apart than rows."""
    return (column // head_width).to(tl.int64) * head_stride + column % head_width


@triton.jit
def _clear(
    target, fill, row_stride, head_stride, width, starts_row, ends_row, capacity,
    head_width: tl.constexpr, steps: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    total = tl.load(ends_row + capacity + 1)
    value = tl.full([tile_rows, tile_columns], 0.0, tl.float32) + fill
    for first in range(tl.program_id(0).to(tl.int64) * tile_rows, total, tl.num_programs(0) * tile_rows):
        rank = first + tl.arange(0, tile_rows)
        listed = rank < total
        row = gap_row(tl.minimum(rank, total - 1), starts_row, ends_row, capacity, steps)
        at = target + row * row_stride
        for left_column in range(0, width, tile_columns):
            column = left_column + tl.arange(0, tile_columns)
            offset = column_offset(column, head_width, head_stride)
            tl.store(at[:, None] + offset[None, :], value.to(target.dtype.element_ty), listed[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["group0", "group1", "group2", "capacity", "fill0", "fill1", "fill2"], do_not_specialize_on_alignment=_UNALIGNED)
def clear(
    gap_starts, gap_ends_cum, capacity,
    target0, group0, fill0, row_stride0, head_stride0, width0,
    target1, group1, fill1, row_stride1, head_stride1, width1,
    target2, group2, fill2, row_stride2, head_stride2, width2,
    head_width0: tl.constexpr, head_width1: tl.constexpr, head_width2: tl.constexpr, steps: tl.constexpr,
    tile_rows0: tl.constexpr, tile_columns0: tl.constexpr, tile_rows1: tl.constexpr, tile_columns1: tl.constexpr,
    tile_rows2: tl.constexpr, tile_columns2: tl.constexpr,
):  # fmt: skip
    """grid (programs, targets): write each target's fill into its gap rows, the rows shared out evenly."""
    which = tl.program_id(1)
    if which == 0:
        starts, ends = gap_starts + group0 * (capacity + 1), gap_ends_cum + group0 * (capacity + 2)
        _clear(target0, fill0, row_stride0, head_stride0, width0, starts, ends, capacity, head_width0, steps, tile_rows0, tile_columns0)
    elif which == 1:
        starts, ends = gap_starts + group1 * (capacity + 1), gap_ends_cum + group1 * (capacity + 2)
        _clear(target1, fill1, row_stride1, head_stride1, width1, starts, ends, capacity, head_width1, steps, tile_rows1, tile_columns1)
    else:
        starts, ends = gap_starts + group2 * (capacity + 1), gap_ends_cum + group2 * (capacity + 2)
        _clear(target2, fill2, row_stride2, head_stride2, width2, starts, ends, capacity, head_width2, steps, tile_rows2, tile_columns2)


@triton.jit(do_not_specialize=["capacity", "source_rows", "rows", "fill"], do_not_specialize_on_alignment=_UNALIGNED)
def move(
    source, out, cu_lengths, origins, starts_row, ends_row, capacity, source_rows, rows, fill,
    source_row, source_head, out_row, out_head, width,
    head_width: tl.constexpr, from_packed: tl.constexpr, to_packed: tl.constexpr,
    steps: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """Copy live rows between a padded and a packed buffer or two padded ones, and fill the other rows of out."""
    rank = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    live_total = tl.load(cu_lengths + capacity)
    live = rank < live_total
    padded = live_row(rank, cu_lengths, origins, capacity, steps)
    read = rank if from_packed else padded
    if to_packed:
        write, kept = rank, rank < rows
    else:
        gap_total = tl.load(ends_row + capacity + 1)
        gap = rank - live_total
        listed = (gap >= 0) & (gap < gap_total)
        write = tl.where(live, padded, gap_row(tl.where(listed, gap, 0), starts_row, ends_row, capacity, steps))
        kept = (live | listed) & (write >= 0) & (write < rows)
    readable = live & (read >= 0) & (read < source_rows)
    value_of_gap = (tl.zeros([1, 1], tl.float32) + fill).to(out.dtype.element_ty)
    for left_column in range(0, width, tile_columns):
        column = left_column + tl.arange(0, tile_columns)
        inside = (column < width)[None, :]
        read_at = column_offset(column, head_width, source_head)
        write_at = column_offset(column, head_width, out_head)
        value = tl.load(source + read[:, None] * source_row + read_at[None, :], readable[:, None] & inside, other=0.0)
        value = tl.where(live[:, None], value, value_of_gap)
        tl.store(out + write[:, None] * out_row + write_at[None, :], value, kept[:, None] & inside)


@triton.jit
def _scrub(
    target, row_stride, head_stride, width, starts_row, ends_row, capacity,
    head_width: tl.constexpr, steps: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    # A finite double may be infinite in float32.
    exact: tl.constexpr = tl.float64 if target.dtype.element_ty == tl.float64 else tl.float32
    total = tl.load(ends_row + capacity + 1)
    for first in range(tl.program_id(0).to(tl.int64) * tile_rows, total, tl.num_programs(0) * tile_rows):
        rank = first + tl.arange(0, tile_rows)
        listed = rank < total
        row = gap_row(tl.minimum(rank, total - 1), starts_row, ends_row, capacity, steps)
        for left_column in range(0, width, tile_columns):
            column = left_column + tl.arange(0, tile_columns)
            at = target + row[:, None] * row_stride + column_offset(column, head_width, head_stride)[None, :]
            inside = listed[:, None] & (column < width)[None, :]
            finite = tl.abs(tl.load(at, inside, other=0.0).to(exact)) < float("inf")
            tl.store(at, tl.zeros([tile_rows, tile_columns], target.dtype.element_ty), inside & ~finite)


@triton.jit(do_not_specialize=["group0", "group1", "group2", "capacity"], do_not_specialize_on_alignment=_UNALIGNED)
def scrub(
    gap_starts, gap_ends_cum, capacity,
    target0, group0, row_stride0, head_stride0, width0, target1, group1, row_stride1, head_stride1, width1,
    target2, group2, row_stride2, head_stride2, width2,
    head_width0: tl.constexpr, head_width1: tl.constexpr, head_width2: tl.constexpr, steps: tl.constexpr,
    tile_rows0: tl.constexpr, tile_columns0: tl.constexpr, tile_rows1: tl.constexpr, tile_columns1: tl.constexpr,
    tile_rows2: tl.constexpr, tile_columns2: tl.constexpr,
):  # fmt: skip
    """grid (programs, targets): overwrite what isn't finite in each target's gap rows with 0, reading nothing else."""
    which = tl.program_id(1)
    if which == 0:
        starts, ends = gap_starts + group0 * (capacity + 1), gap_ends_cum + group0 * (capacity + 2)
        _scrub(target0, row_stride0, head_stride0, width0, starts, ends, capacity, head_width0, steps, tile_rows0, tile_columns0)
    elif which == 1:
        starts, ends = gap_starts + group1 * (capacity + 1), gap_ends_cum + group1 * (capacity + 2)
        _scrub(target1, row_stride1, head_stride1, width1, starts, ends, capacity, head_width1, steps, tile_rows1, tile_columns1)
    else:
        starts, ends = gap_starts + group2 * (capacity + 1), gap_ends_cum + group2 * (capacity + 2)
        _scrub(target2, row_stride2, head_stride2, width2, starts, ends, capacity, head_width2, steps, tile_rows2, tile_columns2)


@triton.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=_UNALIGNED)
def gap_sequences(
    out_q, out_kv, ordered, cu_q, cu_kv, origins_q, origins_kv, ends_q, ends_kv, capacity, block: tl.constexpr,
):  # fmt: skip
    """One program: (gap of q, 0), (0, gap of kv), (len_q, len_kv) for every sequence, and whether that is exact."""
    lane = tl.arange(0, block)
    misplaced = tl.sum(tl.zeros([block], tl.int32), 0)
    for base in range(0, capacity, block):
        i = base + lane
        kept = i < capacity
        for side in tl.static_range(2):
            cu = cu_q if side == 0 else cu_kv
            ends = ends_q if side == 0 else ends_kv
            origins = origins_q if side == 0 else origins_kv
            before = tl.load(cu + i, kept, other=0)
            length = tl.load(cu + i + 1, kept, other=0) - before
            gaps = tl.load(ends + i + 1, kept, other=0)
            derived = gaps + before
            misplaced += tl.sum((kept & (length > 0) & (derived != tl.load(origins + i, kept, other=0))).to(tl.int32), 0)
    exact = misplaced == 0
    for base in range(0, capacity, block):
        i = base + lane
        kept = i < capacity
        for side in tl.static_range(2):
            cu = cu_q if side == 0 else cu_kv
            ends = ends_q if side == 0 else ends_kv
            out = out_q if side == 0 else out_kv
            length = tl.load(cu + i + 1, kept, other=0) - tl.load(cu + i, kept, other=0)
            gap = tl.load(ends + i + 1, kept, other=0) - tl.load(ends + i, kept, other=0)
            tl.store(out + 3 * i + side, tl.where(exact, gap, 0).to(tl.int32), kept)
            tl.store(out + 3 * i + 1 - side, tl.zeros([block], tl.int32), kept)
            tl.store(out + 3 * i + 2, tl.where(exact, length, 0).to(tl.int32), kept)
    tl.store(ordered, exact.to(tl.int32))


@triton.jit(do_not_specialize=["capacity", "rows", "left", "right"], do_not_specialize_on_alignment=_UNALIGNED)
def key_intervals(
    first_key, end_key, cu_q, cu_kv, origins, starts_row, ends_row, capacity, rows, left, right,
    bottom_right: tl.constexpr, steps: tl.constexpr, tile_rows: tl.constexpr,
):  # fmt: skip
    rank = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    live_total = tl.load(cu_q + capacity)
    live = rank < live_total
    sequence = sequence_of(rank, cu_q, capacity, steps)
    start = tl.load(cu_q + sequence)
    position = rank - start
    keys = tl.load(cu_kv + sequence + 1) - tl.load(cu_kv + sequence)
    if bottom_right:
        position += keys - (tl.load(cu_q + sequence + 1) - start)
    low = tl.where(left >= 0, tl.maximum(position - left, 0), 0)
    high = tl.where(right >= 0, tl.minimum(position + right + 1, keys), keys)
    gap = rank - live_total
    listed = (gap >= 0) & (gap < tl.load(ends_row + capacity + 1))
    row = tl.where(live, tl.load(origins + sequence) + rank - start, gap_row(tl.where(listed, gap, 0), starts_row, ends_row, capacity, steps))
    kept = (live | listed) & (row >= 0) & (row < rows)
    tl.store(first_key + row, tl.where(live, low, 0).to(tl.int32), kept)
    tl.store(end_key + row, tl.where(live, high, 0).to(tl.int32), kept)
