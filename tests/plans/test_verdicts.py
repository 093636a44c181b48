"""The verdict table and the rule from a verdict to a way of running."""

import copy
import enum
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from te_thd_bridge import RaggedOffset, ThdLayout
from te_thd_bridge.layout import PORTS as ALL_PORTS
from te_thd_bridge.plans import verdicts
from te_thd_bridge.plans.verdicts import INPUTS, PORTS, AttentionFacts, LayoutFacts, Verdict, VerdictTable, decide, lookup, table
from te_thd_bridge.spec import AttentionSpec, Band

RELEASES = ("1.28.0", "1.29.0", "1.29.1", "1.30.0", "1.31.0", "1.32.0")
UNSPLIT = {"SPLIT_KV": 1, "TILE_CGA_M": 2, "PACK_GQA": 0, "SCHED_POLICY": 0, "TILE_M": 128, "TILE_N": 128}
ALL_SHARED = LayoutFacts(True, True, True)


def facts(cc=100, dims=(128, 128), **more):
    return AttentionFacts(
        **{"dtype": "bf16", "heads_q": 8, "heads_kv": 2, "max_q": 512, "window": False, "bottom_right": False, "deterministic": False, "sink": False}
        | {"cu_form": False, "cc": cc, "dim_qk": dims[0], "dim_v": dims[1]}
        | more
    )


def said(verdict):
    return set(verdict.ports.values())


def rows():
    return [row for release in RELEASES for direction in ("fwd", "bwd") for row in table().rows(release, direction)]


def test_the_table_covers_the_releases_that_the_package_supports():
    assert table().releases == RELEASES
    assert all({row.direction for row in rows() if row.release == release} == {"fwd", "bwd"} for release in RELEASES)


def test_every_row_of_the_installed_frontend_has_a_verdict_under_its_own_id():
    cudnn = pytest.importorskip("cudnn")
    from cudnn.engines import manifest

    known = {(row.row, row.engine_id, row.default_on) for row in rows() if row.release == cudnn.__version__}
    offered = {
        (name, family.engine_id + slot.slot, not slot.opt_in)
        for family in manifest.MANIFEST
        if "sdpa" in family.name
        for name, slot in family.slots.items()
    }
    assert offered == known


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.release}-{row.row}")
def test_every_row_says_of_every_port_what_it_does_or_that_it_never_runs(row):
    assert row.source and all(re.fullmatch(r"cudnn/[\w/]+\.py:\d+(-\d+)?", line) for line in row.source)
    for case in row.cases:
        verdict = table().merged(row, [case])
        assert verdict.excluded or set(verdict.ports) <= set(PORTS[row.direction]) and said(verdict) <= {"honors", "derives"}
        assert verdict.source.startswith(("H200", f"nvidia-cudnn-frontend {row.release}: "))
        assert set(verdict.exposed) <= set(INPUTS[row.direction]) and bool(verdict.exposed) == (verdict.nan_safe is False)
        assert verdict.nan_safe is not None or verdict.excluded
    # The last case needs nothing, so that no attention falls through.
    assert row.cases[-1]["when"] == {}


def test_no_condition_in_the_table_is_one_that_the_reader_does_not_know():
    conditions = [case["when"] for row in rows() for case in row.cases] + [serves for row in rows() for serves in row.serves]
    names = {name for condition in conditions for name in condition} - {"knobs"}
    assert names <= set(verdicts._CONDITIONS) and {knob for c in conditions for knob in c.get("knobs", {})} <= set(table().document["knobs"])


