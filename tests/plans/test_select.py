"""The plan cache: buckets, reuse, bounds and refusals, with plans that only count themselves."""

import random
import threading
from dataclasses import replace

import pytest
import torch

from te_thd_bridge.plans import select
from te_thd_bridge.plans.buckets import batch_bucket, deterministic_length_bucket, length_bucket, token_bucket
from te_thd_bridge.plans.graph import UnsupportedByGraph

from .test_graph import SPEC


class CountingPlan:
    def __init__(self, spec, direction, pinned):
        if spec.dim_qk == 7:
            raise UnsupportedByGraph("seven is odd")
        self.spec, self.name, self.workspace_bytes = spec, "counting", 0


@pytest.fixture
def cache(monkeypatch):
    monkeypatch.setattr(select, "GraphPlan", CountingPlan)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return select.PlanCache(limit=8)


def sized(lengths, gaps, **changes):
    tokens = sum(lengths) + sum(gaps)
    return replace(SPEC, batch=len(lengths), max_q=max(lengths), max_kv=max(lengths), tokens_q=tokens, tokens_kv=tokens, **changes)


@pytest.mark.parametrize("seed", range(10))
def test_random_layouts_of_one_batch_size_stop_building_plans(cache, seed):
    # pytorch pull request 191576: graphs that were planned again on every packed call.
    draw = random.Random(seed)
    builds = []
    for _ in range(200):
        while sum(lengths := [draw.randint(1, 2048) for _ in range(8)]) > 8192:
            pass
        spec = sized(lengths, [draw.randint(0, 63) for _ in lengths])
        batch = cache.get(spec, "fwd", "").plan.spec.batch
        cache.get(replace(spec, batch=batch), "bwd", "")
        builds.append(dict(cache.builds))
    assert builds[-1]["fwd"] <= 3 and builds[-1]["bwd"] <= 3
    assert builds[-1] == builds[49], "none in the last 150"


def test_the_cache_is_bounded_and_drops_the_least_recently_used(cache):
    specs = [sized([100 * (i + 1)], [0], heads_q=8 * (i + 1)) for i in range(12)]
    first = cache.get(specs[0], "fwd", "")
    for spec in specs[1:8]:
        cache.get(spec, "fwd", "")
    assert cache.get(specs[0], "fwd", "") is first
    for spec in specs[8:]:
        cache.get(spec, "fwd", "")
    assert len(cache.report()) == 8 and cache.get(specs[0], "fwd", "") is first
    builds = cache.builds["fwd"]
    cache.get(specs[1], "fwd", "")
    assert cache.builds["fwd"] == builds + 1


def test_a_larger_plan_serves_a_smaller_batch_but_not_a_much_smaller_one(cache):
    large = cache.get(sized([900] * 8, [0] * 8), "fwd", "")
    assert cache.get(sized([400] * 6, [0] * 6), "fwd", "") is large
    assert cache.get(sized([100] * 8, [0] * 8), "fwd", "") is not large


def test_with_dropout_sizes_are_never_substituted(cache):
    large = cache.get(sized([900] * 8, [0] * 8, dropout_p=0.1), "fwd", "")
    assert cache.get(sized([400] * 8, [0] * 8, dropout_p=0.1), "fwd", "") is not large


@pytest.mark.parametrize("field, value", [("scale", 0.2), ("needs_lse", False), ("heads_q", 16), ("dtype", torch.float16), ("sink", True), ("strides", ())])
def test_what_a_graph_depends_on_gives_another_plan(cache, field, value):
    spec = sized([100], [0])
    assert cache.get(spec, "fwd", "") is not cache.get(replace(spec, **{field: value}), "fwd", "")


def test_a_refusal_is_remembered(cache, monkeypatch):
    spec = sized([100], [0], dim_qk=7)
    with pytest.raises(UnsupportedByGraph):
        cache.get(spec, "fwd", "")
    monkeypatch.setattr(select, "GraphPlan", None)
    with pytest.raises(UnsupportedByGraph, match="seven"):
        cache.get(spec, "fwd", "")


def test_no_plan_is_built_while_a_cuda_graph_is_captured(cache, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run it once before the capture"):
        cache.get(sized([100], [0]), "fwd", "")


def test_threads_share_one_build(cache):
    results, barrier = [], threading.Barrier(8)

    def ask():
        barrier.wait()
        results.append(cache.get(sized([100], [0]), "fwd", ""))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(result) for result in results}) == 1 and cache.builds["fwd"] == 1


@pytest.mark.parametrize("bucket, least", [(batch_bucket, 1), (length_bucket, 128), (token_bucket, 1024), (deterministic_length_bucket, 128)])
def test_buckets_bound_their_values_and_are_their_own_buckets(bucket, least):
    previous = 0
    for value in range(1, 5000):
        size = bucket(value)
        assert size >= max(value, previous) and bucket(size) == size
        assert size < 2 * max(value, least)
        previous = size
