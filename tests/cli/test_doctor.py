"""`te-thd-bridge doctor` without a GPU: what it resolves, what it knows, and that its canaries catch broken backends."""

import argparse
import os
from pathlib import Path

import pytest
import torch

from te_thd_bridge.cli import doctor, probes
from te_thd_bridge.cli.main import main
from te_thd_bridge.cli.doctor import Library, clashes, cudnn_libraries, frontend_findings, known_bad
from te_thd_bridge.cli.probes import LENGTHS, PADDINGS, Batch, Probe, run_probes
from te_thd_bridge.plans import ranking

CPU = torch.device("cpu")


def run(*arguments):
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.run(parser.parse_args(list(arguments)))


def test_the_report_names_versions_libraries_flags_and_canaries(capsys, monkeypatch):
    monkeypatch.setattr(ranking, "gpu_at_hand", lambda: None)
    monkeypatch.setattr(doctor, "installed_versions", lambda: {"torch": torch.__version__, "nvidia-cudnn-frontend": "1.32.0"})
    monkeypatch.setattr(doctor, "loaded_cudnn", list)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert run() == 0
    shown = capsys.readouterr().out
    assert f"torch                  {torch.__version__}" in shown and "transformer-engine     not installed" in shown
    assert "NVTE_FUSED_ATTN" in shown and "nothing alarming" in shown and "no GPU here" in shown
    assert "sdpa_fwd_prefill_sm120 is on by default" in shown


def test_a_known_bad_combination_alarms(capsys, monkeypatch):
    monkeypatch.setattr(ranking, "gpu_at_hand", lambda: None)
    monkeypatch.setattr(doctor, "loaded_cudnn", list)
    together = {"transformer-engine": "2.20.2", "flash-attn-4": "4.0.0b36", "nvidia-cudnn-frontend": "1.32.0"}
    monkeypatch.setattr(doctor, "installed_versions", lambda: together)
    assert run() == 1
    assert "causal attention is 0 everywhere" in (shown := capsys.readouterr().out) and "something above needs attention" in shown


@pytest.mark.parametrize(
    "versions", [{"transformer-engine": "2.20.2"}, {"flash-attn-4": "4.0.0b36"}, {"transformer-engine": "2.21.0", "flash-attn-4": "4.0.0b36"}]
)
def test_versions_that_go_well_together_do_not_alarm(versions):
    assert known_bad(versions) == []


def test_cudnn_that_answers_nan_for_keyless_sequences_is_noted():
    old, new = known_bad({"nvidia-cudnn-cu13": "9.19.0.56"}), known_bad({"nvidia-cudnn-cu13": "9.25.0.15"})
    assert len(old) == 1 and not old[0].alarming and "keys" in old[0].text and new == []


@pytest.mark.parametrize(
    "release, cc, rows",
    [
        ("1.29.1", None, set()),
        ("1.30.0", None, {"sdpa_fwd_prefill_sm120"}),
        ("1.31.0", None, {"sdpa_fwd_prefill_sm120", "sdpa_fwd_prefill_sm107", "sdpa_bwd_sm100", "sdpa_fwd_prefill_sm100"}),
        ("1.32.0", 120, {"sdpa_fwd_prefill_sm120"}),
        ("1.32.0", 107, {"sdpa_fwd_prefill_sm107", "sdpa_fwd_prefill_sm107_mxfp8"}),
        ("1.32.0", 90, set()),
    ],
)
def test_rows_that_run_by_default_and_derive_are_noted_for_the_gpu(monkeypatch, release, cc, rows):
    monkeypatch.delenv(ranking.FROST_FLAG, raising=False)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name)
    findings = frontend_findings({"nvidia-cudnn-frontend": release}, None if cc is None else ranking.Gpu("it", cc, 1))
    assert {finding.text.split()[0] for finding in findings} == rows and not any(finding.alarming for finding in findings)


def test_a_frontend_that_is_missing_or_new_is_told():
    assert frontend_findings({}, None)[0].alarming
    assert "no verdicts" in frontend_findings({"nvidia-cudnn-frontend": "1.40.0"}, None)[0].text


