"""Graph plans on a GPU: right against fp64, indifferent to what padding holds, free of synchronisation, capturable."""

import threading

import pytest
import torch

from te_thd_bridge import RaggedOffset, ThdLayout, plan_report, thd_attention
from te_thd_bridge.execution import Options, find_call
from te_thd_bridge.plans.select import plan_cache

from ..layouts import NAN, Packed, prefix, relative

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
INF = float("inf")
LONG = Packed([300, 200, 0, 411, 64], [84, 56, 3, 101, 64], tail=37)
CROSS = Packed([300, 200, 0, 411, 64], [84, 56, 3, 101, 64], m=[350, 100, 7, 411, 0], gaps_kv=[10, 156, 3, 1, 64], tail=37)
ERROR = {torch.bfloat16: 6e-3, torch.float16: 8e-4}


def run(batch, *, heads=8, heads_kv=2, dim=128, dim_v=None, dtype=torch.bfloat16, fill=NAN, backward=True, sink=None, own=None, **options):
    """out, lse, dq, dk, dv (and d_sink) with ``fill`` in every padding row of q, k, v and the incoming gradient."""
    dim_v = dim_v or dim
    q, k, v = batch.qkv(heads, heads_kv, dim, dim_v, dtype, CUDA, fill)
    do = batch.random("o", heads, dim_v, dtype, CUDA, fill, seed=3)
    leaves = [x.requires_grad_(backward) for x in (q, k, v)] + ([] if sink is None else [sink.requires_grad_(backward)])
    strides = {"k": k.stride(0), "v": v.stride(0), "o": heads * dim_v}
    layout = batch.layout(CUDA, strides, dict.fromkeys(strides, 2))
    out = torch.full((batch.rows["o"], heads, dim_v), 7.0, dtype=dtype, device=CUDA) if "o" in batch.own else None
    out, lse = thd_attention(q, k, v, layout, softmax_offset=sink, return_lse=True, out=out, **options)
    return (out, lse, *torch.autograd.grad(out, leaves, do)) if backward else (out, lse)


def wanted(batch, *, heads=8, heads_kv=2, dim=128, dim_v=None, dtype=torch.bfloat16, sink=None, backward=True, **options):
    q, k, v = batch.qkv(heads, heads_kv, dim, dim_v or dim, dtype, CUDA)
    do = batch.random("o", heads, dim_v or dim, dtype, CUDA, seed=3) if backward else None
    known = {key: options[key] for key in ("mask", "window") if key in options}
    return batch.truth(q, k, v, sink=sink, do=do, **known)


def errors(batch, got, true) -> dict[str, float]:
    names = ("o", "dq", "dk", "dv") if len(got) > 2 else ("o",)
    tensors = dict(zip(names, (got[0], *got[2:5])))
    truths = {"o": true.out, "dq": true.dq, "dk": true.dk, "dv": true.dv}
    return {name: relative(tensor, truths[name]) for name, tensor in tensors.items()}


def assert_right(batch, got, true, dtype=torch.bfloat16):
    for name, error in errors(batch, got, true).items():
        assert error < ERROR[dtype], (name, error)
    finite = torch.isfinite(true.lse)
    assert (torch.isneginf(got[1]) == ~finite).all()
    assert torch.allclose(got[1][finite].double(), true.lse[finite], atol=1e-4)
    assert_padding_is_zero(batch, got)


def assert_padding_is_zero(batch, got):
    for port, tensor in zip(("o", "q", "k", "v"), (got[0], *got[2:5])):
        assert (tensor[batch.padding(port)] == 0).all(), port


