"""`te-thd-bridge explain` without a GPU, without libcudnn and without a driver."""

import argparse
import importlib.util
import json
import os
import sys
import types
from dataclasses import dataclass, fields

import pytest
import torch

from te_thd_bridge.cli import explain
from te_thd_bridge.cli.main import main
from te_thd_bridge.plans import ranking, verdicts
from te_thd_bridge.plans.graph import UnsupportedByGraph
from te_thd_bridge.plans.verdicts import PORTS, VerdictTable, is_backend_plan, table

INSTALLED = ranking.installed_frontend()
can_rank = pytest.mark.skipif(
    INSTALLED not in ("1.30.0", "1.31.0", "1.32.0") or importlib.util.find_spec("cutlass") is None,
    reason="the installed frontend can't rank without libcudnn, or CUTLASS DSL is missing",
)


def run(*arguments):
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    return explain.run(parser.parse_args([str(argument) for argument in arguments]))


def explained(capsys, *arguments):
    assert run("--json", *arguments) == 0
    return json.loads(capsys.readouterr().out)


def frost(plans):
    return [plan for plan in plans if plan["plan"].startswith("sdpa_")]


def kinds(plans):
    """Rows in order, each once; cuDNN's own as "backend" whether they are listed one by one (where libcudnn is here) or not."""
    return list(dict.fromkeys("backend" if is_backend_plan(plan["plan"]) else plan["plan"].partition("[")[0] for plan in plans))


ATTENTIONS = [
    ("--head-dim", 128, "--heads", 32, "--kv-heads", 8),
    ("--head-dim", "192,128", "--heads", 16),
    ("--head-dim", 512, "--heads", 8, "--kv-heads", 2),
]


@pytest.mark.parametrize("gpu", ["sm80", "sm90", "sm100", "sm103", "sm107", "sm120"])
@pytest.mark.parametrize("flags", [(), ("--frost",)], ids=["default", "frost"])
@pytest.mark.parametrize("attention", ATTENTIONS, ids=["d128", "d192x128", "d512"])
def test_every_plan_of_every_gpu_is_told_in_the_agreed_form(capsys, gpu, flags, attention):
    plans = explained(capsys, "--gpu", gpu, "--mask", "padding_causal", "--direction", "both", *attention, *flags)
    for plan in plans:
        assert list(plan) == ["plan", "direction", "default_on", "offsets", "served_by", "reason"]
        assert plan["direction"] in ("fwd", "bwd") and type(plan["default_on"]) is bool and plan["reason"]
        assert tuple(plan["offsets"]) == PORTS[plan["direction"]] and set(plan["offsets"].values()) <= {"honors", "derives", "unknown"}
        assert plan["served_by"] in ("direct", "gap_sequences", "packed_copies", "excluded")
        assert plan["served_by"] != "direct" or set(plan["offsets"].values()) == {"honors"}
        assert flags or plan["default_on"]
    # Before 1.31 nothing computes on compute capability 10.7 by default.
    assert any(plan["direction"] == "fwd" for plan in plans) or gpu == "sm107" and INSTALLED in ("1.28.0", "1.29.0", "1.29.1", "1.30.0")


@can_rank
def test_the_row_that_leads_on_sm120_derives_and_is_not_run_on_its_own_addresses(capsys):
    plans = explained(capsys, "--gpu", "rtx-pro-6000", "--head-dim", 128, "--heads", 32, "--kv-heads", 8, "--direction", "fwd")
    first, last = plans[0], plans[-1]
    assert first["plan"].startswith("sdpa_fwd_prefill_sm120[") and first["default_on"]
    assert set(first["offsets"].values()) == {"derives"} and first["served_by"] == "gap_sequences"
    assert kinds(plans) == ["sdpa_fwd_prefill_sm120", "backend"] and last["served_by"] == "direct"
    assert ("they honor every port" in last["reason"]) == (last["plan"] == "backend")


@can_rank
@pytest.mark.skipif(INSTALLED == "1.30.0", reason="1.30 has no such row")
def test_frost_puts_the_hopper_row_ahead_of_cudnns_own(capsys):
    attention = ("--gpu", "h200", "--head-dim", 320, "--heads", 8, "--direction", "fwd")
    by_default, with_frost = explained(capsys, *attention), explained(capsys, *attention, "--frost")
    assert kinds(by_default) == ["backend", "sdpa_fwd_prefill_sm90"] and kinds(with_frost) == ["sdpa_fwd_prefill_sm90", "backend"]
    assert with_frost[0]["served_by"] == "gap_sequences" and "NaN in padding of v reaches real rows" in with_frost[0]["reason"]