def test_the_command_names_every_section_and_every_canary_of_whatever_machine_it_runs_on(capsys, monkeypatch):
    monkeypatch.setenv(ranking.FROST_FLAG, "1")
    assert main(["doctor", "--skip-canaries"]) in (0, 1)
    shown = capsys.readouterr().out
    for section in ("versions", "libcudnn that would be loaded", "environment", "findings", "canaries"):
        assert section in shown
    for backend in ("te_thd_bridge", "TransformerEngine", "flash-attn-4", "cudnn.flex_attention"):
        assert backend in shown
    canaries = [line for line in shown.split("\ncanaries\n")[1].splitlines() if ":" in line]
    assert len(canaries) >= 8 and all(line.split()[0] == "skipped" for line in canaries)
    assert torch.__version__ in shown and ranking.FROST_FLAG in shown


# --- which libcudnn ---


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A site directory, and a function that puts a file somewhere below tmp_path."""
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")

    def put(path):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        return str(file)

    return tmp_path / "site", put


EVERYTHING = {"torch": "2.11.0", "transformer-engine": "2.20.2", "nvidia-cudnn-frontend": "1.32.0"}


def resolved(site, environ, cached=()):
    return {library.user: library.path for library in cudnn_libraries(site, environ, list(cached), EVERYTHING)}


def test_the_package_serves_all_where_the_system_has_none(machine):
    site, put = machine
    packaged = put("site/nvidia/cudnn/lib/libcudnn.so.9")
    assert set(resolved(site, {"CUDA_HOME": str(site / "nowhere")}).values()) == {packaged}
    assert clashes(cudnn_libraries(site, {}, [], EVERYTHING), []) == []


def test_a_library_of_the_system_goes_first_for_te_and_clashes(machine):
    site, put = machine
    packaged, system = put("site/nvidia/cudnn/lib/libcudnn.so.9"), put("usr/lib/libcudnn.so")
    found = resolved(site, {}, [system])
    assert found == {"torch": packaged, "TransformerEngine": system, "cudnn frontend": packaged}
    (finding,) = clashes(cudnn_libraries(site, {}, [system], EVERYTHING), [])
    assert finding.alarming and packaged in finding.text and system in finding.text and "CUDNN_HOME" in finding.text


def test_cudnn_home_brings_te_back_to_torchs_library(machine):
    site, put = machine
    packaged, system = put("site/nvidia/cudnn/lib/libcudnn.so.9"), put("usr/lib/libcudnn.so")
    environ = {"CUDNN_HOME": str(Path(packaged).parent.parent)}
    assert set(resolved(site, environ, [system]).values()) == {packaged}


def test_the_frontend_takes_ld_library_path_before_the_package(machine):
    site, put = machine
    packaged, local = put("site/nvidia/cudnn/lib/libcudnn.so.9"), put("local/libcudnn.so.9")
    found = resolved(site, {"LD_LIBRARY_PATH": f"/nowhere{os.pathsep}{Path(local).parent}"})
    assert found["cudnn frontend"] == local and found["torch"] == packaged


def test_the_frontend_takes_the_jit_package_where_it_is_the_only_one(machine):
    site, put = machine
    jit = put("site/nvidia/cudnn_jit/lib/libcudnn.so.9")
    assert resolved(site, {})["cudnn frontend"] == jit


def test_links_to_one_file_are_one_library(machine, tmp_path):
    site, put = machine
    packaged = put("site/nvidia/cudnn/lib/libcudnn.so.9")
    link = tmp_path / "local" / "libcudnn.so.9"
    link.parent.mkdir()
    link.symlink_to(packaged)
    assert clashes([Library("torch", packaged, ""), Library("cudnn frontend", str(link), "")], []) == []


def test_two_libraries_in_one_process_alarm(machine):
    _, put = machine
    first, second = put("a/libcudnn.so.9"), put("b/libcudnn.so.9")
    (finding,) = clashes([], [first, second])
    assert finding.alarming and "loaded more than one" in finding.text and clashes([], [first]) == []


def test_a_package_that_is_not_installed_loads_nothing(machine):
    site, put = machine
    put("site/nvidia/cudnn/lib/libcudnn.so.9")
    by_user = {library.user: library for library in cudnn_libraries(site, {}, [], {"torch": "2.11.0"})}
    assert by_user["TransformerEngine"] == Library("TransformerEngine", None, "not installed")


# --- canaries ---


def sequence_by_sequence(batch, starts, attend):
    """Attention that reads each sequence at ``starts`` and writes it there."""
    out = torch.zeros(batch.q.shape[0], batch.q.shape[1], batch.v.shape[2], dtype=batch.q.dtype)
    for start, length in zip(starts, LENGTHS):
        piece = attend(*(tensor[start : start + length] for tensor in (batch.q, batch.k, batch.v)))
        out = torch.cat([out[:start], piece, out[start + length :]])
    return out


def causal(q, k, v):
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(*(tensor.transpose(0, 1) for tensor in (q, k, v)), is_causal=True).transpose(0, 1)


def honest(batch):
    return sequence_by_sequence(batch, batch.cu_seqlens_padded[:-1].tolist(), causal)


def deriving(batch):
    """Where a lowering that rebuilds starts from lengths looks for its sequences."""
    return sequence_by_sequence(batch, batch.cu_seqlens[:-1].tolist(), causal)


def leaky(batch):
    """Honest addresses, but each sequence's last key tile is multiplied whole: 0 x NaN."""
    starts = batch.cu_seqlens_padded.tolist()
    behind = [batch.v[start + length : end].sum() for start, length, end in zip(starts, LENGTHS, starts[1:])]
    return honest(batch) + 0 * sum(behind)


