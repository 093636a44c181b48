"""The offset kernels where sizes cross a block, a tile, 32 bits or the layout's promises, and their twins."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from te_thd_bridge import metadata
from te_thd_bridge.metadata import launch, reference
from te_thd_bridge.metadata.types import Origins
from te_thd_bridge.spec import Band

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


def prefix(lengths, dtype=torch.int32):
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=dtype, device=DEVICE)


def widen(lengths, starts, rows, capacity=None, band=Band(), ragged=()):
    """One group that follows q, and the same starts for keys."""
    cu, values = prefix(lengths), torch.tensor(starts, dtype=torch.int64, device=DEVICE)
    groups = [Origins(values, 1, 1, side, rows) for side in ("q", "kv")]
    return metadata.widen(cu, cu, groups, band, capacity or max(1, len(lengths)), ragged)


def outside(lengths, starts, rows):
    taken = {row for start, length in zip(starts, lengths) for row in range(start, start + length)}
    return [row for row in range(rows) if row not in taken]


@st.composite
def batches(draw, max_batch):
    """(lengths, starts, rows) of sequences that lie apart, in any order."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 5]), min_size=max_batch // 2, max_size=max_batch))
    order = list(range(len(lengths)))
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    at, starts = draw(st.integers(0, 2)), [0] * len(lengths)
    for i in order:
        starts[i] = at
        at += lengths[i] + draw(st.sampled_from([0, 2]))
    return lengths, starts, at + draw(st.sampled_from([0, 3]))


@contextmanager
def patched(**values):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(launch, name, value)
        yield


def small_blocks():
    """Blocks and tiles so small that every loop of every kernel runs more than once."""
    return patched(_MAX_BLOCK=16, _PAIRS=16, _TILE_ELEMENTS=64, _INTERVAL_ROWS=16)


def twins():
    return patched(runs_kernels=lambda tensor: False)


bands = st.builds(Band, st.sampled_from([-1, 0, 2]), st.sampled_from([-1, 0, 1]), st.booleans())