@pytest.mark.parametrize(
    "release, direction, row, knobs, of, expected",
    [
        ("1.32.0", "fwd", "sdpa_fwd_prefill_sm100", UNSPLIT, facts(), "honors"),
        ("1.32.0", "fwd", "sdpa_fwd_prefill_sm100", UNSPLIT, facts(103, (256, 256)), "honors"),
        ("1.32.0", "fwd", "sdpa_fwd_prefill_sm100", {k: v for k, v in UNSPLIT.items() if k != "TILE_CGA_M"}, facts(), "honors"),
        ("1.32.0", "fwd", "sdpa_fwd_prefill_sm100", UNSPLIT | {"SPLIT_KV": 2}, facts(), "derives"),
        ("1.32.0", "fwd", "sdpa_fwd_prefill_sm100", UNSPLIT | {"TILE_CGA_M": 1}, facts(), "derives"),
        ("1.32.0", "fwd", "sdpa_fwd_prefill_sm100", UNSPLIT, facts(101), "derives"),
        ("1.32.0", "fwd", "sdpa_fwd_prefill_sm100", UNSPLIT, facts(dims=(192, 128)), "derives"),
        ("1.32.0", "fwd", "sdpa_fwd_prefill_sm100", UNSPLIT, facts(dims=(120, 120)), "derives"),
        ("1.32.0", "fwd", "sdpa_fwd_prefill_sm100", UNSPLIT, facts(gate=True), "derives"),
        ("1.31.0", "fwd", "sdpa_fwd_prefill_sm100", UNSPLIT, facts(), "derives"),
        ("1.32.0", "fwd", "sdpa_fwd_prefill_sm90", UNSPLIT | {"TILE_CGA_M": 1}, facts(90, (512, 512)), "derives"),
        ("1.30.0", "fwd", "sdpa_fwd_prefill_sm120", UNSPLIT | {"TILE_CGA_M": 1}, facts(120), "derives"),
        ("1.32.0", "fwd", "sdpa_fwd_prefill_sm107", UNSPLIT, facts(107), "derives"),
        ("1.32.0", "bwd", "sdpa_bwd_sm80", {}, facts(80), "honors"),
        ("1.31.0", "bwd", "sdpa_bwd_sm80", {}, facts(80), "derives"),
        ("1.32.0", "bwd", "sdpa_bwd_sm100_d256", {}, facts(100, (256, 256)), "honors"),
        ("1.32.0", "bwd", "sdpa_bwd_sm100", {}, facts(100, (512, 512)), "derives"),
    ],
)
def test_a_row_honors_exactly_under_the_conditions_that_its_lowering_asks(release, direction, row, knobs, of, expected):
    assert said(lookup(release, direction, row, knobs, of)) == {expected}


@pytest.mark.parametrize(
    "release, row, knobs, of",
    [
        ("1.33.0", "sdpa_fwd_prefill_sm100", UNSPLIT, facts()),
        ("1.27.0", "sdpa_fwd_prefill_sm100", UNSPLIT, facts()),
        ("1.32.0+local", "sdpa_fwd_prefill_sm100", UNSPLIT, facts()),
        ("1.32.0", "sdpa_fwd_prefill_sm130", UNSPLIT, facts()),
        ("1.29.1", "sdpa_fwd_prefill_sm90", UNSPLIT, facts(90, (512, 512))),
        ("1.32.0", "some_new_engine", {}, facts()),
        ("1.32.0", "sdpa_fwd_prefill_sm100", UNSPLIT | {"NEW_KNOB": 1}, facts()),
        ("1.32.0", "sdpa_fwd_prefill_sm100", UNSPLIT | {"TILE_CGA_M": 16}, facts()),
        ("1.32.0", "sdpa_fwd_prefill_sm100", None, facts()),
        ("1.32.0", "sdpa_fwd_prefill_sm100", UNSPLIT, facts(cc=None)),
        ("1.32.0", "sdpa_fwd_prefill_sm100", UNSPLIT, facts(cc=120)),
        ("1.32.0", "sdpa_fwd_prefill_sm100", UNSPLIT, facts(dims=(None, None))),
        ("1.32.0", "sdpa_fwd_prefill_sm100", UNSPLIT, facts(gate=None)),
        ("1.33.0", "eng9_k1=2", {}, facts()),
    ],
)
def test_what_the_table_does_not_cover_is_unknown_and_waits_for_its_proof(release, row, knobs, of):
    verdict = lookup(release, "fwd", row, knobs, of)
    assert said(verdict) == {"unknown"} and verdict.reason
    assert decide(verdict, ALL_SHARED, "any").served_by == "needs_canary"


