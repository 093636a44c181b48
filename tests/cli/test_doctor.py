"""`te-thd-bridge doctor` on whatever machine runs the tests."""

import pytest
import torch

from te_thd_bridge.cli.main import main


def test_the_doctor_names_versions_libraries_flags_and_every_canary(capsys, monkeypatch):
    monkeypatch.setenv("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "1")
    assert main(["doctor"]) in (0, 1)
    shown = capsys.readouterr().out
    for section in ("versions", "libcudnn that would be loaded", "environment", "findings", "canaries"):
        assert section in shown
    assert torch.__version__ in shown and "CUDNN_FRONTEND_ENABLE_FROST_ENGINES" in shown
    for backend in ("te_thd_bridge", "TransformerEngine", "flash-attn-4", "cudnn.flex_attention"):
        assert backend in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is skipped without a GPU")
def test_without_a_gpu_canaries_are_skipped_with_a_reason_and_nothing_is_called_passed(capsys):
    assert main(["doctor"]) == 0
    canaries = [line for line in capsys.readouterr().out.split("canaries")[1].splitlines() if ":" in line]
    assert len(canaries) >= 8 and all(line.split()[0] == "skipped" for line in canaries)
