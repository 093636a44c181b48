"""Plans in the order in which the frontend would try them, for a GPU that needn't be there.

`rank` builds the graph that the bridge would build and asks the installed frontend; `rank_from_table` lists another
release's rows as verdicts_data.json has them.  Ranking needs no device: the frontend's Python engines are chosen from
facts about the device that are put in its place, and cuDNN's own from a description of it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..spec import AttentionSpec
from .graph import UnsupportedByGraph, build_graph, frontend, reads_packed_stats
from .verdicts import BACKEND, AttentionFacts, Row, Verdict, is_backend_plan, knobs_by_name, lookup, row_of, table

#: Set to 1, it makes the frontend offer its opt-in engines too, and all of its Python engines ahead of cuDNN's own.
FROST_FLAG = "CUDNN_FRONTEND_ENABLE_FROST_ENGINES"
_TRUE = ("1", "true", "yes", "on")
#: Names of GPUs -> (10 * major + minor of the compute capability, multiprocessors).
GPUS = {
    "a100": (80, 108),
    "l40s": (89, 142),
    "h100": (90, 132),
    "h200": (90, 132),
    "b200": (100, 148),
    "gb200": (100, 148),
    "b300": (103, 148),
    "gb300": (103, 148),
    "thor": (110, 20),
    "rtx-pro-6000": (120, 188),
    "rtx-5090": (120, 170),
    "gb10": (121, 48),
    "sm80": (80, 108),
    "sm86": (86, 84),
    "sm89": (89, 142),
    "sm90": (90, 132),
    "sm100": (100, 148),
    "sm103": (103, 148),
    "sm107": (107, 216),
    "sm110": (110, 20),
    "sm120": (120, 188),
    "sm121": (121, 48),
}
#: What cuDNN 9.27 wants to know of a device besides compute capability and multiprocessors; an H200's answers, which its
#: choice of engines hardly depends on.
_DEVICE = {
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65536,
    "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024,
    "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "pciDeviceId": 0,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "totalGlobalMem": 150109880320,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
    "l2CacheSize": 62914560,
    "cudaDeviceId": 0,
    "driverVer": 13000,
    "smCountOrigin": 0,
    "oversizedSharedMemoryPerBlock": 0,
    "memoryBusWidth": 6144,
}


@dataclass(frozen=True)
class Gpu:
    """cc: 10 * major + minor.  index: the device's index where the GPU is present."""

    name: str
    cc: int
    multiprocessors: int
    index: int | None = None

    def properties(self) -> dict[str, Any]:
        """The device as cuDNN serialises it."""
        return {**_DEVICE, "deviceVer": 10 * self.cc, "deviceName": self.name, "multiProcessorCount": self.multiprocessors}


def gpu_named(name: str) -> Gpu:
    """Raises ValueError, naming what is accepted."""
    if name.lower() not in GPUS:
        raise ValueError(f"--gpu: got {name!r}; accepted are {', '.join(GPUS)}")
    return Gpu(name.lower(), *GPUS[name.lower()])


def gpu_at_hand() -> Gpu | None:
    if not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    return Gpu(properties.name, 10 * properties.major + properties.minor, properties.multi_processor_count, index)