def test_an_undecided_condition_matters_only_where_its_outcomes_differ():
    # A derived plan may or may not be split, which decides on gap sequences but not on offsets.
    verdict = lookup("1.31.0", "fwd", "sdpa_fwd_prefill_sm100", None, facts())
    assert said(verdict) == {"derives"} and not verdict.gap_sequences and verdict.nan_safe is False


def test_a_condition_from_a_newer_table_is_undecided():
    document = copy.deepcopy(table().document)
    row = next(row for row in document["rows"] if (row["release"], row["row"]) == ("1.32.0", "sdpa_bwd_sm80"))
    row["cases"] = [{"when": {"phase_of_the_moon": "full"}, "is": "bwd_bound"}, {"when": {}, "is": "bwd_lengths"}]
    assert said(VerdictTable(document).lookup("1.32.0", "bwd", "sdpa_bwd_sm80", {}, facts(80))) == {"unknown"}


@pytest.mark.parametrize("name", ["eng2_k1=2_k4=-1", "eng10", "backend"])
def test_cudnns_own_engines_honor_every_port_and_say_whether_that_was_measured(name):
    measured, elsewhere = (lookup("1.32.0", "bwd", name, {}, facts(cc, cudnn=92700)) for cc in (90, 100))
    other_version = lookup("1.32.0", "bwd", name, {}, facts(90, cudnn=92300))
    assert said(measured) == said(elsewhere) == said(other_version) == {"honors"} and set(measured.ports) == set(ALL_PORTS)
    assert (measured.basis, measured.nan_safe) == ("measured", True) and "H200" in measured.source
    assert (elsewhere.basis, elsewhere.nan_safe) == (other_version.basis, other_version.nan_safe) == ("documented", None)
    assert decide(elsewhere, ALL_SHARED, "any").feed == "sanitised_copies"


def test_a_plan_that_only_looks_like_cudnns_own_is_unknown():
    assert said(lookup("1.32.0", "fwd", "engine_new", {}, facts())) == said(lookup("1.32.0", "fwd", "eng2_fast", {}, facts())) == {"unknown"}


def test_a_row_is_found_by_a_plans_whole_name_and_by_every_form_of_knobs():
    knob = enum.Enum("knob_type", {"SPLIT_KV": 7, "TILE_CGA_M": 8})
    fields = {"split_kv": 1, "cga": 2, "pack_gqa": False, "sched_policy": 0, "tile_m": 128, "tile_n": 128, "softmax_precision": None}
    for knobs in ({knob.SPLIT_KV: 1, knob.TILE_CGA_M: 2}, {"SPLIT_KV": 1}, SimpleNamespace(**fields)):
        assert said(lookup("1.32.0", "fwd", "sdpa_fwd_prefill_sm100[SPLIT_KV=1]", knobs, facts())) == {"honors"}


def test_lookups_refuse_a_direction_that_does_not_exist():
    with pytest.raises(ValueError, match="direction: got 'sideways'; accepted are 'fwd', 'bwd'"):
        lookup("1.32.0", "sideways", "backend", None, facts())


def test_facts_come_from_a_spec():
    spec = AttentionSpec(
        torch.device("cpu"),
        torch.float16,
        8,
        2,
        192,
        128,
        4,
        64,
        64,
        256,
        256,
        256,
        Band(5, 0, True),
        0.1,
        True,
        0.0,
        True,
        True,
        False,
        (),
        (("q", 8),),
    )
    of = AttentionFacts.of(spec, 90, 91900)
    assert (of.cc, of.dtype, of.dim_qk, of.dim_v, of.heads_q, of.heads_kv, of.max_q, of.cudnn) == (90, "fp16", 192, 128, 8, 2, 64, 91900)
    assert of.window and of.bottom_right and of.deterministic and of.sink and of.cu_form and not of.paged and not of.gate