OPTIONS = {
    "full": dict(mask="padding"),
    "causal": dict(),
    "bottom right": dict(mask="padding_causal_bottom_right"),
    "window": dict(window=(64, 0)),
    "two-sided window": dict(mask="padding", window=(30, 17)),
    "window bottom right": dict(mask="padding_causal_bottom_right", window=(33, -1)),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("batch", [LONG, CROSS], ids=["self", "cross"])
def test_masks_are_right_where_rows_may_see_nothing(batch, options):
    assert_right(batch, run(batch, **options), wanted(batch, **options))


@pytest.mark.parametrize("dim, dim_v", [(64, 64), (128, 128), (192, 128), (256, 256), (80, 80), (72, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_dims_and_dtypes_are_right(dim, dim_v, dtype):
    shape = dict(dim=dim, dim_v=dim_v, dtype=dtype)
    assert_right(LONG, run(LONG, **shape), wanted(LONG, **shape), dtype)


@pytest.mark.parametrize("heads, heads_kv", [(8, 8), (8, 1), (16, 2)])
def test_head_groups_are_right(heads, heads_kv):
    shape = dict(heads=heads, heads_kv=heads_kv)
    assert_right(LONG, run(LONG, **shape), wanted(LONG, **shape))


@pytest.mark.parametrize("dim", [264, 320, 512])
def test_wide_heads_run_forward(dim):
    assert_right(LONG, run(LONG, dim=dim, backward=False), wanted(LONG, dim=dim, backward=False))


def test_wide_heads_refuse_training_before_anything_runs():
    with pytest.raises(ValueError, match=r"no backward plan for head dims \(512, 512\).*served head dims are multiples of 8 up to 256"):
        run(LONG, dim=512)


@pytest.mark.parametrize("deterministic", [False, True])
def test_real_rows_do_not_depend_on_what_padding_holds(deterministic):
    runs = [run(LONG, fill=fill, deterministic=deterministic) for fill in (0.0, NAN, INF)]
    for other in runs[1:]:
        assert torch.equal(runs[0][0], other[0]) and torch.equal(runs[0][1], other[1])
        for a, b in zip(runs[0][2:], other[2:]):
            assert torch.equal(a, b) if deterministic else torch.isfinite(b).all()


def test_deterministic_gradients_repeat_bitwise():
    first = run(LONG, deterministic=True)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, run(LONG, deterministic=True)))


@pytest.mark.parametrize("options", [dict(), dict(mask="padding", window=(20, 20))], ids=["causal", "window"])
@pytest.mark.parametrize("batch", [LONG, CROSS], ids=["self", "cross"])
def test_sinks_and_their_gradient_are_right(batch, options):
    sink = torch.randn(8, device=CUDA, generator=torch.Generator(CUDA).manual_seed(0)) * 2
    got, true = run(batch, sink=sink, **options), wanted(batch, sink=sink, **options)
    assert_right(batch, got, true)
    assert relative(got[5], true.d_sink) < 2e-2  # a sum over all rows of bf16 outputs that cancel


def test_max_logit_looks_at_real_rows_only():
    q, k, v = LONG.qkv(8, 2, 128, 128, torch.bfloat16, CUDA, fill=100.0)
    out, lse, max_logit = thd_attention(q, k, v, LONG.layout(CUDA), return_lse=True, return_max_logit=True)
    true = LONG.truth(q, k, v)
    assert torch.allclose(max_logit.double(), true.max_logit, rtol=1e-4)
    finite = torch.isfinite(true.lse)
    assert torch.allclose(lse[finite].double(), true.lse[finite], atol=1e-4) and relative(out, true.out) < 6e-3


def test_ports_may_be_padded_differently():
    rows = LONG.rows["q"]
    starts = [n + 9 * i for i, n in enumerate(prefix([300, 200, 0, 411, 64])[:-1])]
    backwards = [rows - 300 - 8, 600, 0, 100, 10]
    own = {"o": (starts, rows + 60, "token", 1, True), "v": (backwards, rows, "element", 8, False), "k": (starts, rows, "byte", 4, True)}
    batch = Packed(LONG.n, LONG.gaps, tail=LONG.tail, own=own)
    assert_right(batch, run(batch), wanted(batch))


@pytest.mark.parametrize("form", ["t3hd", "th3d", "t2hd", "fused_groups"])
def test_strided_inputs_are_read_without_a_copy(form, recwarn):
    q, k, v = LONG.qkv(8, 2 if form == "fused_groups" else 8, 64, 64, torch.bfloat16, CUDA)
    if form == "t3hd":
        views = torch.stack([q, k, v], 1).unbind(1)
    elif form == "th3d":
        views = torch.stack([q, k, v], 2).unbind(2)
    elif form == "t2hd":
        views = (q, *torch.stack([k, v], 1).unbind(1))
    else:
        fused = torch.cat([q.unflatten(1, (2, 4)), k[:, :, None], v[:, :, None]], 2)
        views = (q, fused[:, :, 4], fused[:, :, 5])
    layout, do = LONG.layout(CUDA), LONG.random("o", 8, 64, torch.bfloat16, CUDA)
    results = []
    for tensors in ((q, k, v), views):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = thd_attention(*leaves, layout, deterministic=True)
        results.append((out, *torch.autograd.grad(out, leaves, do)))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert not recwarn.list, "a copy would be announced"


def test_offsets_in_elements_count_in_the_callers_tensor_even_where_it_is_copied():
    q, k, v = LONG.qkv(8, 2, 128, 128, torch.bfloat16, CUDA)
    fused = torch.stack([k, v], 2)
    crooked = fused[:, :, 1].transpose(1, 2).contiguous().transpose(1, 2)
    do, wanted_all = LONG.random("o", 8, 128, torch.bfloat16, CUDA, seed=3), run(LONG, deterministic=True)
    for view in (fused[:, :, 1], crooked):
        offset = RaggedOffset(torch.tensor(LONG.padded_q, device=CUDA) * view.stride(0) // 8, "element", 8)
        layout = ThdLayout.from_cu_seqlens(
            LONG.tensor(prefix(LONG.n), CUDA), cu_seqlens_q_padded=LONG.tensor(LONG.padded_q, CUDA), max_seqlen_q=411, offsets={"v": offset}
        )
        leaves = [x.detach().requires_grad_() for x in (q, k, view)]
        out = thd_attention(*leaves, layout, deterministic=True)
        got = (out, *torch.autograd.grad(out, leaves, do))
        assert torch.equal(got[0], wanted_all[0]) and all(torch.equal(a, b) for a, b in zip(got[1:], wanted_all[2:]))


def test_a_layout_that_cannot_be_read_is_copied_with_a_warning():
    q, k, v = LONG.qkv(8, 2, 128, 128, torch.bfloat16, CUDA)
    crooked = v.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.warns(UserWarning, match="v: got strides .* a contiguous copy"):
        out = thd_attention(q, k, crooked, LONG.layout(CUDA))
    assert torch.equal(out, thd_attention(q, k, v, LONG.layout(CUDA)))


def test_dropout_repeats_and_its_mask_is_the_same_in_both_directions():
    q, k, v = LONG.qkv(8, 2, 128, 128, torch.bfloat16, CUDA)
    v = torch.randn_like(v)  # finite everywhere: the identity below sums over all rows
    v.requires_grad_()
    layout = LONG.layout(CUDA)

    def call(seed):
        torch.manual_seed(seed)
        return thd_attention(q, k, v, layout, dropout_p=0.2)

    assert torch.equal(call(1), call(1)) and not torch.equal(call(1), call(2))
    do = LONG.random("o", 8, 128, torch.bfloat16, CUDA, fill=0.0)
    products = []
    for seed in (1, 2):
        out = call(seed)
        (dv,) = torch.autograd.grad(out, v, do)
        products.append(((do.double() * out.double()).sum(), (dv.double() * v.double()).sum()))
    # out is linear in v: <do, out> = <dv, v> with one mask both ways, and far from it with two.
    (first, first_back), (_, second_back) = products
    assert abs(first - first_back) < 0.1 * abs(first - second_back)
    assert (out[LONG.padding("o")] == 0).all()


def test_nothing_synchronises_once_warm():
    q, k, v = (x.requires_grad_() for x in LONG.qkv(8, 2, 128, 128, torch.bfloat16, CUDA))
    do = LONG.random("o", 8, 128, torch.bfloat16, CUDA)
    sink = torch.randn(8, device=CUDA, requires_grad=True)

    def step(layout):
        out, _ = thd_attention(q, k, v, layout, softmax_offset=sink, return_lse=True, dropout_p=0.1)
        torch.autograd.grad(out, (q, k, v, sink), do)
        thd_attention(q, k, v, layout, return_max_logit=True)

    step(LONG.layout(CUDA))
    fresh = LONG.layout(CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(fresh)
        step(fresh)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_follows_the_values_in_the_layouts_tensors():
    # cudnn-frontend issue 552: graphs replayed with the lengths that were current at capture.
    slots, rows, heads, heads_kv = 4, 160, 8, 2
    cu, padded = (torch.zeros(slots + 1, dtype=torch.int32, device=CUDA) for _ in range(2))
    layout = ThdLayout.from_cu_seqlens(cu, cu_seqlens_q_padded=padded, max_seqlen_q=128)
    tensors = [torch.randn(rows, h, 128, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for h in (heads, heads_kv, heads_kv)]
    do = torch.randn(rows, heads, 128, device=CUDA, dtype=torch.bfloat16)

    def fill(lengths):
        slot = [-(-n // 8) * 8 for n in lengths]
        cu.copy_(torch.tensor(prefix(lengths)))
        padded.copy_(torch.tensor(prefix(slot)))
        real = [row for start, n in zip(prefix(slot), lengths) for row in range(start, start + n)]
        with torch.no_grad():
            for tensor in (*tensors, do):
                tensor.nan_to_num_(0.5)
                tensor[[row for row in range(rows) if row not in set(real)]] = NAN

    def step(on):
        out = thd_attention(*tensors, on, deterministic=True)
        return (out, *torch.autograd.grad(out, tensors, do))

    fill([100, 28, 0, 0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(layout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layout)
    for lengths in ([30, 60, 38, 0], [1, 1, 1, 1], [64, 64, 0, 0], [100, 28, 0, 0]):
        fill(lengths)
        graph.replay()
        eager = step(ThdLayout.from_cu_seqlens(cu.clone(), cu_seqlens_q_padded=padded.clone(), max_seqlen_q=128))
        for a, b in zip(captured, eager):
            assert torch.equal(a, b) and torch.isfinite(a).all(), lengths


def test_an_unknown_attention_is_refused_during_capture():
    q, k, v = LONG.qkv(8, 2, 104, 104, torch.bfloat16, CUDA)
    layout = LONG.layout(CUDA)
    with pytest.raises(RuntimeError, match="run it once before the capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            thd_attention(q, k, v, layout)
    torch.cuda.synchronize()


def test_changed_values_in_the_same_tensors_are_noticed():
    batch, other = Packed([300, 200, 100], [20, 0, 20]), Packed([100, 250, 180], [40, 0, 10])
    q, k, v = (torch.randn(640, h, 128, device=CUDA, dtype=torch.bfloat16) for h in (8, 2, 2))
    layout = ThdLayout.from_cu_seqlens(batch.tensor(prefix(batch.n), CUDA), cu_seqlens_q_padded=batch.tensor(batch.padded_q, CUDA), max_seqlen_q=300)
    thd_attention(q, k, v, layout)
    layout.cu_seqlens_q.copy_(torch.tensor(prefix(other.n)))
    layout.offsets["q"].values.copy_(torch.tensor(other.padded_q))
    other.rows = dict.fromkeys(other.rows, 640)
    assert relative(thd_attention(q, k, v, layout), other.truth(q, k, v).out) < 6e-3


def kernels(work) -> list[str]:
    """Names of the kernels that one call launches, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as run:
        work()
        torch.cuda.synchronize()
    return [event.name for event in run.events() if event.device_type == torch.autograd.DeviceType.CUDA and "Memcpy" not in event.name]


def test_a_packed_caller_pays_for_no_kernel_but_the_engines():
    batch = Packed([300, 200, 411, 64], [0, 0, 0, 0])
    q, k, v = batch.qkv(8, 2, 128, 128, torch.bfloat16, CUDA)
    layout = ThdLayout.from_cu_seqlens(batch.tensor(prefix(batch.n), CUDA), max_seqlen_q=411)
    thd_attention(q, k, v, layout)
    torch.cuda.synchronize()
    packed = kernels(lambda: thd_attention(q, k, v, layout))
    assert packed and not any("clear" in name or "widen" in name for name in packed)
    padded = LONG.layout(CUDA)
    q, k, v = LONG.qkv(8, 2, 128, 128, torch.bfloat16, CUDA)
    thd_attention(q, k, v, padded)
    torch.cuda.synchronize()
    names = kernels(lambda: thd_attention(q, k, v, padded))
    assert len(names) == len(packed) + 1 and sum("clear" in name for name in names) == 1


@pytest.mark.parametrize("options", [dict(), dict(window=(64, 0)), dict(mask="padding")], ids=["causal", "window", "full"])
def test_int32_prefixes_are_bound_as_they_are_where_cudnn_takes_them(options):
    cudnn = pytest.importorskip("cudnn")
    if cudnn.backend_version() < 92400:
        pytest.skip("needs cuDNN 9.24")
    batch = Packed([300, 200, 0, 411, 64, 1, 128, 90], [84, 56, 3, 101, 64, 0, 7, 2], tail=37)
    q, k, v = batch.qkv(8, 2, 128, 128, torch.bfloat16, CUDA)
    chosen = Options(**options)
    _, _, _, call = find_call(q, k, v, batch.layout(CUDA), chosen, None, None, needs_lse=True, needs_backward=False)
    assert dict(call.forward_plan.plan.spec.bound) == {"q": 1024, "k": 256, "v": 256, "o": 1024, "stats": 8}
    assert_right(batch, run(batch, **options), wanted(batch, **options))


def test_the_callers_stream_is_used():
    q, k, v = LONG.qkv(8, 2, 128, 128, torch.bfloat16, CUDA)
    layout, stream = LONG.layout(CUDA), torch.cuda.Stream()
    expected = thd_attention(q, k, v, layout)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = q + 0
        out = thd_attention(late, k, v, layout)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_threads_share_plans_and_stay_right():
    q, k, v = LONG.qkv(8, 2, 128, 128, torch.bfloat16, CUDA)
    layout = LONG.layout(CUDA)
    expected = thd_attention(q, k, v, layout)
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(20):
                if not torch.equal(thd_attention(q, k, v, LONG.layout(CUDA)), expected):
                    wrong.append(1)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_random_layouts_stop_building_plans_and_memory_stays_flat():
    # pytorch pull request 191576 and TransformerEngine issue 1348: plans built on every call, caches that never evict.
    draw = torch.Generator().manual_seed(0)
    plan_cache.clear()
    before, levels = dict(plan_cache.builds), []
    for step in range(200):
        lengths = torch.randint(1, 2049, (8,), generator=draw)
        lengths = (lengths * min(1.0, 8192 / float(lengths.sum()))).long().clamp(min=1).tolist()
        batch = Packed(lengths, torch.randint(0, 64, (8,), generator=draw).tolist())
        q, k, v = (torch.randn(batch.rows["q"], h, 128, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for h in (16, 4, 4))
        thd_attention(q, k, v, batch.layout(CUDA)).sum().backward()
        levels.append((plan_cache.builds["fwd"] - before["fwd"], plan_cache.builds["bwd"] - before["bwd"], torch.cuda.memory_reserved()))
    assert levels[-1][0] <= 3 and levels[-1][1] <= 3 and levels[-1][:2] == levels[49][:2]
    assert levels[-1][2] - levels[49][2] < 200 << 20


def test_compiled_calls_equal_eager_ones_without_a_graph_break():
    q, k, v = (x.requires_grad_() for x in LONG.qkv(8, 2, 128, 128, torch.bfloat16, CUDA))
    do = LONG.random("o", 8, 128, torch.bfloat16, CUDA)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v, layout: thd_attention(q, k, v, layout, deterministic=True), fullgraph=True)
    for longest in (411, 412, 415):
        layout = ThdLayout.from_cu_seqlens(LONG.tensor(prefix(LONG.n), CUDA), cu_seqlens_q_padded=LONG.tensor(LONG.padded_q, CUDA), max_seqlen_q=longest)
        got, eager = compiled(q, k, v, layout), thd_attention(q, k, v, layout, deterministic=True)
        assert torch.equal(got, eager)
        for a, b in zip(torch.autograd.grad(got, (q, k, v), do), torch.autograd.grad(eager, (q, k, v), do)):
            assert torch.equal(a, b)


def test_fp32_is_refused_with_the_way_out():
    q = torch.randn(13, 2, 64, device=CUDA)
    layout = Packed([3, 2, 4], [1, 2, 1]).layout(CUDA)
    with pytest.raises(TypeError, match="q: got dtype torch.float32; GPU plans take torch.float16 and torch.bfloat16.*plan='reference'"):
        thd_attention(q, q, q, layout)
    assert thd_attention(q, q, q, layout, plan="reference").shape == q.shape


def test_what_an_engine_would_misread_is_refused():
    q, k, v = LONG.qkv(8, 2, 128, 128, torch.bfloat16, CUDA)
    layout, rows = LONG.layout(CUDA), LONG.rows["o"]
    thd_attention(q, k, v, layout, out=torch.empty(rows, 8, 128, dtype=torch.bfloat16, device=CUDA))
    crooked = torch.empty(rows * 1024 + 1, dtype=torch.bfloat16, device=CUDA)[1:].view(rows, 8, 128)
    with pytest.raises(ValueError, match="out: got an address of 2 modulo 16"):
        thd_attention(q, k, v, layout, out=crooked)
    with pytest.raises(TypeError, match="softmax_offset: got dtype torch.float64; accepted is torch.float32"):
        thd_attention(q, k, v, layout, softmax_offset=torch.zeros(8, dtype=torch.float64, device=CUDA))
    strided = torch.randn(8, 2, device=CUDA)[:, 0]
    assert torch.equal(*(thd_attention(q, k, v, layout, softmax_offset=sink) for sink in (strided, strided.clone())))


def test_a_pinned_plan_runs_or_is_refused():
    q, k, v = LONG.qkv(8, 2, 128, 128, torch.bfloat16, CUDA)
    thd_attention(q, k, v, LONG.layout(CUDA), plan="cudnn")
    name = next(row["plan"] for row in plan_report() if row["calls"])
    thd_attention(q, k, v, LONG.layout(CUDA), plan=name)
    with pytest.raises(ValueError, match="no cuDNN engine whose name contains 'eng999'"):
        thd_attention(q, k, v, LONG.layout(CUDA), plan="cudnn:eng999")
    with pytest.raises(ValueError, match="sdpa_fwd_prefill_sm90"):
        thd_attention(q, k, v, LONG.layout(CUDA), plan="cudnn:sdpa_fwd_prefill_sm90")


def test_a_tensor_max_seqlen_on_the_device_is_refused_without_a_sync():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(TypeError, match="max_seqlen_q: got a tensor on cuda:0"):
            ThdLayout.from_cu_seqlens(torch.zeros(2, dtype=torch.int32, device=CUDA), max_seqlen_q=torch.zeros((), dtype=torch.int32, device=CUDA))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_past_2_to_the_31_elements_are_right():
    # TransformerEngine pull request 1230: the last q offset is 2201485312 elements.
    count, slot = 4200, 128
    cu = torch.arange(0, (count + 1) * slot, slot, dtype=torch.int32, device=CUDA)
    lengths = cu.clone()
    lengths[-1] -= 28
    layout = ThdLayout.from_cu_seqlens(lengths, cu_seqlens_q_padded=cu, max_seqlen_q=slot)
    q, k, v = (torch.randn(count * slot, h, 128, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for h in (32, 2, 2))
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor[-28:] = NAN
    do = torch.randn(count * slot, 32, 128, device=CUDA, dtype=torch.bfloat16)
    out = thd_attention(q, k, v, layout)
    gradients = torch.autograd.grad(out, (q, k, v), do)
    single = RaggedOffset(torch.zeros(1, dtype=torch.int32, device=CUDA))
    for i in (0, 4095, 4096, 4199):
        n = slot - 28 * (i == 4199)
        rows = slice(i * slot, i * slot + n)
        alone = ThdLayout.from_cu_seqlens(torch.tensor([0, n], dtype=torch.int32, device=CUDA), max_seqlen_q=n, offsets={"q": single})
        parts = [x[rows].detach().clone().requires_grad_() for x in (q, k, v)]
        wanted_out = thd_attention(*parts, alone)
        assert torch.equal(out[rows], wanted_out)
        for a, b in zip(gradients, torch.autograd.grad(wanted_out, parts, do[rows])):
            assert relative(a[rows], b.double()) < 6e-3
    assert (out[-28:] == 0).all() and all((g[-28:] == 0).all() for g in gradients)
