"""Compiles the offset kernels for sm_90 as `launch` launches them, on a machine without a GPU, and prints what came of it.

Run as a program, because a process that imported Triton with its interpreter can't compile: prints one JSON object,
{case: {"vector_stores": n, "vector_loads": n, "stack_bytes": n or None}, ..., "compiled": {kernel: variants}}.
"""

import json
import pathlib
import re
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from te_thd_bridge import metadata
from te_thd_bridge.metadata import launch
from te_thd_bridge.metadata.types import Origins
from te_thd_bridge.spec import Band


class NoDevice:
    """As much of a driver as compiling asks for."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


compiled = {}


def compile_only(kernel, grid):
    def run(*args, **kwargs):
        binary = kernel.warmup(*args, grid=grid, **kwargs)
        compiled.setdefault(kernel.__name__, []).append(binary)

    return run


def stack_bytes(binary):
    """Bytes of local memory that the kernel spills to, or None without cuobjdump."""
    found = list(pathlib.Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump*"))
    if not found:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([found[0], "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage).group(1))


def accesses_of_16_bytes(instruction, ptx):
    return len(re.findall(rf"{instruction}\.global(?:\.\w+)*\.(?:v4\.[bfu]32|v2\.[bfu]64)", ptx))


def wide(batch=64, capacity=64, rows=1024, groups=3):
    prefix = torch.arange(batch + 1, dtype=torch.int32) * 8
    bound = [Origins(prefix, 1, 1, "kv" if g == 1 else "q", rows) for g in range(groups)]
    return metadata.widen(prefix, prefix, bound, Band(-1, 0), capacity, [(g, 4096) for g in range(groups)])


def rows(heads=8, channels=128, count=1024, dtype=torch.bfloat16):
    return torch.empty(count, heads, channels, dtype=dtype)


def main():
    driver.set_active(NoDevice())
    JITFunction.__getitem__ = compile_only
    launch.runs_kernels = lambda tensor: True
    made = wide()
    interleaved = rows(channels=256)[:, :, 128:]
    statistics = torch.empty(1024, 32)
    cases = {
        "widen": lambda: wide(),
        "widen, 9 groups, large batch": lambda: wide(3000, 3072, groups=9),
        "clear": lambda: metadata.clear([(rows(), 0, 0.0)], made),
        "clear, three targets": lambda: metadata.clear([(rows(32), 0, 0.0), (rows(), 1, 0.0), (statistics, 2, float("-inf"))], made),
        "clear, heads apart": lambda: metadata.clear([(interleaved, 0, 0.0)], made),
        "clear, fp64": lambda: metadata.clear([(rows(dtype=torch.float64), 0, 0.0)], made),
        "gather": lambda: metadata.gather_rows(interleaved, rows(), made, 0, "q"),
        "gather, 192 channels": lambda: metadata.gather_rows(rows(16, 192), rows(16, 192), made, 0, "q"),
        "scatter": lambda: metadata.scatter_rows(rows(), rows(), made, 0, "q"),
        "scatter statistics": lambda: metadata.scatter_rows(statistics, statistics, made, 0, "q", float("-inf")),
        "sanitise": lambda: metadata.sanitise_rows(interleaved, rows(), made, 1, "kv"),
        "scrub": lambda: metadata.scrub_([(rows(), 0), (interleaved, 1), (rows(dtype=torch.float64), 1)], made),
        "gap_sequences": lambda: metadata.gap_sequences(made, 0, 1),
        "key_intervals": lambda: metadata.key_intervals(made, 0, Band(128, 0), 1024),
    }
    report = {}
    for name, launch_case in cases.items():
        compiled.clear()
        launch_case()
        (binary,) = next(iter(compiled.values()))
        ptx = binary.asm["ptx"]
        report[name] = {
            "vector_stores": accesses_of_16_bytes("st", ptx),
            "vector_loads": accesses_of_16_bytes("ld", ptx),
            "stack_bytes": stack_bytes(binary),
        }
    compiled.clear()
    for step in range(12):
        count = 640 + 17 * step
        made = wide(1 + 5 * step, 64, count)
        metadata.clear([(rows(count=count), step % 3, float(step))], made)
        metadata.gather_rows(rows(count=count), rows(count=count + step), made, step % 3, "q" if step % 2 else "kv")
        metadata.scrub_([(rows(count=count), step % 3)], made)
        metadata.gap_sequences(made, step % 2, 2)
        metadata.key_intervals(made, step % 3, Band(step, step % 4), count)
    report["compiled"] = {kernel: len({binary.hash for binary in binaries}) for kernel, binaries in compiled.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