# --- decide ---


def verdict(direction="fwd", offsets="derives", nan_safe=True, exposed=(), gap=True, excluded=None):
    return Verdict(direction, dict.fromkeys(PORTS[direction], offsets), nan_safe, exposed, gap, excluded, "read", "somewhere", "so it is")


@pytest.mark.parametrize(
    "of, layout, served_by",
    [
        (verdict(offsets="honors"), LayoutFacts(False, False, False), "direct"),
        (verdict("bwd", "honors"), LayoutFacts(False, False, False), "direct"),
        (verdict(), ALL_SHARED, "gap_sequences"),
        (verdict(), LayoutFacts(False, True, True), "packed_copies"),
        (verdict(), LayoutFacts(True, False, True), "packed_copies"),
        (verdict(), LayoutFacts(True, True, False), "packed_copies"),
        (verdict(gap=False), ALL_SHARED, "packed_copies"),
        (verdict("bwd"), ALL_SHARED, "packed_copies"),
        (verdict(offsets="unknown"), ALL_SHARED, "needs_canary"),
        (verdict(excluded="it breaks"), ALL_SHARED, "excluded"),
        (verdict(offsets="honors", excluded="it breaks"), ALL_SHARED, "excluded"),
    ],
)
def test_an_engine_is_served_by_what_makes_it_right(of, layout, served_by):
    for padding in ("any", "scrub", "finite"):
        decision = decide(of, layout, padding)
        assert decision.served_by == served_by and decision.reason


@pytest.mark.parametrize("served_by, offsets", [("direct", "honors"), ("gap_sequences", "derives"), ("needs_canary", "unknown")])
@pytest.mark.parametrize("padding, feed", [("any", "sanitised_copies"), ("scrub", "scrub"), ("finite", "promised")])
def test_an_engine_that_nan_gets_into_is_fed_as_the_padding_mode_says(served_by, offsets, padding, feed):
    unsafe = decide(verdict(offsets=offsets, nan_safe=False, exposed=("v",)), ALL_SHARED, padding)
    assert (unsafe.served_by, unsafe.feed, unsafe.exposed) == (served_by, feed, ("v",))
    unknown = decide(verdict(offsets=offsets, nan_safe=None), ALL_SHARED, padding)
    assert (unknown.feed, unknown.exposed) == (feed, INPUTS["fwd"])
    safe = decide(verdict(offsets=offsets, nan_safe=True), ALL_SHARED, padding)
    assert (safe.feed, safe.exposed) == ("as_is", ())


@pytest.mark.parametrize("padding", ["any", "scrub", "finite"])
def test_packed_copies_hold_no_padding_and_go_in_as_they_are(padding):
    decision = decide(verdict("bwd", nan_safe=False, exposed=INPUTS["bwd"]), ALL_SHARED, padding)
    assert (decision.served_by, decision.feed, decision.exposed) == ("packed_copies", "as_is", ())


def test_decide_refuses_an_unknown_padding_mode():
    with pytest.raises(ValueError, match="padding: got 'zero'; accepted are 'any', 'scrub', 'finite'"):
        decide(verdict(), ALL_SHARED, "zero")


@given(
    st.sampled_from(["fwd", "bwd"]),
    st.lists(st.sampled_from(["honors", "derives", "unknown"]), min_size=9, max_size=9),
    st.sampled_from([True, False, None]),
    st.booleans(),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from(["any", "scrub", "finite"]),
)
def test_nothing_runs_on_addresses_that_are_not_the_bound_ones(direction, offsets, nan_safe, gap, layout, padding):
    of = Verdict(direction, dict(zip(PORTS[direction], offsets)), nan_safe, ("v",) if nan_safe is False else (), gap)
    decision, used = decide(of, LayoutFacts(*layout), padding), set(of.ports.values())
    assert (decision.served_by == "direct") == (used == {"honors"})
    assert (decision.served_by == "needs_canary") == ("unknown" in used)
    if decision.served_by == "gap_sequences":
        assert direction == "fwd" and gap and all(layout)
    if decision.served_by != "packed_copies" and nan_safe is not True and padding == "any":
        assert decision.feed == "sanitised_copies" and "v" in decision.exposed


