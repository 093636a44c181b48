"""The reference plan, called as plans are called: into tensors of the caller, with an offset of its own for every port."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_thd_bridge import RaggedOffset, ThdLayout
from te_thd_bridge.layout import PORTS
from te_thd_bridge.plans import BackwardTensors, ForwardTensors, reference
from te_thd_bridge.plans.reference import ReferencePlan
from te_thd_bridge.spec import AttentionSpec, Band

from .layouts import BANDS, NAN, Packed, itemsizes, packed, prefix, relative, row_strides, sinks

CPU = torch.device("cpu")
POISON = 7.0
LONG = Packed([150, 0, 33], [6, 2, 3], m=[131, 9, 70], gaps_kv=[1, 0, 4], tail=5, lead=2)


class Run:
    """One attention of a batch through the plan: its spec, layout and inputs, and the outputs of each direction."""

    def __init__(self, batch, *, mask="padding_causal", window=(-1, -1), heads=4, heads_kv=2, dim=6, dim_v=5, dtype=torch.float64, **options):
        self.batch, self.mask, self.window, self.heads, self.dim_v, self.dtype = batch, mask, window, heads, dim_v, dtype
        self.statistics = torch.float64 if dtype == torch.float64 else torch.float32
        fill, seed = options.pop("fill", NAN), options.pop("seed", 0)
        self.q, self.k, self.v = batch.qkv(heads, heads_kv, dim, dim_v, dtype, CPU, fill, seed)
        self.do = batch.random("do", heads, dim_v, dtype, CPU, fill, seed + 3)
        self.sink = options.pop("sink", None)
        right, bottom_right = BANDS[mask]
        strides = row_strides(heads, heads_kv, dim, dim_v)
        itemsize = itemsizes(dtype)
        self.layout = batch.layout(CPU, strides, itemsize)
        self.spec = AttentionSpec(
            device=CPU,
            dtype=dtype,
            heads_q=heads,
            heads_kv=heads_kv,
            dim_qk=dim,
            dim_v=dim_v,
            # The plan serves any size: a spec that the plan cache hands it has none.
            **dict.fromkeys(("batch", "max_q", "max_kv", "tokens_q", "tokens_kv", "tokens_o"), 0),
            band=Band(window[0], right if right >= 0 else window[1], bottom_right),
            scale=options.pop("scale", dim**-0.5),
            sink=self.sink is not None,
            dropout_p=options.pop("dropout_p", 0.0),
            deterministic=False,
            needs_lse=True,
            max_logit=True,
            strides=(),
            offset_strides=tuple(sorted((port, strides[port] * itemsize[port]) for port in PORTS)),
        )
        self.rng_state = options.pop("rng_state", None)
        assert not options
        self.plan = ReferencePlan(self.spec)

    def truth(self):
        return self.batch.truth(self.q, self.k, self.v, mask=self.mask, window=self.window, sink=self.sink, scale=self.spec.scale, do=self.do)

    def sink_terms(self, true):
        """The largest sum over rows, of any head, of what the terms of d_softmax_offset amount to without their signs."""
        terms = torch.zeros(self.heads, dtype=torch.float64)
        for o, do, stats, n in zip(*(self.batch.starts[port] for port in ("o", "do", "stats")), self.batch.n):
            products = (true.out[o : o + n].abs() * self.do[do : do + n].double().abs()).sum(-1)
            terms += ((self.sink.double() - true.lse[stats : stats + n]).exp() * products).nan_to_num(0.0, 0.0).sum(0)
        return terms.max()

    def forward(self):
        out = torch.full((self.batch.rows["o"], self.heads, self.dim_v), POISON, dtype=self.dtype)
        lse = torch.full((len(self.q), self.heads), POISON, dtype=self.statistics)
        max_logit = torch.full((self.heads,), POISON, dtype=self.statistics)
        self.plan.forward(ForwardTensors(self.q, self.k, self.v, out, lse, max_logit, self.sink, self.rng_state), self.layout)
        return out, lse, max_logit

    def backward(self, out, lse):
        dq, dk, dv = (torch.full_like(x, POISON) for x in (self.q, self.k, self.v))
        d_sink = None if self.sink is None else torch.full_like(self.sink, POISON)
        tensors = BackwardTensors(self.q, self.k, self.v, out, lse, self.do, dq, dk, dv, self.sink, d_sink, self.rng_state)
        self.plan.backward(tensors, self.layout)
        return dq, dk, dv, d_sink

    def assert_right(self, tolerance):
        true, (out, lse, max_logit) = self.truth(), self.forward()
        seen = torch.isfinite(true.lse)
        assert relative(out, true.out) < tolerance and torch.equal(torch.isneginf(lse), ~seen)
        assert torch.allclose(lse[seen].double(), true.lse[seen], rtol=tolerance, atol=tolerance)
        assert torch.allclose(max_logit.double(), true.max_logit, rtol=tolerance, atol=tolerance)
        dq, dk, dv, d_sink = self.backward(out, lse)
        for port, got, wanted in (("o", out, true.out), ("dq", dq, true.dq), ("dk", dk, true.dk), ("dv", dv, true.dv)):
            assert relative(got, wanted) < tolerance, port
            assert (got[self.batch.padding(port)] == 0).all(), port
        if d_sink is not None:
            # A sum over rows that may cancel: its error is judged beside the terms.
            assert (d_sink - true.d_sink).abs().max() <= tolerance * self.sink_terms(true)


@settings(max_examples=60)
@given(
    packed(ports=PORTS),
    st.sampled_from(list(BANDS)),
    st.sampled_from([(-1, -1), (3, -1), (-1, 2), (0, 0), (4, 2)]),
    st.booleans(),
    st.sampled_from([NAN, float("inf"), float("-inf")]),
    st.sampled_from([(4, 2), (3, 3), (3, 1)]),
)
def test_any_layout_is_exact_in_fp64_whatever_padding_holds(batch, mask, window, with_sink, fill, heads):
    sink = sinks(heads[0]) if with_sink else None
    Run(batch, mask=mask, window=window, sink=sink, fill=fill, heads=heads[0], heads_kv=heads[1]).assert_right(1e-12)


@settings(max_examples=15)
@given(packed(lengths=(0, 1, 40, 129), ports=PORTS), st.sampled_from(list(BANDS)))
def test_fp32_inputs_are_computed_in_fp32(batch, mask):
    Run(batch, mask=mask, dtype=torch.float32, sink=sinks(4, torch.float32)).assert_right(2e-6)


@pytest.mark.parametrize("dtype, unit", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_loses_no_more_than_the_rounding_of_its_outputs(dtype, unit):
    run = Run(LONG, mask="padding", dtype=dtype)
    true, (out, lse, _) = run.truth(), run.forward()
    assert relative(out, true.out) < unit / 2
    seen = torch.isfinite(true.lse)
    assert lse.dtype == torch.float32 and torch.allclose(lse[seen].double(), true.lse[seen], atol=1e-5)
    # The backward reads out as it was rounded; from the exact one only its own rounding is left.
    for got, wanted in zip(run.backward(out, lse), (true.dq, true.dk, true.dv)):
        assert relative(got, wanted) < unit


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("unit, multiplier", [("token", 1), ("token", 3), ("element", 1), ("element", 3), ("byte", 8)])
def test_each_port_follows_its_own_offset(port, unit, multiplier):
    # Starts are multiples of 3 and not in order, so that neither lengths nor another port's offset lead there.
    batch = Packed([5, 0, 4], [1, 2, 1], m=[7, 2, 3], gaps_kv=[0, 1, 1], own={port: ([9, 6, 0], 21, "token", 1, False)})
    run = Run(batch, heads=6, heads_kv=3, dim=4, dim_v=2)
    step = {"token": 1, "element": 1, "byte": 8}[unit] * (1 if unit == "token" else row_strides(6, 3, 4, 2)[port])
    values = torch.tensor([start * step // multiplier for start in (9, 6, 0)])
    assert [value * multiplier // step for value in values.tolist()] == [9, 6, 0]
    run.layout = ThdLayout.from_cu_seqlens(
        run.layout.cu_seqlens_q,
        run.layout.cu_seqlens_kv,
        cu_seqlens_q_padded=batch.tensor(batch.padded_q, CPU),
        cu_seqlens_kv_padded=batch.tensor(batch.padded_kv, CPU),
        max_seqlen_q=5,
        max_seqlen_kv=7,
        offsets={port: RaggedOffset(values, unit, multiplier)},
    )
    run.assert_right(1e-12)


@pytest.mark.parametrize("rows_at_once", [1, 7, 128, 1000])
@pytest.mark.parametrize("mask, window", [("padding", (20, 9)), ("padding_causal", (-1, -1)), ("padding_causal_bottom_right", (40, -1))])
def test_blocks_of_any_size_meet_without_a_seam(monkeypatch, rows_at_once, mask, window):
    monkeypatch.setattr(reference, "_ROWS_AT_ONCE", rows_at_once)
    Run(LONG, mask=mask, window=window, sink=sinks(4)).assert_right(1e-12)


def test_the_backward_takes_out_and_lse_from_another_plan():
    run = Run(LONG, mask="padding", sink=sinks(4))
    true = run.truth()
    # Another plan may leave anything in rows that are not real.
    for tensor, port in ((true.out, "o"), (true.lse, "stats")):
        tensor[LONG.padding(port)] = NAN
    for got, wanted in zip(run.backward(true.out, true.lse), (true.dq, true.dk, true.dv, true.d_sink)):
        assert relative(got, wanted) < 1e-12


@pytest.mark.parametrize(
    "batch, mask, window, blind",
    [
        (Packed([5, 4], [0, 1], m=[0, 4], gaps_kv=[2, 0]), "padding", (-1, -1), [0, 1, 2, 3, 4]),
        (Packed([5, 4], [0, 1], m=[2, 4], gaps_kv=[1, 0]), "padding_causal_bottom_right", (-1, -1), [0, 1, 2]),
        (Packed([5, 4], [0, 1], m=[2, 4], gaps_kv=[1, 0]), "padding_causal", (1, -1), [3, 4]),
        (Packed([5, 4], [0, 1], m=[2, 4], gaps_kv=[1, 0]), "padding_causal_bottom_right", (0, 0), [0, 1, 2]),
    ],
    ids=["no keys", "more rows than keys", "window past the keys", "window before the keys"],
)
def test_rows_that_see_no_key_are_zero_and_reach_no_gradient_whatever_they_hold(batch, mask, window, blind):
    run = Run(batch, mask=mask, window=window, sink=sinks(4))
    true = run.truth()
    run.q[blind], run.do[blind] = NAN, NAN
    out, lse, max_logit = run.forward()
    dq, dk, dv, d_sink = run.backward(out, lse)
    assert (out[blind] == 0).all() and torch.isneginf(lse[blind]).all() and (dq[blind] == 0).all()
    for got, wanted in ((out, true.out), (dq, true.dq), (dk, true.dk), (dv, true.dv), (d_sink, true.d_sink), (max_logit, true.max_logit)):
        assert relative(got, wanted) < 1e-12


@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_nan_in_a_real_row_spreads_within_its_sequence_as_in_dense_attention(where):
    batch = Packed([4, 3], [1, 1])
    run = Run(batch, mask="padding", heads=2, heads_kv=2)
    getattr(run, where)[2] = NAN
    q, k, v = (x[:4].clone().requires_grad_() for x in (run.q, run.k, run.v))
    dense = torch.einsum("hnm,mhd->nhd", (torch.einsum("nhd,mhd->hnm", q, k) * run.spec.scale).softmax(-1), v)
    wanted = (dense, *torch.autograd.grad(dense, (q, k, v), run.do[:4]))
    out, lse, _ = run.forward()
    got = (out, *run.backward(out, lse)[:3])
    assert any(x.isnan().any() for x in wanted)
    for a, b in zip(got, wanted):
        assert torch.equal(a[:4].isnan(), b.isnan()) and not a[4:].isnan().any()


def test_a_row_whose_logits_are_all_minus_infinity_is_nan_as_a_softmax_of_them_is():
    batch = Packed([2], [0])
    run = Run(batch, mask="padding", heads=1, heads_kv=1)
    run.q.fill_(float("inf"))
    run.k.fill_(-1.0)
    out, lse, _ = run.forward()
    assert out.isnan().all() and torch.isneginf(lse).all()


def test_the_largest_logit_is_minus_infinity_where_no_row_sees_a_key():
    run = Run(Packed([3, 0], [1, 1], m=[0, 4], gaps_kv=[2, 0]), mask="padding")
    assert torch.isneginf(run.forward()[2]).all()


@pytest.mark.parametrize("fraction", [0.0, 1e-3, 1.0, -1.0])
def test_scales_of_any_sign_are_taken(fraction):
    Run(LONG, scale=fraction).assert_right(1e-12)


def test_statistics_are_optional_and_inputs_are_left_alone():
    run = Run(LONG, sink=sinks(4))
    copies = [x.clone() for x in (run.q, run.k, run.v, run.do, run.sink)]
    out, lse, _ = run.forward()
    run.backward(out, lse)
    for x, copy in zip((run.q, run.k, run.v, run.do, run.sink), copies):
        assert torch.equal(x.nan_to_num(POISON), copy.nan_to_num(POISON))
    alone = torch.full_like(out, POISON)
    run.plan.forward(ForwardTensors(run.q, run.k, run.v, alone, softmax_offset=run.sink), run.layout)
    assert torch.equal(alone, out)
    gradients = [torch.full_like(x, POISON) for x in (run.q, run.k, run.v)]
    run.plan.backward(BackwardTensors(run.q, run.k, run.v, out, lse, run.do, *gradients, softmax_offset=run.sink), run.layout)
    assert all(torch.equal(a, b) for a, b in zip(gradients, run.backward(out, lse)))


def test_outputs_may_be_views_and_what_lies_beside_them_is_left_alone():
    run = Run(LONG, dim=6, dim_v=6, heads=2, heads_kv=2)
    out, lse, _ = run.forward()
    wanted = run.backward(out, lse)
    fused = torch.full((LONG.rows["k"], 2, 4, 6), POISON, dtype=torch.float64)
    held = torch.full((LONG.rows["o"], 2, 2, 6), POISON, dtype=torch.float64)
    run.plan.forward(ForwardTensors(run.q, run.k, run.v, held[:, :, 0]), run.layout)
    run.plan.backward(BackwardTensors(run.q, run.k, run.v, held[:, :, 0], lse, run.do, held[:, :, 1], fused[:, :, 1], fused[:, :, 2]), run.layout)
    for got, expected in ((held[:, :, 0], out), (held[:, :, 1], wanted[0]), (fused[:, :, 1], wanted[1]), (fused[:, :, 2], wanted[2])):
        assert torch.equal(got, expected)
    assert (fused[:, :, 0] == POISON).all() and (fused[:, :, 3] == POISON).all()


def test_one_plan_serves_batches_of_any_size():
    first, second = Run(LONG), Run(Packed([2, 9], [0, 4]), seed=5)
    second.plan = first.plan
    second.assert_right(1e-12)


def test_a_sink_shares_the_denominator_and_has_no_value():
    # Closed form: n keys of logit 0 and a sink of ln 4 leave n / (n + 4) of the value.
    batch = Packed([3, 5], [1, 3])
    run = Run(batch, mask="padding", heads=2, heads_kv=2, sink=torch.full((2,), math.log(4.0), dtype=torch.float64))
    run.q[batch.real("q")], run.v[batch.real("v")] = 0.0, 1.0
    out, lse, max_logit = run.forward()
    for rows, n in ((slice(0, 3), 3), (slice(4, 9), 5)):
        assert torch.allclose(out[rows], torch.tensor(n / (n + 4), dtype=torch.float64), rtol=1e-14)
        assert torch.allclose(lse[rows], torch.tensor(math.log(n + 4), dtype=torch.float64), rtol=1e-14)
    assert (max_logit == 0).all()


class TestDropout:
    batch = Packed([11, 6], [2, 0], m=[14, 9], gaps_kv=[0, 3], tail=1)

    def run(self, seed=3, offset=0, dropout_p=0.4, batch=None, **options):
        return Run(batch or self.batch, mask="padding", dropout_p=dropout_p, rng_state=torch.tensor([seed, offset]), **options)

    def kept(self, run):
        """The factor of each weight, [rows, heads, channels], read off an output whose values are unit vectors."""
        plain = Run(run.batch, mask=run.mask, heads=run.heads, dim_v=run.dim_v)
        for of in (run, plain):
            for start, m in zip(of.batch.starts["v"], of.batch.m):
                of.v[start : start + m] = torch.eye(m, of.dim_v, dtype=of.dtype)[:, None]
        return run.forward()[0] / plain.forward()[0]

    def test_weights_are_dropped_or_scaled_and_the_lse_is_that_without_dropout(self):
        run = self.run(dim_v=14)
        lse = run.forward()[1]
        assert torch.equal(lse, Run(self.batch, mask="padding", dim_v=14).forward()[1])
        kept = self.kept(run)[:11]
        assert ((kept == 0) | ((kept - 1 / 0.6).abs() < 1e-12)).all() and (kept == 0).any() and (kept != 0).any()

    def test_the_share_of_dropped_weights_is_its_probability(self):
        run = self.run(batch=Packed([300], [0]), dim_v=300, dropout_p=0.25, heads=4)
        assert abs(float((self.kept(run) == 0).double().mean()) - 0.25) < 0.005

    def test_the_mask_follows_the_seed_and_the_offset_and_nothing_else(self):
        masks = [self.kept(self.run(*state, dim_v=14))[:11] == 0 for state in ((3, 0), (3, 0), (4, 0), (3, 1))]
        assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[3])
        elsewhere = Packed([11, 6], [5, 3], m=[14, 9], gaps_kv=[2, 0], lead=4)
        moved = self.kept(self.run(batch=elsewhere, dim_v=14))[4:15] == 0
        assert torch.equal(moved, masks[0])

    def test_heads_sequences_and_blocks_of_rows_draw_masks_of_their_own(self, monkeypatch):
        monkeypatch.setattr(reference, "_ROWS_AT_ONCE", 6)
        dropped = self.kept(self.run(batch=Packed([12, 12], [0, 0]), dim_v=12)) == 0
        assert not torch.equal(dropped[:12], dropped[12:]) and not torch.equal(dropped[:6], dropped[6:12])
        for head in range(1, 4):
            assert not torch.equal(dropped[:, 0], dropped[:, head])

    def test_torchs_own_generator_is_not_advanced(self):
        before = torch.get_rng_state()
        self.run().forward()
        assert torch.equal(torch.get_rng_state(), before)

    def test_the_backward_is_that_of_the_mask_the_forward_drew(self):
        sink = sinks(4)
        batch = Packed([150], [3], m=[140], gaps_kv=[2])  # more than one block of rows
        mask = self.kept(self.run(batch=batch, dim_v=140))[:150].permute(1, 0, 2)  # [H, n, m]
        run = self.run(batch=batch, sink=sink)
        q, k, v, s = (x.clone().requires_grad_() for x in (run.q[:150], run.k[:140], run.v[:140], sink))
        logits = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(2, 1)) * run.spec.scale
        weights = torch.cat([logits, s[:, None, None].expand(4, 150, 1)], -1).softmax(-1)[..., :-1]
        dense = torch.einsum("hnm,mhd->nhd", weights * mask, v.repeat_interleave(2, 1))
        out, lse, _ = run.forward()
        assert relative(out[:150], dense.detach()) < 1e-12
        for got, wanted in zip(run.backward(out, lse), torch.autograd.grad(dense, (q, k, v, s), run.do[:150])):
            assert wanted.abs().sum() > 0
            assert relative(got[: len(wanted)], wanted) < 1e-12


def test_memory_is_bounded_by_a_block_of_rows():
    length = 4096
    run = Run(Packed([length], [0]), heads=1, heads_kv=1, dim=4, dim_v=4, dtype=torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run.forward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 128 * length * 8  # a block's distances in int64; all logits at once would be 64 MiB


def test_the_prefix_need_not_start_at_zero():
    batch = Packed([3, 2], [1, 0])
    run = Run(batch)
    run.layout = ThdLayout.from_cu_seqlens(torch.tensor(prefix(batch.n, 40)), cu_seqlens_q_padded=torch.tensor(batch.padded_q), max_seqlen_q=3)
    run.assert_right(1e-12)
