"""The public function against the oracle: real rows right and padding rows exactly zero, whatever the padding holds."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_thd_bridge import RaggedOffset, ThdLayout, debug_checks, plan_report, thd_attention
from te_thd_bridge.execution import Options, _calls, find_call
from te_thd_bridge.layout import PORTS
from te_thd_bridge.plans.select import plan_cache

from .layouts import BANDS, NAN, Packed, itemsizes, packed, prefix, relative, row_strides, sinks

CPU = torch.device("cpu")
PLAIN = Packed([3, 2, 4], [1, 2, 1])


def run(batch, *, heads=4, heads_kv=2, dim=8, dim_v=8, dtype=torch.float64, device=CPU, fill=NAN, seed=0, **options):
    """(results of thd_attention and its gradients, the truth) on random tensors with ``fill`` between sequences."""
    q, k, v = batch.qkv(heads, heads_kv, dim, dim_v, dtype, device, fill, seed)
    do = batch.random("do", heads, dim_v, dtype, device, fill, seed + 3)
    sink = options.pop("sink", None)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)] + ([] if sink is None else [sink.requires_grad_()])
    layout = batch.layout(device, row_strides(heads, heads_kv, dim, dim_v), itemsizes(dtype))
    out = torch.full((batch.rows["o"], heads, dim_v), 7.0, dtype=dtype, device=device) if {"o", "do"} & batch.own.keys() else None
    out, lse, max_logit = thd_attention(q, k, v, layout, softmax_offset=sink, return_lse=True, return_max_logit=True, out=out, **options)
    gradients = torch.autograd.grad(out, leaves, do, allow_unused=True)
    known = {key: options[key] for key in ("mask", "window", "scale") if key in options}
    return (out, lse, max_logit, *gradients), batch.truth(q, k, v, sink=sink, do=do, **known)


def assert_right(batch, got, true, tolerance):
    out, lse, max_logit, dq, dk, dv, *d_sink = got
    for name, tensor, wanted in (("out", out, true.out), ("dq", dq, true.dq), ("dk", dk, true.dk), ("dv", dv, true.dv)):
        assert relative(tensor, wanted) < tolerance, name
    for port, tensor in (("o", out), ("dq", dq), ("dk", dk), ("dv", dv)):
        rows = batch.padding(port)
        assert (tensor[rows] == 0).all(), f"padding rows of {port}"
    assert (torch.isneginf(lse) == torch.isneginf(true.lse)).all()
    finite = torch.isfinite(true.lse)
    assert torch.allclose(lse.double()[finite], true.lse[finite], rtol=tolerance, atol=10 * tolerance)
    assert torch.allclose(max_logit.double(), true.max_logit, rtol=tolerance, atol=10 * tolerance)
    if d_sink:
        assert relative(d_sink[0], true.d_sink) < tolerance


@settings(max_examples=60)
@given(
    packed(ports=PORTS),
    st.sampled_from(list(BANDS)),
    st.sampled_from([(-1, -1), (3, -1), (0, 0), (4, 2)]),
    st.booleans(),
    st.sampled_from([NAN, float("inf")]),
)
def test_any_layout_is_right_with_poisoned_padding(batch, mask, window, with_sink, fill):
    sink = sinks(4) if with_sink else None
    got, true = run(batch, mask=mask, window=window, sink=sink, fill=fill)
    assert_right(batch, got, true, 1e-11)


@settings(max_examples=8)
@given(st.integers(40, 64), st.randoms(use_true_random=False))
def test_large_batches_are_right(batch_size, random):
    batch = Packed([random.choice([0, 1, 3, 6]) for _ in range(batch_size)], [random.choice([0, 0, 2]) for _ in range(batch_size)], tail=2)
    assert_right(batch, *run(batch, heads=2, heads_kv=1, dim=4, dim_v=4), 1e-11)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("heads, heads_kv, dim, dim_v", [(4, 4, 8, 8), (4, 1, 16, 8), (8, 2, 24, 16)])
def test_lower_precisions_and_head_layouts_are_right(dtype, tolerance, heads, heads_kv, dim, dim_v):
    batch = Packed([70, 0, 33, 130], [2, 3, 0, 6], tail=5)
    got, true = run(batch, heads=heads, heads_kv=heads_kv, dim=dim, dim_v=dim_v, dtype=dtype)
    assert_right(batch, got, true, tolerance)


@pytest.mark.parametrize("length", [127, 128, 129, 300])
def test_blocks_of_rows_meet_without_a_seam(length):
    batch = Packed([length, 5], [3, 0])
    assert_right(batch, *run(batch, heads=2, heads_kv=1, window=(64, -1)), 1e-11)


def test_rows_that_see_no_key_are_zero_even_with_a_sink():
    batch = Packed([5, 4, 3], [0, 0, 1], m=[2, 0, 3], gaps_kv=[1, 2, 0])
    sink = sinks(4)
    got, true = run(batch, mask="padding_causal_bottom_right", sink=sink)
    assert_right(batch, got, true, 1e-11)
    assert (got[0][:3] == 0).all() and (got[0][5:9] == 0).all() and torch.isneginf(got[1][5:9]).all()


def test_nan_in_a_real_row_is_not_hidden():
    q, k, v = PLAIN.qkv(2, 2, 8, 8, torch.float64, CPU)
    v[4] = NAN
    out = thd_attention(q, k, v, PLAIN.layout(CPU))
    assert out[4:6].isnan().all() and not out[[0, 1, 2, 8, 9]].isnan().any()


@pytest.mark.parametrize("form", ["t3hd", "th3d", "t2hd", "fused_groups", "last_dimension"])
def test_strided_inputs_are_read_where_they_lie(form):
    batch, heads, dim = PLAIN, 4, 8
    heads_kv = 2 if form == "fused_groups" else heads
    q, k, v = batch.qkv(heads, heads_kv, dim, dim, torch.float64, CPU)
    if form == "t3hd":
        views = torch.stack([q, k, v], 1).unbind(1)
    elif form == "th3d":
        views = torch.stack([q, k, v], 2).unbind(2)
    elif form == "t2hd":
        views = (q, *torch.stack([k, v], 1).unbind(1))
    elif form == "fused_groups":
        fused = torch.cat([q.unflatten(1, (2, 2)), k[:, :, None], v[:, :, None]], 2)
        views = (fused[:, :, :2].reshape(q.shape), fused[:, :, 2], fused[:, :, 3])
    else:
        views = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert any(not view.is_contiguous() for view in views)
    assert torch.equal(thd_attention(*views, batch.layout(CPU)), thd_attention(q, k, v, batch.layout(CPU)))


@pytest.mark.parametrize("unit", ["element", "byte"])
def test_offsets_in_elements_count_in_the_callers_tensor_and_so_do_their_gradients(unit):
    q, k, v = PLAIN.qkv(4, 2, 8, 8, torch.float64, CPU)
    fused = torch.full((13, 2, 3, 8), NAN, dtype=torch.float64)
    fused[:, :, 1], fused[:, :, 2] = k, v
    q, k_view, v_view = q.requires_grad_(), fused[:, :, 1].requires_grad_(), fused[:, :, 2].requires_grad_()
    assert k_view.stride(0) == 48
    starts = torch.tensor(PLAIN.padded_q) * 48 * (8 if unit == "byte" else 1)
    offsets = {port: RaggedOffset(starts // 8, unit, 8) for port in ("k", "v")}
    layout = ThdLayout.from_cu_seqlens(
        PLAIN.tensor(prefix(PLAIN.n), CPU), cu_seqlens_q_padded=PLAIN.tensor(PLAIN.padded_q, CPU), max_seqlen_q=4, offsets=offsets
    )
    do = PLAIN.random("o", 4, 8, torch.float64, CPU)
    out = thd_attention(q, k_view, v_view, layout)
    true = PLAIN.truth(q, k, v, do=do)
    assert relative(out, true.out) < 1e-12
    for gradient, wanted in zip(torch.autograd.grad(out, (q, k_view, v_view), do), (true.dq, true.dk, true.dv)):
        assert relative(gradient, wanted) < 1e-12


def test_out_is_written_in_place_and_may_be_longer_than_q():
    batch = Packed([3, 2], [1, 0], own={"o": ([6, 1], 12, "token", 1, False)})
    q, k, v = batch.qkv(2, 2, 8, 8, torch.float64, CPU)
    out = torch.full((12, 2, 8), NAN, dtype=torch.float64)
    returned = thd_attention(q, k, v, batch.layout(CPU), out=out)
    assert returned is out and relative(out, batch.truth(q, k, v).out) < 1e-12
    q.requires_grad_()
    returned = thd_attention(q, k, v, batch.layout(CPU), out=torch.empty_like(out))
    assert returned.requires_grad and torch.equal(returned, out)


def test_the_mask_names_of_unpadded_formats_mean_their_padding_forms():
    q, k, v = PLAIN.qkv(2, 2, 8, 8, torch.float64, CPU)
    for plain, padding in (("no_mask", "padding"), ("causal", "padding_causal"), ("causal_bottom_right", "padding_causal_bottom_right")):
        assert torch.equal(*(thd_attention(q, k, v, PLAIN.layout(CPU), mask=mask) for mask in (plain, padding)))


def test_a_sink_may_have_transformer_engines_shape():
    q, k, v = PLAIN.qkv(2, 2, 8, 8, torch.float64, CPU)
    flat = torch.randn(2)
    shaped = flat.view(1, 2, 1, 1).clone().requires_grad_()
    out = thd_attention(q, k, v, PLAIN.layout(CPU), softmax_offset=shaped)
    assert torch.equal(out, thd_attention(q, k, v, PLAIN.layout(CPU), softmax_offset=flat))
    strided = torch.stack([flat, torch.full((2,), NAN)], 1)[:, 0]
    assert not strided.is_contiguous()
    assert torch.equal(out, thd_attention(q, k, v, PLAIN.layout(CPU), softmax_offset=strided))
    out.sum().backward()
    assert shaped.grad.shape == shaped.shape and shaped.grad.abs().sum() > 0


def test_an_incoming_gradient_is_read_where_it_lies():
    batch = Packed([3, 2, 4], [1, 2, 1], own={"do": ([9, 1, 4], 14, "token", 1, True)})
    q, k, v = (x.requires_grad_() for x in batch.qkv(4, 2, 8, 8, torch.float64, CPU))
    do = batch.random("do", 4, 8, torch.float64, CPU)
    transposed = do.transpose(0, 1).contiguous().transpose(0, 1)
    one = torch.ones((), dtype=torch.float64).expand(14, 4, 8)
    for strided in (transposed, one):
        assert not strided.is_contiguous()
        gradients = []
        for gradient in (strided, strided.contiguous()):
            out = thd_attention(q, k, v, batch.layout(CPU), out=torch.full((14, 4, 8), NAN, dtype=torch.float64))
            gradients.append(torch.autograd.grad(out, (q, k, v), gradient))
        assert all(torch.equal(a, b) for a, b in zip(*gradients))
        true = batch.truth(q, k, v, do=strided)
        assert relative(gradients[0][0], true.dq) < 1e-12 and relative(gradients[0][2], true.dv) < 1e-12


def test_statistics_come_in_order_and_carry_no_gradient():
    q, k, v = (x.requires_grad_() for x in PLAIN.qkv(4, 2, 8, 8, torch.float32, CPU))
    layout = PLAIN.layout(CPU)
    out, lse, max_logit = thd_attention(q, k, v, layout, return_lse=True, return_max_logit=True)
    assert (lse.shape, max_logit.shape, lse.dtype, max_logit.dtype) == ((13, 4), (4,), torch.float32, torch.float32)
    assert out.requires_grad and not lse.requires_grad and not max_logit.requires_grad
    alone = thd_attention(q, k, v, layout, return_lse=True), thd_attention(q, k, v, layout, return_max_logit=True)
    assert torch.equal(alone[0][1], lse) and torch.equal(alone[1][1], max_logit) and len(alone[0]) == len(alone[1]) == 2
    with torch.no_grad():
        assert torch.equal(thd_attention(q, k, v, layout), out)


def test_only_the_inputs_that_want_a_gradient_get_one():
    q, k, v = PLAIN.qkv(4, 2, 8, 8, torch.float64, CPU)
    do = PLAIN.random("do", 4, 8, torch.float64, CPU)
    true = PLAIN.truth(q, k, v, do=do)
    k.requires_grad_()
    thd_attention(q, k, v, PLAIN.layout(CPU)).backward(do)
    assert relative(k.grad, true.dk) < 1e-12 and q.grad is None and v.grad is None


def test_gradients_pass_gradcheck_in_fp64():
    q, k, v = (x.requires_grad_() for x in PLAIN.qkv(2, 1, 4, 3, torch.float64, CPU, fill=0.0))
    sink = sinks(2).requires_grad_()
    call = lambda q, k, v, sink: thd_attention(q, k, v, PLAIN.layout(CPU), window=(2, -1), softmax_offset=sink)  # noqa: E731
    assert torch.autograd.gradcheck(call, (q, k, v, sink))


def test_dropout_repeats_with_the_seed_and_backward_uses_the_forwards_mask():
    batch = Packed([40, 25], [3, 0])
    q, k, v = batch.qkv(2, 1, 8, 8, torch.float64, CPU, fill=0.0)
    v.requires_grad_()
    layout = batch.layout(CPU)

    def call(seed):
        torch.manual_seed(seed)
        return thd_attention(q, k, v, layout, dropout_p=0.3)

    assert torch.equal(call(1), call(1)) and not torch.equal(call(1), call(2))
    out = call(1)
    (dv,) = torch.autograd.grad(out, v, do := torch.randn_like(out))
    # out is linear in v with the dropped weights: <do, out> = <dv, v>.
    assert torch.allclose((do * out).sum(), (dv * v).sum())
    ones = torch.ones_like(v)
    kept = torch.stack([thd_attention(q, k, ones, layout, dropout_p=0.3)[:40].mean() for _ in range(40)]).mean()
    assert abs(kept - 1.0) < 0.02


@pytest.mark.parametrize("rows, lengths", [(0, []), (5, []), (0, [0, 0]), (4, [0, 0])])
def test_nothing_to_attend_to_gives_zeros(rows, lengths):
    layout = ThdLayout.from_cu_seqlens(torch.tensor(prefix(lengths), dtype=torch.int32), max_seqlen_q=0)
    q = torch.full((rows, 2, 8), NAN, requires_grad=True)
    out, lse = thd_attention(q, q, q, layout, return_lse=True)
    assert out.shape == q.shape and (out == 0).all() and torch.isneginf(lse).all()
    out.sum().backward()
    assert (q.grad == 0).all()


def test_changed_values_in_the_same_tensors_are_noticed():
    batch, other = Packed([3, 2, 4], [1, 2, 1]), Packed([1, 4, 2], [3, 0, 3])
    q, k, v = batch.qkv(2, 2, 8, 8, torch.float64, CPU, fill=0.5)
    layout = batch.layout(CPU)
    thd_attention(q, k, v, layout)
    layout.cu_seqlens_q.copy_(torch.tensor(prefix(other.n)))
    layout.offsets["q"].values.copy_(torch.tensor(other.padded_q))
    assert relative(thd_attention(q, k, v, layout), other.truth(q, k, v).out) < 1e-12


def test_the_report_names_the_plan_that_ran():
    q, k, v = PLAIN.qkv(2, 2, 8, 8, torch.float64, CPU)
    thd_attention(q, k, v, PLAIN.layout(CPU), scale=0.123)
    assert any(row["plan"] == "reference" and row["calls"] for row in plan_report())


def test_plans_that_the_cache_lets_go_are_gone():
    q, k, v = PLAIN.qkv(2, 2, 8, 8, torch.float64, CPU)
    layout = PLAIN.layout(CPU)

    def plan(scale):
        return find_call(q, k, v, layout, Options(scale=scale), None, None, needs_lse=False, needs_backward=False)[3].forward_plan

    first = weakref.ref(plan(0.5))
    for i in range(plan_cache.limit + 1):
        plan(1.0 + i)
    gc.collect()
    assert first() is None and len(plan_report()) == plan_cache.limit


META = ThdLayout.from_cu_seqlens(torch.zeros(4, dtype=torch.int32, device="meta"), max_seqlen_q=4)


class TestBadInput:
    """Each message names the argument, what was given and what is accepted."""

    q, k, v = PLAIN.qkv(4, 2, 8, 8, torch.float32, CPU, fill=0.0)

    @pytest.mark.parametrize(
        "change, error, words",
        [
            (dict(q=[1]), TypeError, ["q:", "list", "tensor"]),
            (dict(q=torch.zeros(13, 32)), ValueError, ["q:", "(13, 32)", "[T, H, D]"]),
            (dict(k=torch.zeros(13, 2, 16)), ValueError, ["k:", "16", "8"]),
            (dict(v=torch.zeros(12, 2, 8)), ValueError, ["v:", "12 rows", "13"]),
            (dict(v=torch.zeros(13, 4, 8)), ValueError, ["v:", "4 heads", "2"]),
            (dict(k=torch.zeros(13, 3, 8), v=torch.zeros(13, 3, 8)), ValueError, ["k:", "3 heads", "4", "divide"]),
            (dict(k=torch.zeros(13, 2, 8, dtype=torch.float16)), TypeError, ["k:", "float16", "float32"]),
            (dict(q=torch.zeros(13, 4, 8, dtype=torch.int32)), TypeError, ["q:", "int32", "float"]),
            (dict(layout=object()), TypeError, ["layout:", "object", "ThdLayout"]),
            (dict(mask="diagonal"), ValueError, ["mask:", "'diagonal'", "'padding_causal'"]),
            (dict(window=(1, 2, 3)), TypeError, ["window:", "(1, 2, 3)", "pair"]),
            (dict(window=(-2, 0)), ValueError, ["window:", "(-2, 0)", "-1"]),
            (dict(window=5), TypeError, ["window:", "5", "pair"]),
            (dict(scale="big"), TypeError, ["scale:", "'big'", "float"]),
            (dict(scale=NAN), TypeError, ["scale:", "nan", "finite"]),
            (dict(dropout_p=-0.1), ValueError, ["dropout_p:", "-0.1", "0"]),
            (dict(dropout_p=1.0), ValueError, ["dropout_p:", "1.0", "below 1"]),
            (dict(plan="fastest"), ValueError, ["plan:", "'fastest'", "'auto'"]),
            (dict(plan="cudnn"), ValueError, ["plan:", "'cudnn'", "cpu", "'reference'"]),
            (dict(softmax_offset=[0.0]), TypeError, ["softmax_offset:", "list", "tensor"]),
            (dict(softmax_offset=torch.zeros(3)), ValueError, ["softmax_offset:", "(3,)", "[4]"]),
            (dict(softmax_offset=torch.zeros(4, dtype=torch.bfloat16)), TypeError, ["softmax_offset:", "bfloat16", "float32"]),
            (dict(out=torch.zeros(13, 4, 9)), ValueError, ["out:", "(13, 4, 9)", "[T_o, 4, 8]"]),
            (dict(out=torch.zeros(13, 4, 8, dtype=torch.float64)), TypeError, ["out:", "float64", "float32"]),
            (dict(out=torch.zeros(13, 8, 4).transpose(1, 2)), ValueError, ["out:", "strides", "stride 1"]),
            (dict(q=None), TypeError, ["q:", "NoneType", "tensor"]),
            (dict(q=torch.zeros(13, 0, 8)), ValueError, ["(13, 0, 8)", "at least one head"]),
            (dict(q=torch.zeros(13, 4, 8, dtype=torch.float8_e4m3fn)), TypeError, ["q:", "float8", "bfloat16"]),
            (dict(layout=None), TypeError, ["layout:", "NoneType", "ThdLayout"]),
            (dict(layout=META), ValueError, ["layout:", "meta", "device of q, cpu"]),
            (dict(mask=None), ValueError, ["mask:", "None", "'padding'"]),
            (dict(window=(NAN, 0)), TypeError, ["window:", "nan", "pair of ints"]),
            (dict(dropout_p=NAN), ValueError, ["dropout_p:", "nan", "below 1"]),
            (dict(dropout_p=None), ValueError, ["dropout_p:", "None", "below 1"]),
            (dict(softmax_offset=torch.zeros(2, 4, 1, 1)), ValueError, ["softmax_offset:", "(2, 4, 1, 1)", "[1, 4, 1, 1]"]),
            (dict(deterministic="x"), TypeError, ["deterministic:", "'x'", "True"]),
            (dict(k=[1]), TypeError, ["k:", "list", "tensor"]),
            (dict(v=None), TypeError, ["v:", "NoneType", "tensor"]),
            (dict(out=[1]), ValueError, ["out:", "list", "[T_o, 4, 8]"]),
            (dict(plan=None), (TypeError, ValueError), ["plan:", "None", "'auto'"]),
            (dict(mask=["padding"]), (TypeError, ValueError), ["mask:", "'padding'"]),
            (dict(window=(1.5, 0)), TypeError, ["window:", "1.5", "pair of ints"]),
            (dict(window=("1", "2")), TypeError, ["window:", "'1'", "pair of ints"]),
        ],
    )
    def test_is_refused_by_name(self, change, error, words):
        arguments = {"q": self.q, "k": self.k, "v": self.v, "layout": PLAIN.layout(CPU)} | change
        with pytest.raises(error) as caught:
            thd_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), arguments.pop("layout"), **arguments)
        for word in words:
            assert word in str(caught.value)

    @pytest.mark.parametrize("warm", [False, True])
    @pytest.mark.parametrize("name, tells", [("q", "k"), ("k", "k"), ("v", "v"), ("out", "out"), ("softmax_offset", "softmax_offset")])
    def test_a_tensor_of_another_device_is_refused_even_after_a_call_that_was_right(self, name, tells, warm):
        _calls.clear()
        arguments = {"q": self.q, "k": self.k, "v": self.v, "layout": PLAIN.layout(CPU)}
        arguments |= {name: {"out": torch.zeros(13, 4, 8), "softmax_offset": torch.zeros(4)}[name]} if name not in arguments else {}
        if warm:
            thd_attention(**arguments)
        with pytest.raises(ValueError, match=f"{tells}: got device .*accepted is the device of q"):
            thd_attention(**arguments | {name: arguments[name].to("meta")})

    def test_a_multiplier_must_divide_the_row_stride(self):
        offset = RaggedOffset(torch.tensor([0, 4, 8]), "element", 5)
        layout = ThdLayout.from_cu_seqlens(PLAIN.tensor(prefix(PLAIN.n), CPU), max_seqlen_q=4, offsets={"k": offset})
        with pytest.raises(ValueError, match=r"offsets\['k'\].multiplier: got 5 elements.*\(16 elements\).*divisors"):
            thd_attention(self.q, self.k, self.v, layout)

    @pytest.mark.parametrize(
        "values, message",
        [
            (dict(n=[0, 3, 1, 5]), "cu_seqlens_q: entry 2 is 1 after 3"),
            (dict(n=[0, 3, 5, 12]), "cu_seqlens_q: sequence 2 has 7 tokens; max_seqlen_q promises at most 4"),
            (dict(padded=[0, 4, 8, 13], n=[0, 3, 7, 11]), None),
            (dict(padded=[0, 2, 8, 13]), "sequence 0 ends at row 3 and sequence 1 starts at row 2"),
            (dict(padded=[0, 4, 11, 13]), "sequence 2 takes rows 11 to 14; the tensor has 13 rows"),
        ],
    )
    def test_debug_checks_finds_values_that_break_the_layouts_promises(self, values, message):
        layout = ThdLayout.from_cu_seqlens(
            torch.tensor(values.get("n", [0, 3, 5, 9]), dtype=torch.int32),
            cu_seqlens_q_padded=torch.tensor(values.get("padded", [0, 4, 8, 13]), dtype=torch.int32),
            max_seqlen_q=4,
        )
        with debug_checks():
            if message is None:
                thd_attention(self.q, self.k, self.v, layout)
            else:
                with pytest.raises(ValueError, match=message):
                    thd_attention(self.q, self.k, self.v, layout)


class TestCompile:
    def test_no_graph_break_and_two_compilations_over_lengths(self):
        torch._dynamo.reset()
        batch = Packed([9, 12, 3], [1, 0, 2], tail=5)
        q, k, v = (x.requires_grad_() for x in batch.qkv(4, 2, 8, 8, torch.float32, CPU))
        do = batch.random("o", 4, 8, torch.float32, CPU)
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph

        def step(q, k, v, layout):
            return thd_attention(q, k, v, layout)

        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for longest in range(12, 22):
            layout = ThdLayout.from_cu_seqlens(
                batch.tensor(prefix(batch.n), CPU), cu_seqlens_q_padded=batch.tensor(batch.padded_q, CPU), max_seqlen_q=longest
            )
            got = compiled(q, k, v, layout)
            wanted = thd_attention(q, k, v, layout)
            assert torch.equal(got, wanted)
            for a, b in zip(torch.autograd.grad(got, (q, k, v), do), torch.autograd.grad(wanted, (q, k, v), do)):
                assert torch.equal(a, b)
        assert len(graphs) <= 2

    def test_the_operators_satisfy_opcheck(self):
        from te_thd_bridge import ops

        q, k, v = (x.requires_grad_() for x in PLAIN.qkv(4, 2, 8, 8, torch.float32, CPU, fill=0.0))
        cu, padded = (PLAIN.tensor(values, CPU) for values in (prefix(PLAIN.n), PLAIN.padded_q))
        sink = torch.randn(4, requires_grad=True)
        plain = (cu, cu.clone(), [padded], [0], [1], [0] * 9, 4, 4, "any", sink, None, 13, "padding_causal", None, [-1, -1], 0.0, False, True, "auto")
        torch.library.opcheck(ops.attention, (q, k, v, *plain), test_utils=["test_schema", "test_autograd_registration", "test_faketensor"])
        out, lse, _ = ops.attention(q, k, v, *plain)
        arguments = (torch.randn_like(out), out.detach(), lse, q.detach(), k.detach(), v.detach(), *plain)
        torch.library.opcheck(ops.attention_backward, arguments, test_utils=["test_schema", "test_faketensor"])