# --- layouts ---


def layout_with(offsets=None, padded=(0, 4, 8, 13), kv_padded=None):
    prefix = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    return ThdLayout.from_cu_seqlens(
        prefix([0, 3, 5, 9]),
        prefix([0, 2, 5, 9]) if kv_padded else None,
        cu_seqlens_q_padded=prefix(padded),
        cu_seqlens_kv_padded=prefix(kv_padded) if kv_padded else None,
        max_seqlen_q=4,
        max_seqlen_kv=4,
        offsets=offsets,
    )


def test_a_padded_prefix_is_shared_by_its_side_and_in_order():
    assert LayoutFacts.of(layout_with(), ALL_PORTS) == ALL_SHARED
    assert LayoutFacts.of(layout_with(kv_padded=(0, 6, 9, 14)), ALL_PORTS) == ALL_SHARED


def test_own_offsets_part_a_port_from_its_side_and_may_come_in_any_order():
    own = RaggedOffset(torch.tensor([4, 0, 8], dtype=torch.int32))
    assert LayoutFacts.of(layout_with({"o": own}), set(ALL_PORTS) - {"o"}) == LayoutFacts(False, True, False)
    assert LayoutFacts.of(layout_with({"v": own}), set(ALL_PORTS) - {"v"}) == LayoutFacts(True, False, False)
    everywhere = dict.fromkeys(("q", "o", "stats", "k", "v"), own)
    assert LayoutFacts.of(layout_with(everywhere), set()) == LayoutFacts(True, True, False)


def test_one_tensor_of_element_offsets_means_different_rows_in_different_tensors():
    values = torch.tensor([0, 512, 1024, 1664], dtype=torch.int32)
    elements = RaggedOffset(values, unit="element")
    assert not LayoutFacts.of(layout_with(dict.fromkeys(("q", "o", "stats"), elements)), ALL_PORTS).q_shared
    tokens = {port: RaggedOffset(values, multiplier=m) for port, m in (("q", 1), ("o", 1), ("stats", 1), ("k", 1), ("v", 2))}
    assert LayoutFacts.of(layout_with(tokens), ALL_PORTS) == LayoutFacts(True, False, True)


# --- the table is data ---


def flipped(document):
    """Every honors made derives and the reverse, every NaN-safety turned."""
    document = copy.deepcopy(document)
    for behaviour in document["behaviours"].values():
        behaviour["offsets"] = {port: {"honors": "derives", "derives": "honors"}.get(offset, offset) for port, offset in behaviour["offsets"].items()}
        behaviour["nan_safe"] = None if behaviour["nan_safe"] is None else not behaviour["nan_safe"]
    return document


def test_another_table_in_its_place_is_believed(monkeypatch):
    asked = ("1.32.0", "fwd", "sdpa_fwd_prefill_sm100", UNSPLIT, facts())
    assert said(lookup(*asked)) == {"honors"}
    sabotaged = VerdictTable(flipped(table().document))
    monkeypatch.setattr(verdicts, "table", lambda: sabotaged)
    assert said(lookup(*asked)) == {"derives"}


def test_an_empty_table_knows_nothing(monkeypatch):
    empty = VerdictTable({})
    monkeypatch.setattr(verdicts, "table", lambda: empty)
    for release, name in itertools.product(RELEASES, ("sdpa_fwd_prefill_sm90", "eng9", "backend")):
        assert said(lookup(release, "fwd", name, {}, facts())) == {"unknown"}
    assert not empty.backend_serves("fwd", facts())
