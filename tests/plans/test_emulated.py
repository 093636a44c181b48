"""Graph plans end to end on a CPU: declared, bound and executed as on a GPU, with an emulated engine in the middle.

This is where the forms that no GPU at hand takes are run: padded Stats (sm8x, sm12x), a native sink, prefixes bound as they are.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from te_thd_bridge.checks import band_of
from te_thd_bridge.execution import _offset_strides
from te_thd_bridge.plans import BackwardTensors, ForwardTensors
from te_thd_bridge.plans.buckets import batch_bucket, length_bucket, token_bucket
from te_thd_bridge.plans.graph import GraphPlan, direct_form
from te_thd_bridge.spec import AttentionSpec

from ..layouts import BANDS, NAN, Packed, packed
from .emulated import install

CPU = torch.device("cpu")
HEADS, HEADS_KV, DIM, DIM_V = 4, 2, 16, 8
TOLERANCE = 1e-2


def run(batch, *, mask="padding_causal", window=(-1, -1), sink=None, max_logit=False, lse=True, bind=False):
    """Forward and, with lse, backward of a GraphPlan in bf16, outputs poisoned; and the truth."""
    q, k, v = batch.qkv(HEADS, HEADS_KV, DIM, DIM_V, torch.bfloat16, CPU)
    fused = torch.full((batch.rows["v"], HEADS_KV, DIM_V + 8), NAN, dtype=torch.bfloat16)
    fused[:, :, :DIM_V] = v
    v = fused[:, :, :DIM_V]
    do = batch.random("o", HEADS, DIM_V, torch.bfloat16, CPU, seed=3)
    strides = {"k": k.stride(0), "v": v.stride(0), "o": HEADS * DIM_V, "stats": HEADS}
    layout = batch.layout(CPU, strides, dict.fromkeys("kvo", 2) | {"stats": 4})
    contiguous = {"o": DIM_V, "do": DIM_V, "dq": DIM, "dk": DIM, "dv": DIM_V}
    places = {"q": q.stride()[:2], "k": k.stride()[:2], "v": v.stride()[:2]}
    places |= {port: ((HEADS_KV if port in ("dk", "dv") else HEADS) * width, width) for port, width in contiguous.items()}
    spec = AttentionSpec(
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        heads_q=HEADS,
        heads_kv=HEADS_KV,
        dim_qk=DIM,
        dim_v=DIM_V,
        batch=batch_bucket(len(batch.n)),
        max_q=length_bucket(max(batch.n)),
        max_kv=length_bucket(max(batch.m)),
        tokens_q=token_bucket(batch.rows["q"]),
        tokens_kv=token_bucket(batch.rows["k"]),
        tokens_o=0,
        band=band_of(mask, window),
        scale=DIM**-0.5,
        sink=sink is not None,
        dropout_p=0.0,
        deterministic=False,
        needs_lse=lse,
        max_logit=max_logit,
        strides=tuple(sorted((port, pair) for port, pair in places.items() if port in "qkvo")),
    )
    spec = replace(spec, offset_strides=_offset_strides(spec, layout, (q.stride(0), k.stride(0), v.stride(0))))
    if bind:
        spec = replace(spec, bound=direct_form(spec, layout))
        assert spec.bound
    poisoned = lambda *shape, dtype=torch.bfloat16: torch.full(shape, 7.0, dtype=dtype)  # noqa: E731
    forward = ForwardTensors(q, k, v, poisoned(batch.rows["o"], HEADS, DIM_V), softmax_offset=sink)
    forward.lse = poisoned(batch.rows["q"], HEADS, dtype=torch.float32) if lse else None
    forward.max_logit = poisoned(HEADS, dtype=torch.float32) if max_logit else None
    GraphPlan(spec, "fwd").forward(forward, layout)
    results = {"o": forward.out, "lse": forward.lse, "max_logit": forward.max_logit}
    if lse:
        places |= {"dq": places["dq"]}
        backward_spec = replace(spec, bound=(), needs_lse=True, max_logit=False, strides=tuple(sorted(places.items())))
        gradients = [poisoned(*x.shape) for x in (q, k, v)]
        d_sink = None if sink is None else poisoned(HEADS, dtype=torch.float32)
        tensors = BackwardTensors(q, k, v, forward.out, forward.lse, do, *gradients, sink, d_sink)
        GraphPlan(backward_spec, "bwd").backward(tensors, layout)
        results |= {"dq": gradients[0], "dk": gradients[1], "dv": gradients[2], "d_sink": d_sink, "do": do[batch.real("o")].double()}
    return results, batch.truth(q, k, v, mask=mask, window=window, sink=sink, do=do)


def assert_right(batch, got, true):
    for name, port in (("o", "o"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        if got.get(name) is not None:
            wanted = true.out if name == "o" else getattr(true, name)
            # Gradients of short sequences are small differences of terms as large as the incoming gradient.
            scale = wanted.norm() + (0.0 if name == "o" else got["do"].norm())
            assert (got[name].double() - wanted).norm() <= TOLERANCE * scale, name
            assert (got[name][batch.padding(port)] == 0).all(), name
    if got["lse"] is not None:
        finite = torch.isfinite(true.lse)
        assert (torch.isneginf(got["lse"]) == ~finite).all()
        assert torch.allclose(got["lse"][finite].double(), true.lse[finite], atol=1e-4)
    if got["max_logit"] is not None:
        assert torch.allclose(got["max_logit"].double(), true.max_logit, atol=1e-4)
    if got.get("d_sink") is not None:
        assert torch.allclose(got["d_sink"].double(), true.d_sink, atol=5e-2)


EVERY = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


@pytest.mark.parametrize("capability", [80, 90, 120])
@EVERY
@given(packed(max_batch=4, own=True), st.sampled_from(list(BANDS)), st.sampled_from([(-1, -1), (3, -1), (4, 2)]))
def test_any_layout_is_right_in_both_forms_of_stats(monkeypatch, capability, batch, mask, window):
    if not any(batch.n) or not any(batch.m):
        return
    install(monkeypatch, capability=capability, backend_version=91900)
    assert_right(batch, *run(batch, mask=mask, window=window))


BATCH = Packed([20, 0, 7, 33], [3, 1, 0, 5], m=[9, 4, 0, 40], gaps_kv=[2, 0, 3, 1], tail=4)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("refuse", [False, True], ids=["native", "added afterwards"])
@pytest.mark.parametrize("lse, max_logit", [(True, False), (False, False), (True, True), (False, True)])
def test_sinks_and_largest_logits_come_out_of_every_form(monkeypatch, capability, refuse, lse, max_logit):
    declared = install(monkeypatch, capability=capability, backend_version=91900, refuse_sinks=refuse)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    got, true = run(BATCH, sink=sink, lse=lse, max_logit=max_logit, mask="padding_causal_bottom_right")
    assert_right(BATCH, got, true)
    assert declared[0][1].sink is (not refuse and not max_logit)


def test_prefixes_are_bound_as_they_are_from_cudnn_9_24_on(monkeypatch):
    install(monkeypatch, capability=90, backend_version=92400)
    batch = Packed([20, 0, 7, 33], [3, 1, 0, 5], tail=4)
    assert_right(batch, *run(batch, bind=True))
    assert_right(batch, *run(batch, bind=True, window=(5, 0), max_logit=True))


@pytest.mark.parametrize(
    "batch, version",
    [
        (Packed([3, 2], [1, 1]), 91900),
        (Packed([3] * 5, [1] * 5), 92700),
        (Packed([3, 2], [1, 1], dtype=torch.int64), 92700),
        (Packed([3, 2], [1, 1], m=[3, 2], gaps_kv=[1, 1]), 92700),
        (Packed([3, 2], [1, 1], own={"v": ([0, 4], 8, "element", 1, True)}), 92700),
        (Packed([3, 2], [1, 1], own={"v": ([0, 4], 8, "token", 1, False)}), 92700),
    ],
    ids=["older cuDNN", "no bucket", "int64", "two lengths", "elements", "no last entry"],
)
def test_prefixes_are_converted_where_they_cannot_be_bound(monkeypatch, batch, version):
    install(monkeypatch, capability=90, backend_version=version)
    with pytest.raises(AssertionError):
        run(batch, bind=True)
    assert_right(batch, *run(batch))
