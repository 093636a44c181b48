"""Graphs through the real frontend, whose description of a graph needs no GPU; what runs on one is in tests/gpu."""

from dataclasses import replace

import pytest
import torch

from te_thd_bridge.layout import PORTS
from te_thd_bridge.plans import graph
from te_thd_bridge.spec import AttentionSpec, Band

cudnn = pytest.importorskip("cudnn")

SPEC = AttentionSpec(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    heads_q=8,
    heads_kv=2,
    dim_qk=192,
    dim_v=128,
    batch=6,
    max_q=512,
    max_kv=1024,
    tokens_q=4096,
    tokens_kv=5120,
    tokens_o=0,
    band=Band(-1, 0),
    scale=0.125,
    sink=False,
    dropout_p=0.0,
    deterministic=False,
    needs_lse=True,
    max_logit=False,
    strides=tuple(sorted({port: (2048 + 16 * i, 192 + 8 * i) for i, port in enumerate(PORTS) if port != "stats"}.items())),
)


def declare(spec=SPEC, direction="fwd", packed_stats=True):
    return graph._declare(cudnn, spec, direction, packed_stats, {})


def by_uid(made):
    return {tensor.uid: tensor for tensor in made.tensors.values()}


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_every_port_is_declared_over_the_callers_memory_with_its_own_offset(direction):
    tensors = by_uid(declare(direction=direction))
    offsets = set()
    for port in PORTS if direction == "bwd" else ("q", "k", "v", "o", "stats"):
        tensor = tensors[graph.UID[port]]
        key = port in ("k", "v", "dk", "dv")
        heads, length = (2, 1024) if key else (8, 512)
        width = 1 if port == "stats" else 128 if port in ("v", "o", "do", "dv") else 192
        row, head = (8, 1) if port == "stats" else SPEC.stride(port)
        assert list(tensor.dim) == [6, heads, length, width], port
        assert list(tensor.stride)[1:] == [head, row, 1], port
        assert list(tensor.ragged_offset.dim) == [7, 1, 1, 1] and tensor.ragged_offset.data_type == cudnn.data_type.INT64
        offsets.add(tensor.ragged_offset.uid)
    assert len(offsets) == (9 if direction == "bwd" else 5), "one ragged offset tensor a port"


@pytest.mark.parametrize(
    "band, wanted",
    [
        (Band(-1, 0), {"diagonal_band_right_bound": 0}),
        (Band(4, 0), {"diagonal_band_left_bound": 5, "diagonal_band_right_bound": 0}),
        (Band(-1, -1), {}),
        (Band(7, 3, True), {"diagonal_band_left_bound": 8, "diagonal_band_right_bound": 3, "diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT}),
    ],
)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_band_becomes_cudnns_diagonal_bounds(band, wanted, direction):
    node = declare(replace(SPEC, band=band), direction).nodes[0]
    assert {name: value for name, value in node.params.items() if name.startswith("diagonal")} == wanted
    assert node.params["attn_scale"] == 0.125 and node.params["use_padding_mask"] is True


def test_prefixes_are_bound_as_they_are_with_multipliers():
    bound = tuple((port, 100 + i) for i, port in enumerate(("k", "o", "q", "stats", "v")))
    made = declare(replace(SPEC, bound=bound))
    tensors = by_uid(made)
    for port, multiplier in bound:
        assert tensors[graph.UID[port]].ragged_offset_multiplier == multiplier
        assert tensors[graph.UID[port]].ragged_offset.data_type == cudnn.data_type.INT32
    assert list(made.nodes[0].inputs["cu_seq_len_q"].dim) == [7, 1, 1, 1] and "seq_len_q" not in made.nodes[0].inputs


def test_the_backward_bounds_its_workspace_and_takes_determinism():
    node = declare(replace(SPEC, deterministic=True), "bwd").nodes[0]
    assert (node.params["max_total_seq_len_q"], node.params["max_total_seq_len_kv"]) == (4096, 5120)
    assert node.params["use_deterministic_algorithm"] is True


def test_stats_are_padded_where_the_backend_wants_them_so():
    for direction in ("fwd", "bwd"):
        stats = by_uid(declare(direction=direction, packed_stats=False))[graph.UID["stats"]]
        assert list(stats.stride) == [8 * 512, 512, 1, 1] and stats.ragged_offset is None
    assert [graph.reads_packed_stats(cc) for cc in (80, 86, 89, 90, 100, 103, 120)] == [False, False, False, True, True, True, False]


def test_max_logit_takes_the_two_parts_of_the_lse():
    node = declare(replace(SPEC, max_logit=True)).nodes[0]
    assert node.params["generate_stats"] is False and {"score_max", "score_sum_exp"} <= set(node.outputs)


def test_sink_and_dropout_are_wired():
    node = declare(replace(SPEC, sink=True, dropout_p=0.1)).nodes[0]
    assert list(node.inputs["sink_token"].dim) == [1, 8, 1, 1]
    assert node.params["dropout_0"] == 0.1 and node.inputs["dropout_1"].uid == graph.UID["seed"]
    assert "sink_token" not in declare(replace(SPEC, sink=True), "bwd").nodes[0].inputs, "the backward meets the sink in Stats"


def test_a_graph_that_no_engine_takes_says_why():
    with pytest.raises(graph.UnsupportedByGraph, match=r"\S{10,}"):
        graph.build_graph(SPEC, "fwd", sm_version=90, sm_count=132)


class Offered:
    """A planned graph as the frontend shows it: names, and which of them build."""

    def __init__(self, names, broken=()):
        self.names, self.broken, self.built = names, broken, []

    def get_execution_plan_count(self):
        return len(self.names)

    def get_plan_name_at_index(self, index):
        return self.names[index]

    def build_plan_at_index(self, index):
        if self.names[index] in self.broken:
            raise RuntimeError("NVRTC says no")
        self.built.append(index)


def test_python_engines_are_passed_over_and_broken_ones_skipped():
    offered = Offered(["sdpa_fwd_prefill_sm90[TILE_M=128]", "eng2_k24=7", "eng6_k24=26"], broken=["eng2_k24=7"])
    assert graph.build_first(offered, None) == (2, "eng6_k24=26") and offered.built == [2]


def test_a_pinned_engine_that_derives_is_refused_not_run():
    offered = Offered(["sdpa_fwd_prefill_sm90[TILE_M=128]", "eng2_k24=7"])
    with pytest.raises(graph.UnsupportedByGraph, match="sdpa_fwd_prefill_sm90.*eng2"):
        graph.build_first(offered, "sdpa_fwd_prefill_sm90")
    assert offered.built == []
    with pytest.raises(graph.UnsupportedByGraph, match="eng2_k24=7: NVRTC says no"):
        graph.build_first(Offered(["eng2_k24=7"], broken=["eng2_k24=7"]), None)


def test_every_field_of_a_spec_can_reach_the_cache_key():
    changed = {"band": Band(3, 0), "dtype": torch.float16, "device": torch.device("cuda", 1), "strides": (), "bound": (("q", 2),), "offset_strides": (("q", 2),)}
    for name in SPEC.__dataclass_fields__:
        value = getattr(SPEC, name)
        other = changed[name] if name in changed else (not value) if isinstance(value, bool) else value + 1
        assert replace(SPEC, **{name: other}) != SPEC, name