@settings(max_examples=6, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(batches(45))
def test_gaps_are_listed_once_where_a_batch_spans_several_blocks(batch):
    lengths, starts, rows = batch
    with small_blocks():
        made = widen(lengths, starts, rows, len(lengths) + 3, ragged=[(0, 8)])
    assert reference.gap_rows(made, 0).tolist() == outside(lengths, starts, rows)
    assert made.cu_lengths[0].tolist() == prefix(lengths).tolist() + [sum(lengths)] * 3
    assert made.ragged[0, : len(lengths)].tolist() == [8 * start for start in starts]


# A thousand cross a block in order; out of order a CPU compares every pair, so fewer do there.
@pytest.mark.parametrize("batch, reverse", [(1100, False), (200, True), pytest.param(3000, True, marks=pytest.mark.gpu)])
def test_gaps_of_many_sequences(batch, reverse):
    lengths, rows = [i % 3 for i in range(batch)], 4 * batch + 100
    starts = [4 * i + 1 for i in range(batch)]
    if reverse:
        starts.reverse()
    made = widen(lengths, starts, rows, batch + 40)
    assert reference.gap_rows(made, 0).tolist() == outside(lengths, starts, rows)
    assert int(made.gap_ends_cum[0, -1]) == len(outside(lengths, starts, rows))


@pytest.mark.parametrize(
    "lengths, starts",
    [([10, 3], [0, 5]), ([3, 10], [5, 0]), ([4, 4, 4], [2, 2, 2]), ([6, 6], [0, 3]), ([6, 6], [3, 0]), ([5, 8, 2], [3, 0, 8])],
)
def test_rows_of_sequences_that_overlap_are_never_gaps(lengths, starts):
    made = widen(lengths, starts, 14)
    gaps = outside(lengths, starts, 14)
    assert reference.gap_rows(made, 0).tolist() == gaps
    with twins():
        assert reference.gap_rows(widen(lengths, starts, 14), 0).tolist() == gaps


# Shrinking through the interpreter takes minutes; the drawn case is small enough to read.
@settings(max_examples=4, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(batches(18), bands, st.booleans())
def test_every_kernel_equals_its_twin(batch, band, heads_apart):
    lengths, starts, rows = batch
    source = torch.randn(rows, 4, 24, device=DEVICE)[:, :3] if heads_apart else torch.randn(rows, 3, 24, device=DEVICE)
    source[outside(lengths, starts, rows)] = NAN

    def everything(made):
        packed, scattered, sanitised = (torch.full((rows + extra, 3, 24), 7.0, device=DEVICE) for extra in (2, 0, 0))
        cleared, scrubbed = source.clone(), source.clone()
        statistics = torch.full((rows, 3), 7.0, device=DEVICE)
        metadata.gather_rows(source, packed, made, 0, "q")
        metadata.scatter_rows(packed, scattered, made, 0, "q")
        metadata.sanitise_rows(source, sanitised, made, 1, "kv")
        metadata.scatter_rows(packed[:, :, 0].contiguous(), statistics, made, 0, "q", float("-inf"))
        if rows:
            metadata.clear([(cleared, 0, 3.0), (statistics[:, :2], 0, 1.0)], made)
            metadata.scrub_([(scrubbed, 0)], made)
        made_of = (*metadata.gap_sequences(made, 0, 1), *metadata.key_intervals(made, 0, band, rows))
        return [packed, scattered, sanitised, cleared, scrubbed, statistics, *made_of]

    with small_blocks():
        made = widen(lengths, starts, rows, len(lengths) + 1, band, [(0, 72)])
        from_kernels = everything(made)
    with twins():
        again = widen(lengths, starts, rows, len(lengths) + 1, band, [(0, 72)])
        from_twins = everything(again)
    for g in range(2):
        assert torch.equal(reference.gap_rows(made, g), reference.gap_rows(again, g))
    for kernel, twin in zip(from_kernels, from_twins, strict=True):
        assert torch.equal(kernel.nan_to_num(99.0), twin.nan_to_num(99.0))


def test_heads_further_apart_than_2_to_the_31_elements_are_addressed_right():
    # [H, T, D] storage seen as [T, H, D]: the head stride fits 32 bits, its multiples do not.  Only the pages that are touched cost memory.
    heads, apart = 32, 80_000_000
    storage = torch.empty(heads * apart, dtype=torch.float16, device=DEVICE)
    target = storage.as_strided((8, heads, 8), (8, apart, 1))
    target.fill_(1)
    target[3:] = NAN
    made = widen([3], [0], 8)
    copy, back = (torch.full((8, heads, 8), 7.0, dtype=torch.float16, device=DEVICE) for _ in range(2))
    metadata.gather_rows(target, copy, made, 0, "q")
    metadata.sanitise_rows(target, back, made, 0, "q")
    assert (copy[:3] == 1).all() and torch.equal(copy, back)
    metadata.scrub_([(target, 0)], made)
    assert torch.equal(target, copy)
    metadata.clear([(target, 0, 5.0)], made)
    assert (target[:3] == 1).all() and (target[3:] == 5).all()


@pytest.mark.parametrize("as_twin", [False, True])
def test_gap_sequences_are_exact_where_an_empty_sequence_comes_first(as_twin):
    with patched(**({"runs_kernels": lambda tensor: False} if as_twin else {})):
        lengths, exact = metadata.gap_sequences(widen([0, 2, 2], [0, 1, 5], 9), 0, 1)
    assert exact.item() == 1
    assert lengths.tolist() == [[0, 0, 0, 1, 0, 2, 2, 0, 2], [0, 0, 0, 0, 1, 2, 0, 2, 2]]


@pytest.mark.parametrize("starts", [[2, 18], [-3, 9], [2, 900]])
def test_copies_of_sequences_that_reach_outside_a_tensor_stay_within_it(starts):
    made = widen([4, 4], starts, 20)

    def guarded(value):
        memory = torch.full((60, 2, 8), 5.0, device=DEVICE)
        memory[20:40] = value
        return memory, memory[20:40]

    _, source = guarded(1.0)
    for write in (
        lambda out: metadata.sanitise_rows(source, out, made, 0, "q"),
        lambda out: metadata.scatter_rows(source, out, made, 0, "q"),
        lambda out: metadata.gather_rows(source, out, made, 0, "q"),
    ):
        memory, out = guarded(9.0)
        write(out)
        assert (memory[:20] == 5).all() and (memory[40:] == 5).all(), "wrote outside"
        assert not (out == 5).any(), "read outside"
    if max(starts) < 20:
        first, _ = metadata.key_intervals(made, 0, Band(), 20)
        assert first.shape == (20,)


def test_finite_doubles_are_not_scrubbed():
    made = widen([2], [0], 6)
    tensor = torch.full((6, 1, 8), 1e300, dtype=torch.float64, device=DEVICE)
    tensor[4, 0, 3] = float("inf")
    metadata.scrub_([(tensor, 0)], made)
    assert tensor[4, 0, 3] == 0 and (tensor == 1e300).sum() == 6 * 8 - 1


@pytest.mark.parametrize("tensor", [torch.ones(3, 6).T, torch.ones(6, 8, 2).transpose(1, 2)])
def test_a_last_dimension_that_is_not_contiguous_is_refused(tensor):
    with pytest.raises(ValueError, match="stride 1"):
        metadata.clear([(tensor.to(DEVICE), 0, 0.0)], widen([2], [0], 6))


def launch_everything(batch=64, length=200, slot=256, heads=8, channels=128):
    """The tensors of one batch of the usual size and a function that launches widen, clear and every copy on them."""
    lengths, starts, rows = prefix([length] * batch), prefix([slot] * batch), batch * slot
    source = torch.randn(rows, heads, channels, device=DEVICE).to(torch.bfloat16)
    source.view(batch, slot, heads, channels)[:, length:] = NAN
    packed, padded, cleared = torch.empty_like(source), torch.empty_like(source), source.clone()

    def call():
        groups = [Origins(starts, 1, 1, side, rows) for side in ("q", "kv")]
        made = metadata.widen(lengths, lengths, groups, Band(-1, 0), batch, [(0, heads * channels)])
        metadata.gather_rows(source, packed, made, 0, "q")
        metadata.scatter_rows(packed, padded, made, 0, "q")
        metadata.clear([(cleared, 1, 0.0)], made)
        return made

    return source, padded, cleared, starts, lengths, call


@pytest.mark.gpu
def test_a_captured_graph_reads_the_values_of_its_replay():
    source, padded, cleared, starts, lengths, call = launch_everything()
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lengths.copy_(prefix([100] * 64))
    padded.fill_(7.0)
    graph.replay()
    real = (torch.arange(64 * 256, device=DEVICE) % 256) < 100
    assert torch.equal(padded[real], source[real]) and (padded[~real] == 0).all()
    assert (cleared[~real] == 0).all() and torch.equal(cleared[real], source[real])
