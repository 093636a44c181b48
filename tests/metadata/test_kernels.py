"""Every kernel against a brute-force reading of its contract, and against its plain-torch twin.

On a CPU the real kernels run through Triton's interpreter.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_thd_bridge import metadata
from te_thd_bridge.metadata import launch, reference
from te_thd_bridge.metadata.types import Origins
from te_thd_bridge.spec import Band

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXAMPLES = 60 if DEVICE == "cuda" else 20


@dataclass
class Case:
    """One drawn batch: lengths, where each group starts its sequences, and the tensors that say so."""

    n: list[int]
    m: list[int]
    starts: list[list[int]]
    rows: list[int]
    sides: list[str]
    groups: list[Origins]
    band: Band
    capacity: int
    cu_q: torch.Tensor
    cu_kv: torch.Tensor

    def visible(self, i: int, row: int) -> list[int]:
        """Keys that a row of sequence i sees, straight from the definition of a band."""
        shift = self.m[i] - self.n[i] if self.band.bottom_right else 0
        keys = []
        for key in range(self.m[i]):
            distance = key - (row + shift)
            if (self.band.left < 0 or distance >= -self.band.left) and (self.band.right < 0 or distance <= self.band.right):
                keys.append(key)
        return keys

    def live(self, side: str) -> list[list[int]]:
        """For every sequence the indices of its live rows (q), or of its keys if any row is live (kv)."""
        rows = [[row for row in range(n) if self.visible(i, row)] for i, n in enumerate(self.n)]
        return rows if side == "q" else [list(range(m)) if rows[i] else [] for i, m in enumerate(self.m)]

    def live_buffer_rows(self, g: int) -> list[list[int]]:
        return [[self.starts[g][i] + row for row in rows] for i, rows in enumerate(self.live(self.sides[g]))]

    def gap_buffer_rows(self, g: int) -> list[int]:
        taken = {row for rows in self.live_buffer_rows(g) for row in rows}
        return [row for row in range(self.rows[g]) if row not in taken]

    def widen(self, ragged=()):
        return metadata.widen(self.cu_q, self.cu_kv, self.groups, self.band, self.capacity, ragged)


@st.composite
def cases(draw, max_batch=12, ordered=False, sides=("q", "kv", "q")):
    batch = draw(st.integers(0, max_batch))
    lengths = st.lists(st.sampled_from([0, 0, 1, 3, 7, 12]), min_size=batch, max_size=batch)
    n = draw(lengths)
    m = n if draw(st.booleans()) else draw(lengths)
    starts, rows, groups = [], [], []
    for side in sides:
        length = n if side == "q" else m
        order = list(range(batch)) if ordered else draw(st.permutations(range(batch)) | st.just(list(range(batch))))
        at, start = draw(st.integers(0, 3)), [0] * batch
        for i in order:
            start[i] = at
            at += length[i] + draw(st.sampled_from([0, 0, 1, 5]))
        scale, divide = draw(st.sampled_from([(1, 1), (2, 1), (1, 4)]))
        if scale == 2:
            start = [2 * s for s in start]
            at = 2 * at
        values = [s // scale * divide for s in start] + ([at * divide] if draw(st.booleans()) else [])
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        starts.append(start)
        rows.append(at + draw(st.sampled_from([0, 6])))
        groups.append(Origins(torch.tensor(values, dtype=dtype, device=DEVICE), scale, divide, side, rows[-1]))
    band = Band(draw(st.sampled_from([-1, 0, 2, 5])), draw(st.sampled_from([-1, 0, 3])), draw(st.booleans()))
    dtype, first = draw(st.sampled_from([torch.int32, torch.int64])), draw(st.sampled_from([0, 5]))
    cu_q, cu_kv = (torch.tensor([first + sum(x[:i]) for i in range(batch + 1)], dtype=dtype, device=DEVICE) for x in (n, m))
    capacity = max(1, batch) + draw(st.sampled_from([0, 1, 5]))
    return Case(n, m, starts, rows, list(sides), groups, band, capacity, cu_q, cu_kv)


@settings(max_examples=EXAMPLES)
@given(cases())
def test_widen_lists_live_rows_origins_and_gaps(case):
    ragged = [(0, 24), (1, 8), (2, 3), (0, 5)]
    made = case.widen(ragged)
    idle = [0] * (case.capacity - len(case.n))
    for side, name in enumerate(("q", "kv")):
        lengths = [len(rows) for rows in case.live(name)] + idle
        assert made.lengths[side].tolist() == lengths
        assert made.cu_lengths[side].tolist() == [sum(lengths[:i]) for i in range(case.capacity + 1)]
    for g in range(len(case.groups)):
        for i, rows in enumerate(case.live_buffer_rows(g)):
            if rows:
                assert made.origins[g, i] == rows[0]
        listed = reference.gap_rows(made, g).tolist()
        assert listed == case.gap_buffer_rows(g), "gaps must list each row outside live ranges exactly once"
    for r, (g, stride) in enumerate(ragged):
        assert (made.ragged[r, : case.capacity] == made.origins[g] * stride).all()


@settings(max_examples=EXAMPLES)
@given(cases())
def test_widen_equals_its_twin_in_every_entry(case):
    ragged = [(0, 24), (2, 3)]
    made = case.widen(ragged)
    twin = launch._allocate(case.cu_q, len(case.groups), case.capacity, len(ragged))
    reference.widen(case.cu_q, case.cu_kv, case.groups, case.band, twin, ragged)
    for name in ("lengths", "cu_lengths", "origins", "ragged"):
        assert torch.equal(getattr(made, name), getattr(twin, name)), name


@settings(max_examples=EXAMPLES)
@given(cases())
def test_an_engine_given_the_live_range_computes_the_same_problem(case):
    made = case.widen()
    n_live, m_live = made.lengths.tolist()
    for i, rows in enumerate(case.live("q")):
        trimmed = Case([n_live[i]], [m_live[i]], [], [], [], [], case.band, 1, case.cu_q, case.cu_kv)
        for position, row in enumerate(rows):
            assert trimmed.visible(0, position) == case.visible(i, row)


def test_trailing_repeats_list_the_tail_once():
    prefix = torch.tensor([0, 3, 9] + [9] * 30, dtype=torch.int32, device=DEVICE)
    padded = torch.tensor([0, 4, 12] + [12] * 30, dtype=torch.int32, device=DEVICE)
    made = metadata.widen(prefix, prefix, [Origins(padded, 1, 1, "q", 20)], Band(-1, 0), 48, [])
    assert reference.gap_rows(made, 0).tolist() == [3, 10, 11, *range(12, 20)]
    assert int(made.gap_ends_cum[0, -1]) == 11


def test_offsets_past_2_to_the_31_elements_do_not_wrap():
    # The layout of TransformerEngine pull request 1230: 4200 sequences of 128 tokens, 32 heads of 128.
    prefix = torch.arange(0, 4201, dtype=torch.int32, device=DEVICE) * 128
    made = metadata.widen(prefix, prefix, [Origins(prefix, 1, 1, "q", 537600)], Band(-1, 0), 6144, [(0, 4096)])
    assert int(made.ragged[0, 4199]) == 4199 * 128 * 4096 == 2201485312
    assert (made.ragged[0].diff() >= 0).all()


def test_int32_values_are_widened_before_they_are_scaled():
    values = torch.tensor([0, 2_000_000_000], dtype=torch.int32, device=DEVICE)
    prefix = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    made = metadata.widen(prefix, prefix, [Origins(values, 3, 1, "q", 7_000_000_000)], Band(), 2, [(0, 128)])
    assert made.origins[0].tolist() == [0, 6_000_000_000]
    assert made.ragged[0, 1] == 768_000_000_000


def test_values_that_break_the_promises_never_lead_outside_a_tensor():
    prefix = torch.tensor([0, 50, 30, 90], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([7, -20, 900], dtype=torch.int64, device=DEVICE)
    guarded = torch.full((40, 2, 8), 5.0, device=DEVICE)
    target = guarded[10:30]
    made = metadata.widen(prefix, prefix, [Origins(starts, 1, 1, "q", 20)], Band(), 4, [])
    metadata.clear([(target, 0, 0.0)], made)
    assert (guarded[:10] == 5.0).all() and (guarded[30:] == 5.0).all()


def tensors(case, g, *, flat, dtype=torch.float32, heads=3, channels=8, fill=float("nan")):
    """A padded tensor of a group with random live rows and ``fill`` elsewhere; not flat: heads lie apart."""
    base = torch.randn(case.rows[g], heads + (not flat), channels, device=DEVICE).to(dtype)
    tensor = base[:, :heads]
    tensor[case.gap_buffer_rows(g)] = fill
    return tensor


@settings(max_examples=EXAMPLES)
@given(cases(), st.booleans())
def test_clear_writes_gap_rows_and_nothing_else(case, flat):
    made = case.widen()
    targets = [(tensors(case, g, flat=flat), g, float(g) - 1) for g in range(3)]
    wanted = [target.clone() for target, _, _ in targets]
    for tensor, (_, g, fill) in zip(wanted, targets):
        tensor[case.gap_buffer_rows(g)] = fill
    if min(case.rows) > 0:
        metadata.clear(targets, made)
        for tensor, (target, _, _) in zip(wanted, targets):
            assert torch.equal(tensor, target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_clear_writes_any_dtype_and_row_statistics(dtype):
    prefix = torch.tensor([0, 5, 9], dtype=torch.int32, device=DEVICE)
    padded = torch.tensor([0, 8, 12], dtype=torch.int32, device=DEVICE)
    made = metadata.widen(prefix, prefix, [Origins(padded, 1, 1, "q", 14)], Band(), 3, [])
    values, statistics = torch.ones(14, 2, 24, dtype=dtype, device=DEVICE), torch.ones(14, 2, device=DEVICE)
    metadata.clear([(values, 0, 0.0), (statistics, 0, float("-inf"))], made)
    gaps = [5, 6, 7, 12, 13]
    assert (values[gaps] == 0).all() and (statistics[gaps] == float("-inf")).all()
    assert values.sum() == 9 * 48 and statistics[[0, 4, 8, 11]].sum() == 8


@settings(max_examples=EXAMPLES)
@given(cases(), st.booleans(), st.integers(0, 2))
def test_gather_then_scatter_returns_live_rows_and_zeros(case, flat, g):
    made, side = case.widen(), case.sides[g]
    source = tensors(case, g, flat=flat)
    live = [row for rows in case.live_buffer_rows(g) for row in rows]
    packed = torch.full((case.rows[g] + 2, 3, 8), 7.0, device=DEVICE)
    metadata.gather_rows(source, packed, made, g, side)
    assert torch.equal(packed[: len(live)], source[live]) and (packed[len(live) :] == 0).all()
    out = torch.full((case.rows[g], 3, 8), 7.0, device=DEVICE)
    metadata.scatter_rows(packed, out, made, g, side)
    assert torch.equal(out[live], source[live]) and (out[case.gap_buffer_rows(g)] == 0).all()


def test_scatter_fills_statistics_with_their_own_value():
    prefix = torch.tensor([0, 2, 3], dtype=torch.int32, device=DEVICE)
    made = metadata.widen(prefix, prefix, [Origins(torch.tensor([4, 0], device=DEVICE), 1, 1, "q", 7)], Band(), 2, [])
    out = torch.full((7, 3), 9.0, device=DEVICE)
    metadata.scatter_rows(torch.arange(9.0, device=DEVICE).view(3, 3), out, made, 0, "q", float("-inf"))
    assert out[4:6].tolist() == [[0, 1, 2], [3, 4, 5]] and out[0].tolist() == [6, 7, 8]
    assert (out[[1, 2, 3, 6]] == float("-inf")).all()


@settings(max_examples=EXAMPLES)
@given(cases(), st.booleans(), st.integers(0, 2))
def test_sanitised_copies_hold_no_padding(case, flat, g):
    source = tensors(case, g, flat=flat)
    out = torch.full((case.rows[g], 3, 8), 7.0, device=DEVICE)
    metadata.sanitise_rows(source, out, case.widen(), g, case.sides[g])
    live = [row for rows in case.live_buffer_rows(g) for row in rows]
    assert torch.equal(out[live], source[live]) and (out[case.gap_buffer_rows(g)] == 0).all()


@settings(max_examples=EXAMPLES)
@given(cases(), st.booleans(), st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_scrub_zeroes_what_is_not_finite_between_sequences_only(case, flat, fill):
    if min(case.rows) == 0:
        return
    targets = [(tensors(case, g, flat=flat, fill=3.0), g) for g in range(3)]
    for target, g in targets:
        target[case.gap_buffer_rows(g), 0, ::2] = fill
        live = [row for rows in case.live_buffer_rows(g) for row in rows]
        target[live[:1]] = fill  # a real row that holds it is the model's business
    wanted = [target.clone() for target, _ in targets]
    for tensor, (_, g) in zip(wanted, targets):
        gaps = case.gap_buffer_rows(g)
        tensor[gaps] = torch.where(tensor[gaps].isfinite(), tensor[gaps], torch.zeros_like(tensor[gaps]))
    metadata.scrub_(targets, case.widen())
    for tensor, (target, _) in zip(wanted, targets):
        assert torch.equal(tensor.nan_to_num(99.0), target.nan_to_num(99.0))


@settings(max_examples=EXAMPLES)
@given(cases(ordered=True, sides=("q", "kv")))
def test_gap_sequences_make_derived_starts_land_on_bound_offsets(case):
    made = case.widen()
    lengths, exact = metadata.gap_sequences(made, 0, 1)
    assert exact.item() == 1
    lengths_q, lengths_kv = lengths.tolist()
    assert len(lengths_q) == 3 * case.capacity
    for i, (rows, keys) in enumerate(zip(case.live_buffer_rows(0), case.live_buffer_rows(1))):
        entry = 3 * i + 2
        assert (lengths_q[entry], lengths_kv[entry]) == (len(rows), len(keys))
        if rows:
            assert sum(lengths_q[:entry]) == rows[0] and sum(lengths_kv[:entry]) == keys[0]
    for i, pair in enumerate(zip(lengths_q, lengths_kv)):
        assert i % 3 == 2 or 0 in pair, "a gap takes rows of one side only, so that it costs no work"


def test_gap_sequences_of_unordered_starts_are_refused_on_the_device():
    prefix = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
    groups = [Origins(torch.tensor([4, 0], device=DEVICE), 1, 1, "q", 8), Origins(prefix, 1, 1, "kv", 8)]
    lengths, exact = metadata.gap_sequences(metadata.widen(prefix, prefix, groups, Band(), 2, []), 0, 1)
    assert exact.item() == 0 and not lengths.any()


@settings(max_examples=EXAMPLES)
@given(cases())
def test_key_intervals_are_the_keys_a_row_sees(case):
    first, end = metadata.key_intervals(case.widen(), 0, case.band, case.rows[0])
    wanted = {row: (0, 0) for row in range(case.rows[0])}
    for i, n in enumerate(case.n):
        for row in range(n):
            keys = case.visible(i, row)
            if keys:
                wanted[case.starts[0][i] + row] = (keys[0], keys[-1] + 1)
    assert list(zip(first.tolist(), end.tolist())) == [wanted[row] for row in range(case.rows[0])]


@pytest.mark.gpu
def test_a_training_run_compiles_each_kernel_once():
    from te_thd_bridge.metadata import kernels

    def batch(n, rows):
        prefix = torch.arange(0, n + 1, dtype=torch.int32, device=DEVICE) * 3
        made = metadata.widen(prefix, prefix, [Origins(prefix, 1, 1, "q", rows)], Band(-1, 0), 64, [(0, 1024)])
        metadata.clear([(torch.empty(rows, 8, 128, device=DEVICE, dtype=torch.bfloat16), 0, 0.0)], made)

    batch(5, 1000)
    compiled = [len(kernel.device_caches[0][0]) for kernel in (kernels.widen, kernels.clear)]
    for n in range(1, 60):
        batch(n, 640 + 16 * n)
    assert [len(kernel.device_caches[0][0]) for kernel in (kernels.widen, kernels.clear)] == compiled


@pytest.mark.gpu
def test_rows_past_2_to_the_31_elements_are_addressed_right():
    rows, heads, channels = 537600, 32, 128
    prefix = torch.arange(0, 4201, dtype=torch.int32, device=DEVICE) * 128
    lengths = torch.arange(0, 4201, dtype=torch.int32, device=DEVICE) * 100
    made = metadata.widen(lengths, lengths, [Origins(prefix, 1, 1, "q", rows)], Band(), 6144, [])
    tensor = torch.ones(rows, heads, channels, dtype=torch.bfloat16, device=DEVICE)
    metadata.clear([(tensor, 0, 0.0)], made)
    by_row = tensor[:, :, 0].float().sum(1).view(4200, 128)
    assert (by_row[:, :100] == heads).all() and (by_row[:, 100:] == 0).all()