@can_rank
@pytest.mark.skipif(INSTALLED != "1.32.0", reason="knobs as 1.32 ranks them")
def test_on_sm100_unsplit_plans_of_exact_head_dims_go_in_directly(capsys):
    for dims, served_by in ((128, "direct"), (256, "direct"), ("192,128", "gap_sequences"), (64, "gap_sequences")):
        plans = frost(explained(capsys, "--gpu", "b200", "--head-dim", dims, "--heads", 16, "--direction", "fwd"))
        assert plans and {plan["served_by"] for plan in plans if "SPLIT_KV=1," in plan["plan"]} == {served_by}


@can_rank
@pytest.mark.skipif(INSTALLED == "1.30.0", reason="opt-in in 1.30")
def test_the_only_backward_for_wide_heads_on_sm100_runs_on_packed_copies(capsys):
    plans = explained(capsys, "--gpu", "b200", "--head-dim", 512, "--heads", 8, "--kv-heads", 2, "--direction", "bwd")
    assert [(plan["plan"], plan["served_by"]) for plan in plans] == [("sdpa_bwd_sm100", "packed_copies")]


@can_rank
def test_padding_modes_change_how_a_plan_is_fed(capsys):
    attention = ("--gpu", "sm90", "--head-dim", 512, "--heads", 8, "--direction", "fwd", "--frost", "--frontend", "1.32.0")
    words = {"any": "copies with 0 there", "scrub": "overwritten in place", "finite": "the caller promises"}
    for padding, word in words.items():
        assert word in explained(capsys, *attention, "--padding", padding)[0]["reason"]


# --- another release, or no ranking ---


@pytest.mark.parametrize("release", ["1.28.0", "1.29.0", "1.29.1", "1.30.0", "1.31.0"])
def test_another_release_is_told_from_the_table(capsys, monkeypatch, release):
    monkeypatch.setattr(ranking, "installed_frontend", lambda: None)
    attention = ("--gpu", "sm120", "--head-dim", 128, "--heads", 8, "--direction", "fwd", "--frontend", release)
    default, opted = ([plan["plan"] for plan in explained(capsys, *attention, *flag)] for flag in ((), ("--frost",)))
    leads = release >= "1.30"
    assert default[-1] == "backend" and any(name.startswith("sdpa_fwd_prefill_sm120") for name in default) == leads
    assert opted[0].startswith("sdpa_fwd_prefill_sm120") and opted[-1] == "backend"


def test_a_release_lists_an_entry_for_each_combination_of_knobs_that_matters(capsys, monkeypatch):
    monkeypatch.setattr(ranking, "installed_frontend", lambda: "1.31.0")
    plans = explained(capsys, "--gpu", "b200", "--head-dim", 128, "--heads", 8, "--direction", "fwd", "--frontend", "1.32.0")
    told = {plan["plan"]: plan["served_by"] for plan in plans}
    assert told == {
        "backend": "direct",
        "sdpa_fwd_prefill_sm100[SPLIT_KV=1, TILE_CGA_M=unset|2]": "direct",
        "sdpa_fwd_prefill_sm100[SPLIT_KV=1]": "gap_sequences",
        "sdpa_fwd_prefill_sm100[other knobs]": "packed_copies",
    }


@pytest.mark.parametrize("missing", ["cutlass", "frontend", "ranking"])
def test_where_the_frontend_cannot_rank_the_table_answers_and_says_why(capsys, monkeypatch, missing):
    if missing == "cutlass":
        found = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "cutlass" else found(name, *rest))
    elif missing == "frontend":
        monkeypatch.setattr(ranking, "installed_frontend", lambda: None)
    else:

        def refuse(*_, **__):
            raise UnsupportedByGraph("Unable to find symbol cudnnCreate")

        monkeypatch.setattr(ranking, "build_graph", refuse)
    if missing != "frontend" and (INSTALLED is None or missing == "ranking" and importlib.util.find_spec("cutlass") is None):
        pytest.skip("the frontend or CUTLASS DSL is not installed")
    assert run("--gpu", "sm120", "--head-dim", 128, "--heads", 8, "--direction", "fwd") == 0
    shown = capsys.readouterr().out
    assert {"cutlass": "CUTLASS DSL is not installed", "frontend": "cudnn-frontend is not installed", "ranking": "cudnnCreate"}[missing] in shown
    assert "backend" in shown and "as read from its sources" in shown


