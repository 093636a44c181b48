"""Row statistics around a graph, through the real kernels (the interpreter's on a CPU), against their definitions."""

import pytest
import torch

from te_thd_bridge import metadata
from te_thd_bridge.metadata.types import Origins
from te_thd_bridge.plans import BackwardTensors
from te_thd_bridge.plans.rowwise import add_sink, pad_stats, sink_gradient, unpad_stats
from te_thd_bridge.spec import Band

from ..layouts import NAN, Packed

BATCH = Packed([3, 0, 40, 1], [2, 1, 5, 0], tail=4, lead=1)
HEADS, DIM = 3, 24


@pytest.fixture(params=["kernels", "twins"])
def made(request, device, monkeypatch):
    if request.param == "twins":
        monkeypatch.setattr("te_thd_bridge.plans.rowwise.runs_kernels", lambda tensor: False)
    cu, padded = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 3, 3, 43, 44], BATCH.padded_q))
    return metadata.widen(cu, cu, [Origins(padded, 1, 1, "q", BATCH.rows["q"])], Band(-1, 0), 6, [])


def test_stats_go_to_the_padded_form_and_back(made, device):
    lse = BATCH.random("q", HEADS, 1, torch.float32, device)[:, :, 0].contiguous()
    padded = torch.full((6, HEADS, 64), 5.0, device=device)
    pad_stats(lse, padded, made, 0)
    for i, (start, n) in enumerate(zip(BATCH.padded_q, BATCH.n)):
        assert torch.equal(padded[i, :, :n], lse[start : start + n].T) and (padded[i, :, n:] == 5.0).all()
    back = torch.full_like(lse, 9.0)
    unpad_stats(padded, back, made, 0)
    real = BATCH.real("q")
    assert torch.equal(back[real], lse[real]) and (back[BATCH.padding("q")] == 9.0).all()


def test_a_sink_added_afterwards_is_a_softmax_with_one_more_logit(made, device):
    logits = torch.randn(BATCH.rows["q"], HEADS, 7, dtype=torch.float64, device=device)
    values = torch.randn(BATCH.rows["q"], HEADS, 7, DIM, dtype=torch.float64, device=device)
    sink = torch.randn(HEADS, device=device) * 3
    out = torch.einsum("thk,thkd->thd", logits.softmax(-1), values).float()
    lse = logits.logsumexp(-1).float()
    with_sink = torch.cat([logits, sink.double()[None, :, None].expand(len(logits), HEADS, 1)], -1)
    wanted = torch.einsum("thk,thkd->thd", with_sink.softmax(-1)[:, :, :7], values)
    out[BATCH.padding("q")] = NAN
    lse[BATCH.padding("q")] = NAN
    add_sink(out, lse, sink, made, 0, 0)
    real = BATCH.real("q")
    assert torch.allclose(out[real].double(), wanted[real], atol=1e-5)
    assert torch.allclose(lse[real].double(), with_sink.logsumexp(-1)[real], atol=1e-5)
    assert out[BATCH.padding("q")].isnan().all(), "padding is the clearing launch's"


def test_the_sinks_gradient_counts_live_rows_only(made, device):
    out, do = (BATCH.random("q", HEADS, DIM, torch.bfloat16, device, seed=seed) for seed in (1, 2))
    lse = BATCH.random("q", HEADS, 1, torch.float32, device)[:, :, 0].contiguous()
    sink, d_sink = torch.randn(HEADS, device=device), torch.full((HEADS,), NAN, device=device)
    tensors = BackwardTensors(*[None] * 3, out, lse, do, None, None, None, sink, d_sink)
    sink_gradient(tensors, made, {"o": 0, "do": 0, "stats": 0})
    real = BATCH.real("q")
    rows = (out[real].double() * do[real].double()).sum(-1)
    assert torch.allclose(d_sink.double(), -(torch.exp(sink.double() - lse[real].double()) * rows).sum(0), rtol=1e-4, atol=1e-4)
