"""`te-thd-bridge doctor`: what is installed, which libcudnn each package would load, what is known to go wrong, and canaries.

Exit status 0 where nothing alarming was found, else 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..plans import ranking
from ..plans.verdicts import DIRECTIONS, table
from .probes import Outcome, probes, run_probes

PACKAGES = (
    "te-thd-bridge",
    "torch",
    "triton",
    "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-jit-cu13",
    "nvidia-cutlass-dsl",
    "transformer-engine",
    "megatron-core",
    "flash-attn-4",
)
#: Environment variables that change which library is loaded, which engine runs, or what the bridge keeps.
FLAGS = re.compile(
    r"CUDNN_(HOME|PATH|FRONTEND_\w+|LOGLEVEL_DBG)|CUDA_(HOME|PATH|VISIBLE_DEVICES|LAUNCH_BLOCKING)|LD_(LIBRARY_PATH|PRELOAD)|NVTE_\w+|TE_THD_BRIDGE_\w+|TRITON_INTERPRET"
)


@dataclass(frozen=True)
class KnownBad:
    """Versions that go wrong together: {distribution: prefixes of its version}, all of which must match."""

    versions: Mapping[str, tuple[str, ...]]
    effect: str
    remedy: str
    source: str


KNOWN_BAD = (
    KnownBad(
        {"transformer-engine": ("2.20.",), "flash-attn-4": ("4.0.0b36",)},
        "TransformerEngine hands flash-attn-4 the window (-1, 0), which it reads as no visible key: causal attention is 0 everywhere",
        "uninstall flash-attn-4, set NVTE_FLASH_ATTN=0, or let te_thd_bridge.te.install() serve it",
        "NVIDIA/TransformerEngine issue 3528; measured on an H200",
    ),
)
#: cuDNN below this answers NaN for sequences without keys; the bridge hands it none.
KEYLESS_FIXED = (9, 25)


@dataclass(frozen=True)
class Finding:
    alarming: bool
    text: str


@dataclass(frozen=True)
class Library:
    """path: the libcudnn that ``user`` would load, None where it finds none.  how: by which rule, or why not."""

    user: str
    path: str | None
    how: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-canaries", action="store_true", help="run nothing on the GPU")


def run(arguments: argparse.Namespace) -> int:
    versions, gpu = installed_versions(), ranking.gpu_at_hand()
    libraries = cudnn_libraries(Path(sysconfig.get_path("purelib")), os.environ, _ldconfig(), versions)
    findings = [*clashes(libraries, loaded_cudnn()), *known_bad(versions), *frontend_findings(versions, gpu)]
    device = None if gpu is None or arguments.skip_canaries else torch.device("cuda", gpu.index)
    outcomes = run_probes(probes(versions.get("nvidia-cudnn-frontend"), gpu and gpu.cc), device)

    _section("versions", [(name, versions.get(name, "not installed")) for name in PACKAGES])
    _section("GPU", [(gpu.name, f"compute capability {gpu.cc // 10}.{gpu.cc % 10}") if gpu else ("none", "the reference plan computes, on the CPU")])
    _section("libcudnn that would be loaded", [(library.user, f"{library.path or 'none'} ({library.how})") for library in libraries])
    _section(
        "environment",
        sorted((name, value) for name, value in os.environ.items() if FLAGS.fullmatch(name)) or [("-", "none of the flags that matter is set")],
    )
    _section("findings", [("PROBLEM" if finding.alarming else "note", finding.text) for finding in findings] or [("-", "nothing known to go wrong")])
    _section("canaries", [(outcome.verdict, _told(outcome)) for outcome in outcomes])
    alarming = any(finding.alarming for finding in findings) or any(outcome.alarming for outcome in outcomes)
    print("something above needs attention" if alarming else "nothing alarming")
    return int(alarming)


def installed_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cudnn_libraries(site: Path, environ: Mapping[str, str], cached: list[str], versions: Mapping[str, str]) -> list[Library]:
    """By each package's own rules, from files alone: nothing is loaded.

    site: where packages are installed.  cached: libcudnn as `ldconfig -p` lists it.
    """
    by_user = {
        "torch": _torch_cudnn(site, environ, cached),
        "TransformerEngine": _transformer_engine_cudnn(site, environ, cached),
        "cudnn frontend": _frontend_cudnn(site, environ, cached),
    }
    needed = {"torch": "torch", "TransformerEngine": "transformer-engine", "cudnn frontend": "nvidia-cudnn-frontend"}
    return [Library(user, *found) if needed[user] in versions else Library(user, None, "not installed") for user, found in by_user.items()]


def _torch_cudnn(site: Path, environ: Mapping[str, str], cached: list[str]) -> tuple[str | None, str]:
    if "+cpu" in torch.__version__:
        return None, "a CPU build"
    # The wheel's rpath names the package's directory, and an rpath goes before LD_LIBRARY_PATH.
    packaged = _first(site.glob("nvidia/cudnn/lib/libcudnn.so.*")) or _first(site.glob("torch/lib/libcudnn*.so*"))
    return (packaged, "package beside torch") if packaged else _by_loader(environ, cached, "libcudnn.so.9")


def _transformer_engine_cudnn(site: Path, environ: Mapping[str, str], cached: list[str]) -> tuple[str | None, str]:
    for name in ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH", None):
        root = environ.get(name) if name else "/usr/local/cuda"
        names = sorted((path for path in Path(root).rglob("libcudnn.so*") if "stub" not in str(path)), key=lambda path: path.name) if root else []
        if names:
            return str(names[-1]), f"{name or root}"
    path, how = _by_loader(environ, cached, "libcudnn.so")
    if path:
        return path, how
    for pattern in ("nvidia/cu13/cudnn/lib/libcudnn.so.*", "nvidia/cu13/lib/libcudnn.so.*", "nvidia/cudnn/lib/libcudnn.so.*"):
        if packaged := _first(site.glob(pattern)):
            return packaged, "package"
    return None, "found nowhere"


def _frontend_cudnn(site: Path, environ: Mapping[str, str], cached: list[str]) -> tuple[str | None, str]:
    for name in ("libcudnn.so.9", "libcudnn.so"):
        for directory in filter(None, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
            if (Path(directory) / name).exists():
                return str(Path(directory) / name), "LD_LIBRARY_PATH"
    for package in ("cudnn", "cudnn_jit"):
        if packaged := _first(site.glob(f"nvidia/{package}/lib/libcudnn.so.*[0-9]")):
            return packaged, "package"
    return _by_loader(environ, cached, "libcudnn.so.9")


def _by_loader(environ: Mapping[str, str], cached: list[str], name: str) -> tuple[str | None, str]:
    for directory in filter(None, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        if (Path(directory) / name).exists():
            return str(Path(directory) / name), "LD_LIBRARY_PATH"
    path = next((path for path in cached if Path(path).name == name), None)
    return (path, "ldconfig") if path else (None, "found nowhere")


def _first(paths) -> str | None:
    return next((str(path) for path in sorted(paths)), None)


def _ldconfig() -> list[str]:
    program = shutil.which("ldconfig", path=os.environ.get("PATH", "") + ":/sbin:/usr/sbin")
    if program is None:
        return []
    listed = subprocess.run([program, "-p"], capture_output=True, text=True, check=False).stdout
    return re.findall(r"=> (\S*/libcudnn\.so\S*)", listed)


def loaded_cudnn() -> list[str]:
    """The libcudnn files that this process has mapped."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted(set(re.findall(r"(/\S*/libcudnn\.so\S*)", maps)))


