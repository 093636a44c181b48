"""ThdLayout and RaggedOffset: what is accepted, what is bound to which port, and what every refusal says."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from te_thd_bridge import RaggedOffset, ThdLayout
from te_thd_bridge.layout import PORTS, QUERY_PORTS


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


CU, PADDED = i32(0, 3, 5, 9), i32(0, 4, 8, 13)


def megatron_releases():
    """(version, PackedSeqParams) of every Megatron-Core release whose files are at hand."""
    root = os.environ.get("TE_THD_BRIDGE_MEGATRON_SOURCES")
    for path in sorted(Path(root).glob("*/megatron/core/packed_seq_params.py")) if root else []:
        spec = importlib.util.spec_from_file_location(f"packed_seq_params_{path.parents[2].name.replace('.', '_')}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield path.parents[2].name, module.PackedSeqParams


def test_every_port_follows_the_padded_prefix_of_its_side():
    kv = i32(0, 9, 12, 20)
    layout = ThdLayout.from_cu_seqlens(CU, i32(0, 5, 6, 9), cu_seqlens_q_padded=PADDED, cu_seqlens_kv_padded=kv, max_seqlen_q=4, max_seqlen_kv=5)
    for port in PORTS:
        assert layout.offsets[port].values is (PADDED if port in QUERY_PORTS else kv)
    assert (layout.batch, layout.max_seqlen_q, layout.max_seqlen_kv, layout.same_lengths) == (3, 4, 5, False)


def test_without_a_padded_prefix_sequences_lie_end_to_end():
    layout = ThdLayout.from_cu_seqlens(CU, max_seqlen_q=4)
    assert all(layout.offsets[port].values is CU for port in PORTS) and layout.same_lengths
    assert len(layout.distinct_offsets) == 1


def test_self_attention_pads_keys_as_queries():
    layout = ThdLayout.from_cu_seqlens(CU, cu_seqlens_q_padded=PADDED, max_seqlen_q=4)
    assert layout.offsets["v"].values is PADDED and layout.max_seqlen_kv == 4


def test_a_gradient_follows_its_tensor_unless_told_otherwise():
    own, other = RaggedOffset(i32(1, 6, 9)), RaggedOffset(i32(2, 7, 20, 30))
    layout = ThdLayout.from_cu_seqlens(CU, cu_seqlens_q_padded=PADDED, max_seqlen_q=4, offsets={"o": own, "v": own, "dv": other})
    assert layout.offsets["do"] is own and layout.offsets["dv"] is other and layout.offsets["dq"].values is PADDED


def test_a_first_entry_above_zero_and_int64_are_accepted():
    layout = ThdLayout.from_cu_seqlens(torch.tensor([5, 8, 8]), cu_seqlens_q_padded=torch.tensor([2, 6, 6]), max_seqlen_q=3)
    assert layout.batch == 2


def test_a_cpu_tensor_of_one_length_is_read():
    assert ThdLayout.from_cu_seqlens(CU, max_seqlen_q=torch.tensor(4)).max_seqlen_q == 4


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (dict(cu_seqlens_q=[0, 3]), TypeError, ["cu_seqlens_q:", "list", "tensor"]),
        (dict(cu_seqlens_q=torch.tensor([0.0, 3.0])), TypeError, ["cu_seqlens_q:", "float32", "int32"]),
        (dict(cu_seqlens_q=CU.view(2, 2)), ValueError, ["cu_seqlens_q:", "(2, 2)", "one dimension"]),
        (dict(cu_seqlens_q=torch.zeros(8, dtype=torch.int32)[::2]), ValueError, ["cu_seqlens_q:", "stride of 2", "contiguous"]),
        (dict(cu_seqlens_q=i32()), ValueError, ["cu_seqlens_q:", "empty", "[0]"]),
        (dict(cu_seqlens_kv=i32(0, 1), max_seqlen_kv=1), ValueError, ["cu_seqlens_kv:", "2 entries", "4"]),
        (dict(cu_seqlens_q_padded=i32(0, 4, 8)), ValueError, ["cu_seqlens_q_padded:", "3 entries", "4"]),
        (dict(cu_seqlens_kv_padded=i32(0)), ValueError, ["cu_seqlens_kv_padded:", "1 entries", "4"]),
        (dict(cu_seqlens_q_padded=PADDED.to("meta")), ValueError, ["cu_seqlens_q_padded:", "meta", "cpu"]),
        (dict(max_seqlen_q=None), TypeError, ["max_seqlen_q:", "None", "row count"]),
        (dict(max_seqlen_q=torch.zeros((), dtype=torch.int32, device="meta")), TypeError, ["max_seqlen_q:", "meta", "synchronise", "int"]),
        (dict(max_seqlen_q=4.0), TypeError, ["max_seqlen_q:", "float", "int"]),
        (dict(max_seqlen_q=True), TypeError, ["max_seqlen_q:", "bool", "int"]),
        (dict(max_seqlen_q=-1), ValueError, ["max_seqlen_q:", "-1", "0"]),
        (dict(cu_seqlens_kv=i32(0, 1, 2, 3)), TypeError, ["max_seqlen_kv:", "None"]),
        (dict(offsets=[1]), TypeError, ["offsets:", "list", "mapping"]),
        (dict(offsets={"w": RaggedOffset(CU)}), ValueError, ["offsets:", "'w'", "stats"]),
        (dict(offsets={"k": CU}), TypeError, ["offsets['k']:", "Tensor", "RaggedOffset"]),
        (dict(offsets={"k": RaggedOffset(i32(0, 1))}), ValueError, ["offsets['k'].values:", "2 entries", "3 or 4"]),
        (dict(padding="none"), ValueError, ["padding:", "'none'", "'any'", "'scrub'"]),
    ],
)
def test_bad_input_is_refused_by_name(arguments, error, words):
    arguments = {"cu_seqlens_q": CU, "max_seqlen_q": 4} | arguments
    with pytest.raises(error) as caught:
        ThdLayout.from_cu_seqlens(arguments.pop("cu_seqlens_q"), **arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (dict(values=3), TypeError, ["values:", "int", "tensor"]),
        (dict(values=CU, unit="row"), ValueError, ["unit:", "'row'", "'token'", "'byte'"]),
        (dict(values=CU, multiplier=0), ValueError, ["multiplier:", "0", "at least 1"]),
        (dict(values=CU, multiplier=2.0), TypeError, ["multiplier:", "float", "int"]),
    ],
)
def test_bad_offsets_are_refused_by_name(arguments, error, words):
    with pytest.raises(error) as caught:
        RaggedOffset(**arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "unit, multiplier, stride_bytes, itemsize, fraction",
    [
        ("token", 1, 512, 2, (1, 1)),
        ("token", 16, 512, 2, (16, 1)),
        ("token", 3, 0, 2, (3, 1)),  # a token offset needs no stride
        ("element", 1, 512, 2, (1, 256)),
        ("element", 8, 512, 2, (1, 32)),
        ("element", 256, 512, 2, (1, 1)),
        ("byte", 4, 512, 2, (1, 128)),
        ("byte", 512, 512, 2, (1, 1)),
    ],
)
def test_units_and_multipliers_become_rows(unit, multiplier, stride_bytes, itemsize, fraction):
    assert RaggedOffset(CU, unit, multiplier).tokens_as_fraction(stride_bytes, itemsize, "k") == fraction


@pytest.mark.parametrize(
    "unit, multiplier, stride_bytes, words",
    [
        ("element", 3, 512, ["offsets['v'].multiplier", "3 elements", "256 elements", "divisors"]),
        ("byte", 1024, 512, ["offsets['v'].multiplier", "1024 bytes", "512 bytes", "divisors"]),
        ("element", 1, 0, ["offsets['v']", "element", "row stride of 0", "token offsets"]),
    ],
)
def test_offsets_that_do_not_fit_the_rows_are_refused_by_name(unit, multiplier, stride_bytes, words):
    with pytest.raises(ValueError) as caught:
        RaggedOffset(CU, unit, multiplier).tokens_as_fraction(stride_bytes, 2, "v")
    for word in words:
        assert word in str(caught.value)


def test_a_description_is_frozen():
    with pytest.raises(AttributeError):
        RaggedOffset(CU).multiplier = 2


def test_ports_that_share_an_offset_are_told_apart_by_object_not_by_value():
    shared = RaggedOffset(PADDED)
    layout = ThdLayout.from_cu_seqlens(CU, cu_seqlens_q_padded=PADDED, max_seqlen_q=4, offsets={"k": shared, "v": shared, "o": RaggedOffset(PADDED)})
    place = dict(zip(PORTS, layout.offset_of_port))
    assert place["k"] == place["v"] == place["dk"] and place["o"] == place["do"] and len({place["q"], place["k"], place["o"]}) == 3
    assert layout.distinct_offsets[place["k"]] is shared


def test_offsets_of_b_and_of_b_plus_one_entries_are_accepted():
    layout = ThdLayout.from_cu_seqlens(CU, max_seqlen_q=4, offsets={"k": RaggedOffset(i32(9, 5, 0)), "v": RaggedOffset(torch.tensor([0, 3, 5, 9]))})
    assert layout.offsets["dk"].values.tolist() == [9, 5, 0] and layout.offsets["dv"].values.dtype == torch.int64


def test_a_batch_of_no_sequences_is_a_layout():
    layout = ThdLayout.from_cu_seqlens(i32(0), max_seqlen_q=0)
    assert layout.batch == 0 and "B=0" in repr(layout)


def test_nothing_of_a_layout_is_read_on_the_host():
    # Meta tensors have no values: whatever reads one raises.
    cu, kv, padded = CU.to("meta"), CU.to("meta"), PADDED.to("meta")
    own = {"o": RaggedOffset(padded)}
    layout = ThdLayout.from_cu_seqlens(cu, kv, cu_seqlens_q_padded=padded, max_seqlen_q=4, max_seqlen_kv=4, offsets=own)
    assert layout.device.type == "meta" and layout.batch == 3 and repr(layout)


@dataclass
class Params:
    qkv_format: str = "thd"
    cu_seqlens_q: torch.Tensor = None
    cu_seqlens_kv: torch.Tensor = None
    cu_seqlens_q_padded: torch.Tensor = None
    cu_seqlens_kv_padded: torch.Tensor = None
    max_seqlen_q: int = None
    max_seqlen_kv: int = None


def test_packed_seq_params_share_one_layout_until_they_hold_other_tensors():
    params = Params(cu_seqlens_q=CU, cu_seqlens_kv=CU, cu_seqlens_q_padded=PADDED, cu_seqlens_kv_padded=PADDED, max_seqlen_q=4, max_seqlen_kv=4)
    layout = ThdLayout.from_packed_seq_params(params)
    assert layout.same_lengths and layout.offsets["k"] is layout.offsets["q"]
    assert ThdLayout.from_packed_seq_params(params) is layout
    assert ThdLayout.from_packed_seq_params(params, padding="finite").padding == "finite"
    params.cu_seqlens_q_padded = PADDED + 1
    assert ThdLayout.from_packed_seq_params(params).offsets["q"].values is params.cu_seqlens_q_padded


def test_packed_seq_params_of_another_format_are_refused():
    with pytest.raises(ValueError, match="params.qkv_format: got 'sbhd'; accepted is 'thd'"):
        ThdLayout.from_packed_seq_params(Params("sbhd", cu_seqlens_q=CU, max_seqlen_q=4))
    with pytest.raises(TypeError, match="params: got int"):
        ThdLayout.from_packed_seq_params(3)
    with pytest.raises(ValueError, match="params.cu_seqlens_q: got None"):
        ThdLayout.from_packed_seq_params(Params(max_seqlen_q=4))


def test_key_attributes_that_are_missing_follow_the_query_side():
    layout = ThdLayout.from_packed_seq_params(SimpleNamespace(cu_seqlens_q=CU, cu_seqlens_q_padded=PADDED, max_seqlen_q=4))
    assert layout.offsets["k"].values is PADDED and layout.same_lengths and layout.max_seqlen_kv == 4


def test_a_padded_key_prefix_of_none_follows_the_query_side():
    layout = ThdLayout.from_packed_seq_params(Params(cu_seqlens_q=CU, cu_seqlens_kv=CU, cu_seqlens_q_padded=PADDED, max_seqlen_q=4, max_seqlen_kv=4))
    assert layout.offsets["k"].values is PADDED


@pytest.mark.parametrize("flag", [None, False, True])
def test_pad_between_seqs_is_not_consulted(flag):
    # Its False is wrong for padding after the last sequence alone, TransformerEngine issue 3331.
    params = Params(cu_seqlens_q=CU, cu_seqlens_kv=CU, cu_seqlens_q_padded=PADDED, cu_seqlens_kv_padded=PADDED, max_seqlen_q=4)
    params.pad_between_seqs = flag
    assert all(ThdLayout.from_packed_seq_params(params).offsets[port].values is PADDED for port in PORTS)


def test_parameters_that_take_no_attribute_still_give_a_layout():
    class Slotted:
        __slots__ = ("cu_seqlens_q", "max_seqlen_q")

    params = Slotted()
    params.cu_seqlens_q, params.max_seqlen_q = CU, 4
    assert ThdLayout.from_packed_seq_params(params).batch == 3


def test_the_installed_megatrons_class_is_read():
    PackedSeqParams = pytest.importorskip("megatron.core.packed_seq_params").PackedSeqParams
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=CU, cu_seqlens_kv=CU, max_seqlen_q=4, max_seqlen_kv=4)
    assert ThdLayout.from_packed_seq_params(params).offsets["k"].values is CU


@pytest.mark.parametrize("version, PackedSeqParams", list(megatron_releases()))
def test_megatrons_own_class_is_read(version, PackedSeqParams):
    full = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=CU,
        cu_seqlens_kv=CU,
        cu_seqlens_q_padded=PADDED,
        cu_seqlens_kv_padded=PADDED,
        max_seqlen_q=torch.tensor(4),
        max_seqlen_kv=4,
    )
    layout = ThdLayout.from_packed_seq_params(full)
    assert layout.offsets["o"].values is PADDED and layout.same_lengths and layout.max_seqlen_q == 4
    bare = PackedSeqParams(qkv_format="thd", cu_seqlens_q=CU, cu_seqlens_kv=CU, max_seqlen_q=4, max_seqlen_kv=4)
    assert ThdLayout.from_packed_seq_params(bare).offsets["k"].values is CU
