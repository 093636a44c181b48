"""Cases from public bug reports; each test is named for its symptom and cites the report.

They run through the plan that "auto" picks: cuDNN graphs on a GPU, the reference plan on a CPU.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from te_thd_bridge import RaggedOffset, ThdLayout, debug_checks, thd_attention
from te_thd_bridge.context_parallel import rank_rows
from te_thd_bridge.plans.select import plan_cache

from .layouts import NAN, Packed, prefix, relative

BF16 = torch.bfloat16
INF = float("inf")


def run(batch, device, *, heads, heads_kv, dim, dim_v=None, fill=NAN, fill_do=None, dtype=BF16, layout=None, **options):
    q, k, v = batch.qkv(heads, heads_kv, dim, dim_v or dim, dtype, device, fill)
    do = batch.random("o", heads, dim_v or dim, dtype, device, fill if fill_do is None else fill_do, seed=3)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = thd_attention(*leaves, layout or batch.layout(device), **options)
    return (out, *torch.autograd.grad(out, leaves, do)), batch.truth(q, k, v, do=do, **{a: b for a, b in options.items() if a in ("mask", "window")})


def assert_right(batch, got, true, tolerance=6e-3):
    for port, tensor, wanted in zip("oqkv", got, (true.out, true.dq, true.dk, true.dv)):
        assert relative(tensor, wanted) < tolerance, port
        assert (tensor[batch.padding(port)] == 0).all(), port


def test_pt01_identifier_tokens_between_sequences_do_not_shift_the_next_one(device):
    # NVIDIA/cudnn-frontend issue 737
    batch = Packed([3, 2, 4], [1, 2, 1])
    assert (prefix(batch.n), batch.padded_q, batch.padding("q")) == ([0, 3, 5, 9], [0, 4, 8, 13], [3, 6, 7, 12])
    shape = dict(heads=2, heads_kv=2, dim=128)
    first, true = run(batch, device, fill=50.0, fill_do=1.0, **shape)
    assert_right(batch, first, true)
    second, _ = run(batch, device, fill=-7.0, fill_do=1.0, **shape)
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
@pytest.mark.parametrize("gaps, tail", [([0, 0, 0], 243), ([56, 42, 17], 128)])
def test_pt02_a_tail_that_holds_nan_or_inf_does_not_reach_a_real_row(device, mask, gaps, tail):
    # NVIDIA/cudnn-frontend issues 718 and 624
    batch = Packed([200, 150, 47], gaps, tail=tail)
    runs = [run(batch, device, heads=8, heads_kv=8, dim=128, fill=fill, mask=mask) for fill in (NAN, INF, 0.0)]
    for got, true in runs:
        assert_right(batch, got, true)
        assert torch.equal(got[0], runs[2][0][0])


def test_pt03_padding_rows_are_zero_even_in_recycled_memory(device):
    # NVIDIA/TransformerEngine pull request 3205
    batch = Packed([3, 5], [1, 3], tail=4)
    assert batch.padding("q") == [3, 9, 10, 11, 12, 13, 14, 15]
    for _ in range(4):
        poison = [torch.full((16, 4, 64), NAN, dtype=BF16, device=device) for _ in range(8)]
        del poison
        got, true = run(batch, device, heads=4, heads_kv=2, dim=64, fill=0.7)
        assert_right(batch, got, true)
    # Real keys and values owe nothing to the incoming gradient of padding rows.
    (_, *gradients), _ = run(batch, device, heads=4, heads_kv=2, dim=64, fill=0.7, fill_do=-50.0)
    for a, b in zip(gradients, got[1:]):
        assert relative(a, b.double()) < 1e-3


def test_pt03_projections_get_finite_gradients_where_capacity_is_reserved(device):
    batch, heads = Packed([144, 288, 512], [0, 0, 0], tail=2), 16
    x = batch.random("q", 1, 64, torch.float32, device, fill=0.3)[:, 0].requires_grad_()
    weight = torch.randn(3 * heads * 64, 64, device=device, generator=torch.Generator(device).manual_seed(0)).mul_(0.1).requires_grad_()
    q, k, v = (x.to(BF16) @ weight.to(BF16).T).view(-1, 3, heads, 64).unbind(1)
    thd_attention(q, k, v, batch.layout(device)).float().square().sum().backward()
    assert torch.isfinite(x.grad).all() and torch.isfinite(weight.grad).all() and (x.grad[-2:] == 0).all() and x.grad[:-2].abs().sum() > 0


@pytest.mark.parametrize("pad_between_seqs", [None, True])
def test_pt04_alignment_padding_on_the_last_sequence_changes_no_gradient(device, pad_between_seqs):
    # NVIDIA/TransformerEngine issue 2892
    lengths = [61, 33, 90]
    forms = {
        "none": Packed(lengths, [0, 0, 0]),
        "last slot": Packed(lengths, [0, 0, 72]),
        "dummy slot": Packed([*lengths, 0], [0, 0, 0, 72]),
    }
    assert forms["last slot"].padded_q == [0, 61, 94, 256]
    x = torch.randn(184, 32, device=device, generator=torch.Generator(device).manual_seed(1))
    results = {}
    for name, batch in forms.items():
        rows = batch.rows["q"]
        padded = torch.full((rows, 32), 0.4, device=device)
        padded[:184] = x
        weight = torch.randn(12 * 128, 32, device=device, generator=torch.Generator(device).manual_seed(2)).mul_(0.2).requires_grad_()
        q, k, v = (padded.to(BF16) @ weight.to(BF16).T).view(rows, 12, 128).split([8, 2, 2], 1)
        cu, cu_padded = batch.tensor(prefix(batch.n), device), batch.tensor(batch.padded_q, device)
        params = SimpleNamespace(cu_seqlens_q=cu, cu_seqlens_q_padded=cu_padded, max_seqlen_q=90, pad_between_seqs=pad_between_seqs)
        out = thd_attention(q, k, v, ThdLayout.from_packed_seq_params(params))
        do = torch.full_like(out, 0.3)
        do[:184] = torch.randn(184, 8, 128, device=device, generator=torch.Generator(device).manual_seed(3)).to(BF16)
        out.backward(do)
        assert (out[184:] == 0).all()
        results[name] = (out[:184].detach(), weight.grad)
    for name in ("last slot", "dummy slot"):
        assert torch.equal(results[name][0], results["none"][0])
        assert relative(results[name][1], results["none"][1].double()) < 1e-2
        assert abs(float(results[name][1].norm() / results["none"][1].norm()) - 1) < 0.01


def test_zl02_a_sequence_without_keys_gives_zeros_not_nan(device):
    # NVIDIA/cudnn-frontend issue 943
    batch = Packed([5, 7, 3], [3, 1, 5], m=[6, 0, 4], gaps_kv=[2, 0, 4])
    got, true = run(batch, device, heads=4, heads_kv=2, dim=64, fill=0.5, mask="padding")
    assert_right(batch, got, true)
    assert (got[0][8:15] == 0).all() and (got[1][8:15] == 0).all()
    q, k, v = batch.qkv(4, 2, 64, 64, BF16, device, fill=0.5)
    _, lse = thd_attention(q, k, v, batch.layout(device), mask="padding", return_lse=True)
    assert torch.isneginf(lse[8:15]).all() and torch.isfinite(lse[:5]).all()


@pytest.mark.parametrize("dummies, gaps", [(2, [0, 0]), (30, [0, 0]), (2, [0, 8])])
def test_zl03_repeated_trailing_entries_are_sequences_of_no_length(device, dummies, gaps):
    # NVIDIA/Megatron-LM pull request 3282
    plain, padded = Packed([16, 24], gaps), Packed([16, 24] + [0] * dummies, gaps + [0] * dummies)
    shape = dict(heads=4, heads_kv=4, dim=128)
    (wanted, *wanted_gradients), _ = run(plain, device, **shape)
    (got, *gradients), true = run(padded, device, **shape)
    assert torch.equal(got, wanted)
    for a, b in zip(gradients, wanted_gradients):
        assert relative(a, b.double()) < 1e-3


def test_zl03_boundaries_that_decrease_are_what_is_rejected(device):
    q = torch.zeros(40, 4, 128, dtype=BF16, device=device)
    for boundaries, refused in (([0, 16, 40, 40, 40], False), ([0, 16, 40, 39, 40], True)):
        layout = ThdLayout.from_cu_seqlens(torch.tensor(boundaries, dtype=torch.int32, device=device), max_seqlen_q=40)
        with debug_checks():
            if not refused:
                thd_attention(q, q, q, layout)
                continue
            with pytest.raises(ValueError, match="cu_seqlens_q: entry 3 is 39 after 40; accepted are entries that never decrease"):
                thd_attention(q, q, q, layout)


def test_st02_the_lse_is_token_major_natural_and_feeds_a_nonzero_backward(device):
    # NVIDIA/cudnn-frontend pull request 462
    batch = Packed([64, 100, 37], [0, 28, 3])
    got, true = run(batch, device, heads=4, heads_kv=4, dim=64)
    assert_right(batch, got, true)
    for gradient, wanted in zip(got[1:], (true.dq, true.dk, true.dv)):
        assert abs(float(gradient.double().norm() / wanted.norm()) - 1) < 0.02
    q, k, v = batch.qkv(4, 4, 64, 64, BF16, device)
    _, lse = thd_attention(q, k, v, batch.layout(device), return_lse=True)
    assert lse.shape == (232, 4) and lse.dtype == torch.float32
    real = batch.real("q")
    assert torch.allclose(lse[real].double(), true.lse[real], atol=1e-4)


@pytest.mark.parametrize(
    "batch, heads",
    [
        (Packed([704], [0]), 1),
        (Packed([192, 64, 128], [0, 64, 0]), 1),
        (Packed([1], [0], m=[128], gaps_kv=[0]), 2),
    ],
    ids=["one", "gaps", "one query"],
)
def test_ng01_a_very_negative_lse_and_a_partial_tile_give_finite_gradients(device, batch, heads):
    # pytorch issue 196678
    q, k, v = (x.float() for x in batch.qkv(heads, heads, 64, 64, torch.float32, device, fill=0.0))
    q, k = 3.5355 + 0.0 * q, -3.5355 + 0.1 * k
    q, k, v = (x.to(BF16).requires_grad_() for x in (q, k, v))
    do = batch.random("o", heads, 64, BF16, device)
    out, lse = thd_attention(q, k, v, batch.layout(device), mask="padding", return_lse=True)
    gradients = torch.autograd.grad(out, (q, k, v), do)
    true = batch.truth(q, k, v, mask="padding", do=do)
    assert lse[batch.real("q")].max() < -88
    # Rows of q and of k are nearly equal, so dq and dk are small differences of large terms: bf16 leaves few digits of them.
    for tensor, wanted, tolerance in zip((out, *gradients), (true.out, true.dq, true.dk, true.dv), (8e-3, 0.2, 0.2, 8e-3)):
        assert torch.isfinite(tensor).all() and relative(tensor, wanted) < tolerance


@pytest.mark.parametrize("mask", ["padding_causal", "padding"])
def test_sw01_a_window_holds_its_edge_key_and_no_future_one(device, mask):
    # NVIDIA/TransformerEngine issue 1197
    batch = Packed([16, 9], [0, 7])
    q = torch.zeros(32, 2, 64, dtype=torch.float16, device=device)
    v = torch.zeros_like(q)
    v[torch.arange(32), :, torch.arange(32)] = 1.0
    v[batch.padding("v")] = 9.0
    out = thd_attention(q, q, v, batch.layout(device), mask=mask, window=(4, 0)).float()
    for start, n in zip(batch.padded_q, batch.n):
        for i in range(n):
            keys = list(range(start + max(0, i - 4), start + i + 1))
            wanted = torch.zeros(64, device=device)
            wanted[keys] = 1 / len(keys)
            assert torch.allclose(out[start + i, 0], wanted, atol=1e-3), (start, i)
    assert out[9, 0].nonzero().flatten().tolist() == [5, 6, 7, 8, 9] and (out[25:] == 0).all()
    assert out[18, 0].nonzero().flatten().tolist() == [16, 17, 18]


@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("lengths, gaps", [([2208, 2112], [0, 0]), ([2200, 2101], [8, 11])])
def test_ml01_values_narrower_than_keys_are_taken_as_they_are(device, heads, lengths, gaps):
    # NVIDIA/Megatron-LM pull request 6241; on a CPU a sixteenth of the length
    if device.type == "cpu":
        lengths, gaps = [n // 16 for n in lengths], [min(gap, 3) for gap in gaps]
    batch = Packed(lengths, gaps)
    got, true = run(batch, device, heads=heads, heads_kv=heads, dim=192, dim_v=128)
    assert got[0].shape == (batch.rows["o"], heads, 128) and got[3].shape == (batch.rows["v"], heads, 128)
    assert_right(batch, got, true)


@pytest.mark.parametrize("gaps_kv", [[1, 5], [9, 5]])
def test_xa01_cross_attention_pads_queries_and_keys_differently(device, gaps_kv):
    # NVIDIA/TransformerEngine pull request 1780
    batch = Packed([4, 6], [4, 2], m=[7, 3], gaps_kv=gaps_kv)
    assert batch.padded_q == [0, 8, 16] and batch.padded_kv == ([0, 8, 16] if gaps_kv == [1, 5] else [0, 16, 24])
    got, true = run(batch, device, heads=4, heads_kv=2, dim=64, fill=30.0, mask="padding")
    assert_right(batch, got, true)
    swapped = Packed([7, 3], gaps_kv, m=[4, 6], gaps_kv=[4, 2])
    if batch.rows["q"] == batch.rows["k"]:
        q, k, v = batch.qkv(4, 2, 64, 64, BF16, device, fill=30.0)
        assert relative(thd_attention(q, k, v, swapped.layout(device), mask="padding"), true.out) > 0.1


@pytest.mark.parametrize("q_value, k_value, padding, wanted", [(1.0, 1.0, 100.0, 8.0), (1.0, -1.0, 0.0, -8.0)])
def test_mx01_the_largest_logit_is_one_of_real_tokens(device, q_value, k_value, padding, wanted):
    # NVIDIA/TransformerEngine pull request 2819
    batch = Packed([5, 3], [3, 5])
    q, k, v = (torch.full((16, h, 64), value, dtype=BF16, device=device) for h, value in ((4, q_value), (2, k_value), (2, 1.0)))
    for tensor in (q, k, v):
        tensor[batch.padding("q")] = padding
    _, max_logit = thd_attention(q, k, v, batch.layout(device), return_max_logit=True)
    assert max_logit.shape == (4,) and torch.allclose(max_logit, torch.full_like(max_logit, wanted))


def test_sk01_a_learnable_sink_takes_its_share_and_gets_its_gradient(device):
    # NVIDIA/TransformerEngine pull request 3551, without context parallelism
    batch = Packed([3, 5], [1, 3])
    q, k = (torch.zeros(12, 2, 64, dtype=BF16, device=device) for _ in range(2))
    v, do = (torch.ones(12, 2, 64, dtype=BF16, device=device) for _ in range(2))
    v[batch.padding("v")] = 9.0
    sink = torch.full((2,), math.log(4), device=device, requires_grad=True)
    out = thd_attention(q, k, v, batch.layout(device), mask="padding", softmax_offset=sink)
    assert torch.allclose(out[:3].float(), torch.tensor(3 / 7, device=device), atol=2e-3)
    assert torch.allclose(out[4:9].float(), torch.tensor(5 / 9, device=device), atol=3e-3)
    (gradient,) = torch.autograd.grad(out, sink, do)
    assert torch.allclose(gradient, torch.tensor(-126.0328, device=device), rtol=6e-3)


def test_sk01_a_sink_is_right_on_random_data_too(device):
    batch = Packed([300, 0, 117], [20, 3, 11], tail=6)
    q, k, v = (x.requires_grad_() for x in batch.qkv(4, 2, 64, 64, BF16, device))
    do = batch.random("do", 4, 64, BF16, device, seed=3)
    sink = torch.tensor([-1.0, 0.5, 2.0, 4.0], device=device, requires_grad=True)
    out = thd_attention(q, k, v, batch.layout(device), mask="padding", softmax_offset=sink)
    *gradients, d_sink = torch.autograd.grad(out, (q, k, v, sink), do)
    true = batch.truth(q, k, v, mask="padding", sink=sink, do=do)
    assert_right(batch, (out, *gradients), true)
    assert relative(d_sink, true.d_sink) < 2e-2  # a sum over all rows of bf16 outputs that cancel


def test_cp01_a_length_that_two_chunks_a_rank_do_not_divide_keeps_every_key(device):
    # NVIDIA/TransformerEngine issue 3331, without context parallelism
    slots = torch.tensor([0, 704], dtype=torch.int32)
    assert [sum(row < 698 for row in rank_rows(slots, 4, rank).tolist()) for rank in range(4)] == [170, 176, 176, 176]
    assert [sum(row < 350 for row in rank_rows(torch.tensor([0, 352]), 2, rank).tolist()) for rank in range(2)] == [174, 176]
    batch = Packed([698], [6])
    got, true = run(batch, device, heads=8, heads_kv=1, dim=128, fill=0.6)
    assert_right(batch, got, true)
    assert (got[0][:698].abs().sum((1, 2)) > 0).all()
    for _ in range(20 if device.type == "cuda" else 2):
        assert torch.equal(run(batch, device, heads=8, heads_kv=1, dim=128, fill=0.6)[0][0], got[0])


def test_cp03_an_odd_length_is_not_rounded_down(device):
    # NVIDIA/Megatron-LM issue 1669, without context parallelism: 1.944 where 1.927 is right
    x = torch.tensor([1.0] * 4 + [2.0] * 3 + [100.0], dtype=torch.float16, device=device)[:, None, None].expand(8, 1, 8).contiguous()
    out = thd_attention(x, x, x, Packed([7], [1]).layout(device), mask="padding").float()
    wanted = torch.tensor([1.92695] * 4 + [1.99536] * 3 + [0.0], device=device)[:, None, None].expand(8, 1, 8)
    assert torch.allclose(out, wanted, atol=2e-3) and (out[7] == 0).all()


def test_cp06_a_window_in_a_packed_batch_is_never_full_attention(device):
    # NVIDIA/TransformerEngine pull request 2220, without context parallelism
    batch = Packed([22, 10], [2, 2])
    real, slots = set(batch.real("q")), torch.tensor(batch.padded_q)
    assert [len(real & set(rank_rows(slots, 2, rank).tolist())) for rank in range(2)] == [14, 18]
    got, true = run(batch, device, heads=4, heads_kv=2, dim=128, fill=0.8, window=(8, 0))
    assert_right(batch, got, true)
    full, _ = run(batch, device, heads=4, heads_kv=2, dim=128, fill=0.8)
    assert relative(full[0], true.out) > 0.05


@pytest.mark.parametrize("lengths, gaps", [([1024] * 4, [0] * 4), ([1000, 990, 1024, 7], [24, 34, 0, 1017])])
def test_dr01_dropout_in_a_packed_batch_keeps_its_mean_and_repeats(device, lengths, gaps):
    # NVIDIA/TransformerEngine issue 3312; on a CPU an eighth of the length
    if device.type == "cpu":
        lengths, gaps = [-(-n // 8) for n in lengths], [gap // 8 for gap in gaps]
    batch, heads = Packed(lengths, gaps), 16
    q = torch.zeros(batch.rows["q"], heads, 128, dtype=BF16, device=device)
    v = torch.ones_like(q)

    def call(seed):
        torch.manual_seed(seed)
        return thd_attention(q, q, v, batch.layout(device), dropout_p=0.1)

    out = call(7)
    assert torch.equal(out, call(7)) and not torch.equal(out, call(8))
    assert abs(float(out[batch.real("o")].float().mean()) - 1.0) < 0.01 and (out[batch.padding("o")] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("length, gap", [(1024, 0), (1000, 24)])
def test_pf04_determinism_costs_a_bounded_workspace(length, gap):
    # NVIDIA/cudnn-frontend pull request 398
    batch, device = Packed([length] * 64, [gap] * 64), torch.device("cuda", 0)
    q, k, v = (torch.randn(batch.rows["q"], 16, 128, device=device, dtype=BF16, requires_grad=True) for _ in range(3))
    layout, do = batch.layout(device), torch.randn(batch.rows["q"], 16, 128, device=device, dtype=BF16)
    results = []
    for _ in range(5):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results.append(torch.autograd.grad(thd_attention(q, k, v, layout, deterministic=True), (q, k, v), do))
        assert torch.cuda.max_memory_allocated() - before < 4 << 30
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_pf01_plans_of_a_run_over_random_lengths_are_found_again(device):
    # pytorch pull request 191576; build counts, memory and times of the full sizes are in tests/gpu
    draw, longest = torch.Generator().manual_seed(0), 16 if device.type == "cpu" else 2048
    plan_cache.clear()
    kept = []
    for _ in range(200):
        lengths = torch.randint(1, longest + 1, (8,), generator=draw)
        lengths = (lengths * min(1.0, 4 * longest / float(lengths.sum()))).long().clamp(min=1).tolist()
        batch = Packed(lengths, torch.randint(0, 64, (8,), generator=draw).tolist())
        q, k, v = (torch.zeros(batch.rows["q"], h, 128, dtype=BF16, device=device, requires_grad=True) for h in (16, 4, 4))
        thd_attention(q, k, v, batch.layout(device)).sum().backward()
        kept.append(len(plan_cache.report()))
    assert 0 < kept[-1] == kept[49] <= 6


def test_pf02_lengths_changed_in_place_are_those_of_the_next_call(device):
    # NVIDIA/cudnn-frontend issue 552; capture and the absence of synchronisation are in tests/gpu
    rows, cu, padded = 160, *(torch.zeros(5, dtype=torch.int32, device=device) for _ in range(2))
    layout = ThdLayout.from_cu_seqlens(cu, cu_seqlens_q_padded=padded, max_seqlen_q=128)
    for lengths in ([100, 28, 0, 0], [30, 60, 38, 0], [1, 1, 1, 1], [64, 64, 0, 0], [100, 28, 0, 0]):
        slots = [-(-n // 8) * 8 for n in lengths]
        batch = Packed(lengths, [slot - n for slot, n in zip(slots, lengths)], tail=rows - sum(slots))
        cu.copy_(torch.tensor(prefix(lengths)))
        padded.copy_(torch.tensor(batch.padded_q))
        got, true = run(batch, device, heads=8, heads_kv=2, dim=128, layout=layout)
        assert_right(batch, got, true)


def test_pf02_a_max_seqlen_on_a_device_is_refused_before_it_is_read():
    with pytest.raises(TypeError, match="max_seqlen_q: got a tensor on meta, and reading it would synchronise"):
        ThdLayout.from_cu_seqlens(torch.zeros(5, dtype=torch.int32), max_seqlen_q=torch.tensor(128, device="meta"))


def test_pf05_a_compiled_step_follows_the_lengths_without_recompiling(device):
    # NVIDIA/TransformerEngine pull request 3472; on a CPU an eighth of the rows
    part = 8 if device.type == "cpu" else 1
    rows = 2048 // part
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v, layout: thd_attention(q, k, v, layout, deterministic=True), fullgraph=True, backend=counter)
    for longest in range(496 // part, 496 // part + 10):
        lengths = [longest, longest // 2, 3, longest - 1]
        batch = Packed(lengths, [2, 0, 5, 1], tail=rows - sum(lengths) - 8)
        q, k, v = (x.requires_grad_() for x in batch.qkv(8, 2, 128, 128, BF16, device))
        do = batch.random("do", 8, 128, BF16, device, seed=3)
        layout = batch.layout(device)
        got, eager = compiled(q, k, v, layout), thd_attention(q, k, v, layout, deterministic=True)
        assert torch.equal(got, eager) and relative(got, batch.truth(q, k, v).out) < 6e-3
        for a, b in zip(torch.autograd.grad(got, (q, k, v), do), torch.autograd.grad(eager, (q, k, v), do)):
            assert torch.equal(a, b)
    assert 1 <= counter.frame_count <= 2


@pytest.mark.gpu
def test_pf01_two_thousand_shapes_stay_within_the_plan_bound():
    # NVIDIA/TransformerEngine issue 1348
    device, draw = torch.device("cuda", 0), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4096, h, 64, device=device, dtype=BF16) for h in (4, 2, 2))
    memory = []
    for _ in range(2000):
        count = int(torch.randint(1, 65, (1,), generator=draw))
        longest = int(torch.randint(1, 4096 // count + 1, (1,), generator=draw))
        cu = torch.arange(0, (count + 1) * longest, longest, dtype=torch.int32)[: count + 1].to(device)
        thd_attention(q, k, v, ThdLayout.from_cu_seqlens(cu, max_seqlen_q=longest))
        memory.append(torch.cuda.memory_reserved())
    assert len(plan_cache.report()) <= plan_cache.limit and memory[-1] - memory[200] < 200 << 20


def test_cp04_ranks_hold_two_chunks_of_every_sequence():
    # NVIDIA/Megatron-LM pull request 5191
    slots = torch.tensor([0, 8, 16], dtype=torch.int32)
    assert rank_rows(slots, 2, 0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert rank_rows(slots, 2, 1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    assert rank_rows(torch.tensor([0, 4, 8]), 2, 0).tolist() == [0, 3, 4, 7]
    everything = torch.cat([rank_rows(slots, 2, rank) for rank in range(2)])
    assert torch.equal(everything.sort().values, torch.arange(16))
    with pytest.raises(ValueError, match=r"slot of sequence 0 has 6 rows; accepted are multiples of 2 \* cp_size = 4"):
        rank_rows(torch.tensor([0, 6, 14]), 2, 0)


def test_ov01_element_offsets_of_a_large_batch_are_taken_in_int64():
    # NVIDIA/TransformerEngine pull request 1230; the run itself is in tests/gpu
    offset = RaggedOffset(torch.tensor([2201485312, 2147483648]), "element")
    n, d = offset.tokens_as_fraction(32 * 128 * 2, 2, "q")
    assert [int(value) * n // d for value in offset.values] == [537472, 524288]