def clashes(libraries: list[Library], loaded: list[str]) -> list[Finding]:
    found = {os.path.realpath(library.path): library for library in libraries if library.path}
    findings = []
    if len(found) > 1:
        told = "; ".join(f"{library.user}: {path} ({library.how})" for path, library in found.items())
        findings.append(
            Finding(
                True, f"different libcudnn for different packages: {told}. Let CUDNN_HOME, and LD_LIBRARY_PATH if set, name the one that torch loads"
            )
        )
    if len({os.path.realpath(path) for path in loaded}) > 1:
        findings.append(Finding(True, f"this process has loaded more than one libcudnn: {', '.join(loaded)}"))
    return findings


def known_bad(versions: Mapping[str, str]) -> list[Finding]:
    findings = []
    for entry in KNOWN_BAD:
        if all(versions.get(name, "").startswith(prefixes) for name, prefixes in entry.versions.items()):
            together = " with ".join(f"{name} {versions[name]}" for name in entry.versions)
            findings.append(Finding(True, f"{together}: {entry.effect}. Remedy: {entry.remedy} ({entry.source})"))
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        if name in versions and tuple(int(part) for part in versions[name].split(".")[:2]) < KEYLESS_FIXED:
            findings.append(Finding(False, f"{name} {versions[name]} answers NaN for sequences without keys (below 9.25); the bridge hands it none"))
    return findings


def frontend_findings(versions: Mapping[str, str], gpu: ranking.Gpu | None) -> list[Finding]:
    """What the verdict table says of the installed frontend, for this GPU or for all."""
    release = versions.get("nvidia-cudnn-frontend")
    if release is None:
        return [Finding(True, "nvidia-cudnn-frontend is not installed: no plan for a GPU can be built")]
    if release not in table().releases:
        return [Finding(False, f"nvidia-cudnn-frontend {release} has no verdicts: its engines run once a canary has proven them")]
    findings = []
    for direction in DIRECTIONS:
        for row in table().rows(release, direction):
            derives = any(table().merged(row, [case]).ports.get("q") == "derives" for case in row.cases)
            if derives and row.default_on and row.placement != "trails" and (gpu is None or row.cc[0] <= gpu.cc <= row.cc[1]):
                where = f"compute capability {row.cc[0] / 10} to {row.cc[1] / 10}; {row.note}"
                findings.append(
                    Finding(
                        False, f"{row.row} is on by default ({where}) and rebuilds starts from lengths: code without the bridge may get wrong rows"
                    )
                )
    if ranking.flag_is_set():
        findings.append(
            Finding(False, f"{ranking.FROST_FLAG} is set: the frontend's own engines go first everywhere, and most rebuild starts from lengths")
        )
    if importlib.util.find_spec("cutlass") is None:
        findings.append(Finding(False, "CUTLASS DSL is not installed: the frontend offers none of its own engines"))
    return findings


def _told(outcome: Outcome) -> str:
    return f"{outcome.probe.name}, {outcome.padding} padding: {outcome.detail}"


def _section(title: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    print(f"{title}\n" + "".join(f"  {name.ljust(width)}  {text}\n" for name, text in rows))