def all_zero(batch):
    return honest(batch) * 0


def raising(batch):
    raise RuntimeError("libcudnn went away\nand more")


def refusing(batch):
    raise ValueError("no engine")


@pytest.mark.parametrize(
    "backend, expected",
    [
        (honest, {"finite": "pass", "NaN": "pass"}),
        (deriving, {"finite": "FAIL", "NaN": "FAIL"}),
        (leaky, {"finite": "pass", "NaN": "FAIL"}),
        (all_zero, {"finite": "FAIL", "NaN": "FAIL"}),
        (raising, {"finite": "FAIL", "NaN": "FAIL"}),
        (refusing, {"finite": "skipped", "NaN": "skipped"}),
    ],
)
def test_a_canary_tells_right_backends_from_broken_ones(backend, expected):
    outcomes = run_probes([Probe("it", backend, dim=16)], CPU)
    assert {outcome.padding: outcome.verdict for outcome in outcomes} == expected and all(outcome.detail for outcome in outcomes)


def test_nan_in_padding_alarms_for_the_bridge_alone():
    foreign = run_probes([Probe("it", leaky, dim=16)], CPU)
    ours = run_probes([Probe("it", leaky, dim=16, ours=True)], CPU)
    assert [outcome.alarming for outcome in foreign] == [False, False] and [outcome.alarming for outcome in ours] == [False, True]


def test_the_bridge_passes_its_own_canary_on_the_cpu():
    outcomes = run_probes([probe for probe in probes.probes("1.32.0", None) if probe.name.endswith("plan auto")], CPU)
    assert [outcome.verdict for outcome in outcomes] == ["pass", "pass"] and "dv" in outcomes[0].detail


def test_wrong_gradients_fail_a_canary_whose_forward_is_right():
    def half_gradient(batch):
        out = honest(batch)
        return out.detach() + (out - out.detach()) * 0.5

    assert [outcome.verdict for outcome in run_probes([Probe("it", half_gradient, dim=16)], CPU)] == ["FAIL", "FAIL"]


def test_every_backend_has_a_probe_that_is_skipped_with_its_reason_without_a_gpu():
    chosen = probes.probes("1.32.0", 90)
    names = " ".join(probe.name for probe in chosen)
    for backend in ("cuDNN graph", "sdpa_fwd_prefill_sm90, d = 512", "TransformerEngine", "flash-attn-4", "cudnn.flex_attention"):
        assert backend in names
    outcomes = run_probes(chosen, None)
    assert len(outcomes) == len(chosen) * len(PADDINGS)
    assert all(outcome.verdict == "skipped" and ("no GPU" in outcome.detail or "not installed" in outcome.detail) for outcome in outcomes)


def test_the_probes_batch_has_padding_of_the_kind_it_says():
    batch = Batch.drawn(16, float("nan"), CPU)
    assert int(batch.q.isnan().any(2).any(1).sum()) == batch.q.shape[0] - sum(LENGTHS)
    assert 0 in LENGTHS and batch.cu_seqlens_padded[-1] == batch.q.shape[0]


@pytest.mark.gpu
def test_the_bridge_passes_its_canaries_on_the_gpu():
    gpu = ranking.gpu_at_hand()
    chosen = [probe for probe in probes.probes(ranking.installed_frontend(), gpu.cc) if probe.ours]
    for outcome in run_probes(chosen, torch.device("cuda", gpu.index)):
        assert outcome.verdict in ("pass", "skipped"), outcome
