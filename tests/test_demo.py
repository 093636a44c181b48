"""The command and the examples as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from te_thd_bridge.cli.main import main

ROOT = Path(__file__).parent.parent


def test_the_demo_shows_both_addresses_and_small_errors_on_real_documents(tmp_path, capsys):
    text = tmp_path / "words.txt"
    text.write_text("identifier tokens lie between documents\n" * 20)
    assert main(["demo", str(text), "--tokens", "512", "--batches", "2", "--heads", "4", "--head-dim", "32"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split("(")[1].split(")")[0]: line.split()[-3:] for line in shown.splitlines() if line.strip().startswith(("lengths (", "cu_seqlens_padded ("))}
    assert [float(error) > 0.1 for error in lines["derived"]] == [False, True, True]
    assert all(float(error) < 1e-2 for error in lines["bound"])
    worst = next(line for line in shown.splitlines() if "worst relative error" in line).split(": ")[1]
    assert len(worst.split(",")) == 4 and all(float(part.split()[1]) < 2e-2 for part in worst.split(","))
    assert "tokens/s" in shown and "padding" in shown and ("reference" in shown or "cudnn:" in shown)


@pytest.mark.parametrize("arguments, words", [(["--heads", "0"], "--heads: got 0; accepted is an int of at least 1"), (["nowhere.txt"], "nowhere.txt")])
def test_the_demo_refuses_bad_arguments_by_name(arguments, words, capsys):
    assert main(["demo", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_module_runs_as_a_command():
    done = subprocess.run([sys.executable, "-m", "te_thd_bridge.cli", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "demo" in done.stdout


def test_the_quickstart_runs():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, ROOT / "examples" / "quickstart.py"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "starts at rows [0, 112, 144]" in done.stdout and "plan " in done.stdout
