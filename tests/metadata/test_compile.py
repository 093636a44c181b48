"""The kernels compile for a GPU, to the code they were written for; no GPU is needed to know."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("compile_for_sm90.py")
ROOT = PROGRAM.parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    triton = pytest.importorskip("triton")
    if not list(pathlib.Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*")):
        pytest.skip("this Triton brings no ptxas")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment.update(
        TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")), PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    )
    ran = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_no_kernel_spills_registers(report):
    spilled = {name: case["stack_bytes"] for name, case in report.items() if name != "compiled" and case["stack_bytes"]}
    assert spilled == {}


@pytest.mark.parametrize("case", ["clear", "clear, three targets", "clear, heads apart", "clear, fp64"])
def test_clearing_stores_16_bytes_at_a_time(report, case):
    assert report[case]["vector_stores"] > 0


@pytest.mark.parametrize("case", ["gather", "gather, 192 channels", "scatter", "scatter statistics", "sanitise"])
def test_copies_move_16_bytes_at_a_time(report, case):
    assert report[case]["vector_loads"] > 0 and report[case]["vector_stores"] > 0


def test_sizes_of_a_training_step_compile_nothing_new(report):
    assert report["compiled"] == dict.fromkeys(("widen", "clear", "move", "scrub", "gap_sequences", "key_intervals"), 1)