@can_rank
def test_an_installed_release_without_verdicts_runs_nothing_unproven(capsys, monkeypatch):
    known = VerdictTable({**table().document, "releases": ["1.28.0"]})
    monkeypatch.setattr(verdicts, "table", lambda: known)
    plans = explained(capsys, "--gpu", "sm120", "--head-dim", 128, "--heads", 8, "--direction", "fwd")
    assert frost(plans) and all(set(plan["offsets"].values()) == {"unknown"} and plan["served_by"] == "excluded" for plan in plans)
    assert all("not before it is proven on the device" in plan["reason"] for plan in plans)


# --- what is put in the device's place ---


@pytest.mark.skipif(INSTALLED is None, reason="no frontend is installed")
def test_the_device_facts_and_the_flag_are_put_back_exactly(monkeypatch):
    from cudnn.sdpa import graph_analyzer

    names = ("_device_props", "_device_cc", "_device_sm_count")
    before = [getattr(graph_analyzer, name) for name in names]
    for value in (None, "0", "yes"):
        monkeypatch.delenv(ranking.FROST_FLAG, raising=False)
        if value is not None:
            monkeypatch.setenv(ranking.FROST_FLAG, value)
        with pytest.raises(RuntimeError, match="on purpose"), ranking._device(ranking.gpu_named("b200"), True):
            assert graph_analyzer._device_cc() == (10, 0) and graph_analyzer._device_sm_count() == 148
            assert graph_analyzer._device_props()["deviceVer"] == 1000 and os.environ[ranking.FROST_FLAG] == "1"
            raise RuntimeError("on purpose")
        assert [getattr(graph_analyzer, name) for name in names] == before and os.environ.get(ranking.FROST_FLAG) == value


@can_rank
@pytest.mark.skipif(INSTALLED == "1.30.0", reason="1.30 has no such row")
def test_the_flag_of_the_environment_counts_as_frost(capsys, monkeypatch):
    monkeypatch.setenv(ranking.FROST_FLAG, "1")
    assert explained(capsys, "--gpu", "sm90", "--head-dim", 512, "--heads", 8, "--direction", "fwd")[0]["plan"].startswith("sdpa_fwd_prefill_sm90")


# --- flags ---


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--gpu", "h300", "--head-dim", 128, "--heads", 8), "--gpu: got 'h300'; accepted are a100, "),
        (("--gpu", "h200", "--head-dim", "wide", "--heads", 8), "--head-dim: got 'wide'; accepted is D or D,DV"),
        (("--gpu", "h200", "--head-dim", "64,64,64", "--heads", 8), "--head-dim: got '64,64,64'"),
        (("--gpu", "h200", "--head-dim", 0, "--heads", 8), "--head-dim: got '0'"),
        (("--gpu", "h200", "--head-dim", 64, "--heads", 8, "--kv-heads", 3), "--kv-heads: got 3, which does not divide the 8"),
        (("--gpu", "h200", "--head-dim", 64, "--heads", 0), "--heads: got 0; accepted is an int of at least 1"),
        (("--gpu", "h200", "--head-dim", 64, "--heads", 8, "--window", "3"), "--window: got '3'; accepted is LEFT,RIGHT"),
        (("--gpu", "h200", "--head-dim", 64, "--heads", 8, "--frontend", "2.0"), "--frontend: got '2.0'; accepted are 1.28.0, "),
    ],
)
def test_a_flag_that_is_wrong_is_refused_by_name_with_what_is_accepted(arguments, words):
    with pytest.raises(ValueError) as refusal:
        run(*arguments)
    assert words in str(refusal.value)


def test_without_a_gpu_and_without_its_name_nothing_is_guessed(monkeypatch):
    monkeypatch.setattr(ranking, "gpu_at_hand", lambda: None)
    with pytest.raises(ValueError, match="--gpu: not given, and no GPU is here; accepted are a100, "):
        run("--head-dim", 64, "--heads", 8)