@dataclass(frozen=True)
class RankedPlan:
    """name: the frontend's name for the plan, or "backend" for cuDNN's own where they aren't listed.  default_on: offered without FROST_FLAG."""

    name: str
    direction: str
    default_on: bool
    verdict: Verdict
    knobs: Mapping[str, int] | None = None
    engine_id: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Ranking:
    """notes: what the list lacks or rests on, for a reader."""

    plans: list[RankedPlan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def installed_frontend() -> str | None:
    try:
        return frontend().__version__
    except UnsupportedByGraph:
        return None


def installed_cudnn() -> int | None:
    """cudnn.backend_version() of the libcudnn that the frontend loaded; None without one."""
    try:
        return frontend().backend_version()
    except (UnsupportedByGraph, RuntimeError):
        return None


def flag_is_set() -> bool:
    return os.environ.get(FROST_FLAG, "0").strip().lower() in _TRUE


def rank(spec: AttentionSpec, direction: str, gpu: Gpu, *, frost: bool) -> Ranking:
    """What the installed frontend would try for a spec on a GPU, in its order.

    frost: as with FROST_FLAG set.  Falls back to the table, and says why, where the frontend can't rank here.
    """
    release, version = installed_frontend(), installed_cudnn()
    facts = AttentionFacts.of(spec, gpu.cc, version)
    if release is None:
        return _without_frontend(release, direction, facts, frost, "nvidia-cudnn-frontend is not installed here")
    if importlib.util.find_spec("cutlass") is None:
        return _without_frontend(release, direction, facts, frost, "CUTLASS DSL is not installed here: the frontend offers none of its own engines")
    with _device(gpu, frost):
        described = _described(gpu) if version is not None else None
        try:
            plans, backend_first = _ask(spec, direction, gpu, release, facts, described)
        except UnsupportedByGraph as refusal:
            return _without_frontend(release, direction, facts, frost, f"the frontend can't rank here ({_first_line(refusal)})")
    if described is not None:
        return Ranking(plans)
    stand_in = _backend_stand_in(
        release, direction, facts, "libcudnn is not installed here" if version is None else "libcudnn takes no description of a GPU here"
    )
    if stand_in is None:
        return Ranking(plans, ["cuDNN has no engine of its own for these head dims on this GPU"])
    return Ranking([stand_in, *plans] if backend_first else [*plans, stand_in])


def _ask(spec, direction, gpu, release, facts, described) -> tuple[list[RankedPlan], bool]:
    """(plans, whether cuDNN's own go ahead of the frontend's).  Raises UnsupportedByGraph where it can't be known."""
    plans, backend_first = [], True
    # On sm8x and sm12x the frontend's engines read packed Stats in the backward and cuDNN's want them padded: two graphs.
    both = direction == "bwd" and not reads_packed_stats(gpu.cc) and described is not None
    for packed_stats in (True, False) if both else (True,):
        try:
            graph = build_graph(spec, direction, packed_stats=packed_stats, **(described or {}))
        except UnsupportedByGraph as refusal:
            if "no engine" in str(refusal):
                continue
            raise
        if packed_stats:
            backend_first = _backend_leads(graph)
        plans += [plan for plan in _listed(graph, direction, release, facts) if plan.name not in {known.name for known in plans}]
    return plans, backend_first


def _listed(graph: Any, direction: str, release: str, facts: AttentionFacts) -> Iterator[RankedPlan]:
    opt_in = _opt_in_engines()
    for index in range(graph.get_execution_plan_count()):
        name = graph.get_plan_name_at_index(index)
        engine_id, knobs = graph.get_engine_and_knobs_at_index(index)
        knobs = knobs_by_name(knobs)
        verdict = lookup(release, direction, name, knobs, facts)
        yield RankedPlan(_shown_name(name, knobs), direction, row_of(name) not in opt_in, verdict, knobs, engine_id)


def _shown_name(name: str, knobs: Mapping[str, int] | None) -> str:
    """As releases from 1.30 on write it; earlier ones print a Python object."""
    if is_backend_plan(name) or not knobs:
        return row_of(name)
    return f"{row_of(name)}[{', '.join(f'{knob}={knobs[knob]}' for knob in sorted(knobs))}]"


def _opt_in_engines() -> set[str]:
    from cudnn.engines import manifest

    return {name for family in manifest.MANIFEST for name, slot in family.slots.items() if slot.opt_in}


def _backend_leads(graph: Any) -> bool:
    """Whether the frontend puts cuDNN's own plans first; releases without a marker for them put them last."""
    from cudnn.engines import heuristics, manifest

    family = manifest.family_for(graph)
    propose, analyze = manifest.resolve_heuristics(family), manifest.resolve_analyzer(family)
    if propose is None:
        return False
    proposals = propose("A", analyze(graph), family.offered_ids())
    return not proposals or proposals[0] == getattr(heuristics, "BACKEND", None)


def _described(gpu: Gpu) -> dict[str, Any] | None:
    """Arguments of cudnn.pygraph that describe the device; None where libcudnn takes no description here."""
    cudnn = frontend()
    try:
        properties = cudnn.create_device_properties(json.dumps(gpu.properties()) if gpu.index is None else gpu.index)
    except RuntimeError:
        return None
    return {"device_property": properties, "sm_version": gpu.cc, "sm_count": gpu.multiprocessors}


_patching = threading.RLock()


@contextmanager
def _device(gpu: Gpu, frost: bool) -> Iterator[None]:
    """Within it the frontend's Python engines see this GPU and this FROST_FLAG; both are put back exactly."""
    from cudnn.sdpa import graph_analyzer

    cc, properties = divmod(gpu.cc, 10), gpu.properties()
    replacements = {"_device_props": lambda: properties, "_device_cc": lambda: cc, "_device_sm_count": lambda: gpu.multiprocessors}
    with _patching:
        saved = {name: getattr(graph_analyzer, name) for name in replacements}
        flag = os.environ.get(FROST_FLAG)
        try:
            if gpu.index is None:
                for name, replacement in replacements.items():
                    setattr(graph_analyzer, name, replacement)
            os.environ[FROST_FLAG] = "1" if frost else "0"
            yield
        finally:
            for name, original in saved.items():
                setattr(graph_analyzer, name, original)
            if flag is None:
                del os.environ[FROST_FLAG]
            else:
                os.environ[FROST_FLAG] = flag


def rank_from_table(release: str, direction: str, facts: AttentionFacts, *, frost: bool) -> Ranking:
    """A release's rows that take such a graph, with their verdicts: those that lead, cuDNN's own, those that trail.

    One entry for each combination of knobs that makes a difference.  Raises ValueError for a release without verdicts.
    """
    verdicts = table()
    if release not in verdicts.releases:
        raise ValueError(f"--frontend: got {release!r}; accepted are {', '.join(verdicts.releases)}")
    leading, trailing = [], []
    for row in verdicts.rows(release, direction):
        if (row.default_on or frost) and row.admits(facts) is not False:
            (leading if frost or row.placement == "leads" else trailing).extend(_variants(row, facts))
    stand_in = _backend_stand_in(release, direction, facts, "the table holds the frontend's engines only")
    plans = [*leading, *([] if stand_in is None else [stand_in]), *trailing]
    return Ranking(plans, [f"order and engines of {release} as read from its sources, not ranked by it"])


def _variants(row: Row, facts: AttentionFacts) -> Iterator[RankedPlan]:
    cases, _ = table().possible_cases(row, None, facts)
    for case in cases:
        wanted = case["when"].get("knobs", {})
        if len(cases) == 1:
            name = row.row
        elif wanted:
            name = f"{row.row}[{', '.join(f'{knob}={_choices(values)}' for knob, values in sorted(wanted.items()))}]"
        else:
            name = f"{row.row}[other knobs]"
        yield RankedPlan(name, row.direction, row.default_on, table().merged(row, [case]), None, row.engine_id, row.note)


def _choices(values: list) -> str:
    return "|".join("unset" if value is None else str(value) for value in values)


def _backend_stand_in(release: str | None, direction: str, facts: AttentionFacts, why: str) -> RankedPlan | None:
    if not table().backend_serves(direction, facts):
        return None
    verdict = lookup(release, direction, BACKEND, None, facts)
    return RankedPlan(BACKEND, direction, True, verdict, note=f"cuDNN backend plans: not listed, {why}; they honor every port")


def _without_frontend(release: str | None, direction: str, facts: AttentionFacts, frost: bool, why: str) -> Ranking:
    release = release if release in table().releases else table().releases[-1]
    ranking = rank_from_table(release, direction, facts, frost=frost)
    return Ranking(ranking.plans, [why, *ranking.notes])


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