@pytest.mark.parametrize(
    "flag, value, accepted", [("--mask", "triangular", "padding_causal"), ("--dtype", "fp32", "bf16"), ("--direction", "up", "both")]
)
def test_a_choice_that_does_not_exist_is_refused_with_the_choices(capsys, flag, value, accepted):
    with pytest.raises(SystemExit):
        run("--gpu", "h200", "--head-dim", 64, "--heads", 8, flag, value)
    assert value in (shown := capsys.readouterr().err) and accepted in shown


def test_the_table_for_people_is_aligned(capsys, monkeypatch):
    monkeypatch.setattr(ranking, "installed_frontend", lambda: None)
    run("--gpu", "sm120", "--head-dim", 128, "--heads", 8, "--frontend", "1.30.0", "--direction", "fwd")
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.startswith("plan "))
    rows = lines[lines.index(header) + 1 :]
    column = header.index("served by")
    assert [row[column:].split()[0] for row in rows if row.startswith(("sdpa_", "backend"))] == ["gap_sequences", "packed_copies", "direct"]


def test_the_command_runs_and_refuses_with_status_2(capsys):
    assert main(["explain", "--gpu", "sm120", "--head-dim", "64", "--heads", "8", "--direction", "fwd"]) == 0
    assert main(["explain", "--gpu", "h300", "--head-dim", "64", "--heads", "8"]) == 2
    assert "te-thd-bridge explain: --gpu: got 'h300'" in capsys.readouterr().err


# --- PackedSeqParams ---

PREFIX, PADDED = [0, 3, 5, 9], [0, 4, 8, 13]


@dataclass
class PackedSeqParams:
    qkv_format: str = None
    cu_seqlens_q: torch.Tensor = None
    cu_seqlens_kv: torch.Tensor = None
    cu_seqlens_q_padded: torch.Tensor = None
    cu_seqlens_kv_padded: torch.Tensor = None
    max_seqlen_q: int = None
    max_seqlen_kv: int = None


@pytest.fixture(params=["json", "object", "dict"])
def saved(request, tmp_path, monkeypatch):
    path = tmp_path / "params"
    if request.param == "json":
        path.write_text(json.dumps({"qkv_format": "thd", "cu_seqlens_q": PREFIX, "cu_seqlens_q_padded": PADDED, "max_seqlen_q": 4}))
        return path
    prefix, padded = (torch.tensor(values, dtype=torch.int32) for values in (PREFIX, PADDED))
    params = PackedSeqParams("thd", prefix, prefix, padded, padded, 4, 4)
    if request.param == "dict":
        torch.save({field.name: getattr(params, field.name) for field in fields(params)}, path)
        return path
    # Saved under the name of Megatron-Core's class, which isn't installed where it is read.
    module = types.ModuleType("megatron.core.packed_seq_params")
    module.PackedSeqParams = PackedSeqParams
    monkeypatch.setattr(PackedSeqParams, "__module__", module.__name__)
    for name in ("megatron", "megatron.core", module.__name__):
        monkeypatch.setitem(sys.modules, name, module if name == module.__name__ else types.ModuleType(name))
    torch.save(params, path)
    for name in ("megatron", "megatron.core", module.__name__):
        monkeypatch.delitem(sys.modules, name)
    return path


def test_saved_params_show_what_they_bind(capsys, saved):
    assert run("--gpu", "sm120", "--head-dim", 64, "--heads", 8, "--direction", "fwd", "--frontend", "1.30.0", "--packed-seq-params", saved) == 0
    shown = capsys.readouterr().out
    assert "3 sequences, max_seqlen_q 4, max_seqlen_kv 4" in shown
    assert "lengths [3, 2, 4], first rows [0, 4, 8, 13], rows behind each [1, 2, 1]" in shown
    assert "starts shared by: q k v o stats do dq dk dv" in shown and "gap_sequences" in shown


@pytest.mark.parametrize("content", [b"no pickle", b'{"max_seqlen_q": 4}', b'{"cu_seqlens_q": [0, 3]}', b'{"cu_seqlens_q"'])
def test_a_file_that_is_no_params_is_refused_by_name(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"--packed-seq-params: {path}: .*accepted"):
        run("--gpu", "h200", "--head-dim", 64, "--heads", 8, "--packed-seq-params", path)
