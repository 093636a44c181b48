"""Which engine reads the ragged offsets that are bound, and what is done about one that doesn't.

`lookup` reads verdicts_data.json; `decide` is the only place that turns a verdict into a way of running.  Pure Python:
neither torch nor the frontend is needed.

An engine *honors* a port's offset when it reads the bound tensor on the device, and *derives* it when it rebuilds where
sequences start from the lengths alone.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..layout import ThdLayout
    from ..spec import AttentionSpec

DIRECTIONS = ("fwd", "bwd")
#: The ports that a graph of each direction binds, and those of them that it reads.
PORTS = {"fwd": ("q", "k", "v", "o", "stats"), "bwd": ("q", "k", "v", "o", "stats", "do", "dq", "dk", "dv")}
INPUTS = {"fwd": ("q", "k", "v"), "bwd": ("q", "k", "v", "o", "stats", "do")}
#: Stands for cuDNN's own engines where they aren't listed one by one.
BACKEND = "backend"
_BACKEND_PLAN = re.compile(r"eng\d+(_k\d+=-?\d+)*")
_PADDING_FEEDS = {"any": "sanitised_copies", "scrub": "scrub", "finite": "promised"}
#: Fields of the frontend's knob objects up to 1.29.1, by the public names that later releases print.
_KNOB_FIELDS = {
    "sched_policy": "SCHED_POLICY",
    "tile_m": "TILE_M",
    "tile_n": "TILE_N",
    "cga": "TILE_CGA_M",
    "pack_gqa": "PACK_GQA",
    "split_kv": "SPLIT_KV",
}


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """What a verdict may depend on besides release, row and knobs.  None: not known, and a condition on it is undecided.

    cc:     10 * major + minor of the compute capability.
    dtype:  "bf16" | "fp16" | "fp8" | "mxfp8".
    cudnn:  cudnn.backend_version(), 92700 for 9.27.0.
    cu_form: lengths are bound as running totals (cu_seq_len_q/kv).  gate: the fused O * sigmoid(G) epilogue.
    """

    cc: int | None = None
    dtype: str | None = None
    dim_qk: int | None = None
    dim_v: int | None = None
    heads_q: int | None = None
    heads_kv: int | None = None
    max_q: int | None = None
    window: bool | None = None
    bottom_right: bool | None = None
    deterministic: bool | None = None
    sink: bool | None = None
    cu_form: bool | None = None
    paged: bool | None = False
    gate: bool | None = False
    cudnn: int | None = None

    @classmethod
    def of(cls, spec: AttentionSpec, cc: int, cudnn: int | None = None) -> AttentionFacts:
        return cls(
            cc=cc,
            dtype={"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(str(spec.dtype)),
            dim_qk=spec.dim_qk,
            dim_v=spec.dim_v,
            heads_q=spec.heads_q,
            heads_kv=spec.heads_kv,
            max_q=spec.max_q,
            window=spec.band.left >= 0,
            bottom_right=spec.band.bottom_right,
            deterministic=spec.deterministic,
            sink=spec.sink,
            cu_form=bool(spec.bound),
            cudnn=cudnn,
        )


@dataclass(frozen=True)
class Verdict:
    """What is known of one engine for one attention.

    ports:    {port: "honors" | "derives" | "unknown"} for the ports that a graph of the direction binds.
    nan_safe: whether NaN in rows between sequences stays out of real rows; None is unknown.
    exposed:  the input ports through which it comes in, where nan_safe is False.
    gap_sequences: sequences longer than the declared maximum are computed as far as their real rows need.
    excluded: why nothing makes this engine right, or None.
    basis:    "measured" | "read" (from the release's sources) | "documented" | "unknown".
    source:   release, files and lines, or what was measured where.
    """

    direction: str
    ports: Mapping[str, str]
    nan_safe: bool | None = None
    exposed: tuple[str, ...] = ()
    gap_sequences: bool = False
    excluded: str | None = None
    basis: str = "unknown"
    source: str = ""
    reason: str = ""

    @property
    def honors_all(self) -> bool:
        return all(offset == "honors" for offset in self.ports.values())

    @property
    def unknown_ports(self) -> tuple[str, ...]:
        return tuple(port for port, offset in self.ports.items() if offset == "unknown")


@dataclass(frozen=True)
class LayoutFacts:
    """What the host knows of a layout's offsets without reading them.

    q_shared, kv_shared: q, o and stats (k and v) start every sequence at the same row.
    in_order: sequences lie in index order on both sides, by the contract of a padded prefix.
    """

    q_shared: bool
    kv_shared: bool
    in_order: bool

    @classmethod
    def of(cls, layout: ThdLayout, prefix_ports: Collection[str]) -> LayoutFacts:
        """prefix_ports: the ports whose starts are a padded prefix, which never decreases; own offsets may come in any order."""

        def starts(port: str) -> tuple:
            offset = layout.offsets[port]
            # Offsets in elements or bytes mean different rows in tensors of different strides.
            return (id(offset.values), offset.multiplier) if offset.unit == "token" else (port,)

        def shared(*ports: str) -> bool:
            return len({starts(port) for port in ports}) == 1

        return cls(shared("q", "o", "stats"), shared("k", "v"), all(port in prefix_ports for port in PORTS["fwd"]))


@dataclass(frozen=True)
class Decision:
    """How an engine may run.

    served_by: "direct": the bound offsets go in as they are.  "gap_sequences": gaps become sequences of their own, so
        that derived starts land on the bound ones.  "packed_copies": inputs are gathered to lie end to end, results
        scattered; the copies hold finite values behind their last row.  "excluded": never.  "needs_canary": not
        before it is proven on the device.
    feed: "as_is", "sanitised_copies" (of ``exposed``), "scrub" (``exposed`` in place) or "promised" (the caller's word).
    exposed: input ports whose rows between sequences must be finite.
    """

    served_by: str
    feed: str
    reason: str
    exposed: tuple[str, ...] = ()


def decide(verdict: Verdict, layout: LayoutFacts, padding: str) -> Decision:
    """The one rule from a verdict to a way of running; ``padding`` is the layout's mode, "any" | "finite" | "scrub".

    Raises ValueError for another mode.
    """
    if padding not in _PADDING_FEEDS:
        raise ValueError(f"padding: got {padding!r}; accepted are {', '.join(map(repr, _PADDING_FEEDS))}")
    if verdict.excluded:
        return Decision("excluded", "as_is", verdict.excluded)
    feed, exposed = _feed(verdict, padding)
    if verdict.unknown_ports:
        return Decision("needs_canary", feed, f"{verdict.reason or 'nothing is known of it'}: not before it is proven on the device", exposed)
    if verdict.honors_all:
        return Decision("direct", feed, f"reads every bound offset ({verdict.basis}){_told(verdict, feed, exposed)}", exposed)
    obstacle = _gap_obstacle(verdict, layout)
    if obstacle is None:
        reason = f"starts are rebuilt from lengths; gaps as sequences put them on the bound ones{_told(verdict, feed, exposed)}"
        return Decision("gap_sequences", feed, reason, exposed)
    return Decision("packed_copies", "as_is", f"starts are rebuilt from lengths; no gap sequences: {obstacle}")


def _feed(verdict: Verdict, padding: str) -> tuple[str, tuple[str, ...]]:
    if verdict.nan_safe:
        return "as_is", ()
    exposed = verdict.exposed if verdict.nan_safe is False and verdict.exposed else INPUTS[verdict.direction]
    return _PADDING_FEEDS[padding], exposed


def _told(verdict: Verdict, feed: str, exposed: tuple[str, ...]) -> str:
    if feed == "as_is":
        return ""
    means = {
        "sanitised_copies": "copies with 0 there go in",
        "scrub": "what isn't finite there is overwritten in place",
        "promised": "the caller promises finite values there",
    }
    ports = ", ".join(exposed)
    danger = f"NaN in padding of {ports} reaches real rows" if verdict.nan_safe is False else f"what NaN in padding of {ports} does is not known here"
    return f"; {danger}: {means[feed]}"


def _gap_obstacle(verdict: Verdict, layout: LayoutFacts) -> str | None:
    if verdict.direction != "fwd":
        return "they serve the forward only"
    if not verdict.gap_sequences:
        return "the engine may not finish sequences longer than S_max"
    if not layout.q_shared:
        return "q, o and stats start at different rows"
    if not layout.kv_shared:
        return "k and v start at different rows"
    if not layout.in_order:
        return "own offsets may put sequences in any order"
    return None


def lookup(frontend_version: str, direction: str, row_name: str, knobs: Any, facts: AttentionFacts) -> Verdict:
    """The verdict on one plan of a ranked list.

    frontend_version: cudnn.__version__.  row_name: the plan's name, knobs in brackets or not.
    knobs: what get_engine_and_knobs_at_index gives, {name: value}, or None where they aren't known.
    A release, row, knob, value or fact that the table doesn't cover makes every port it decides "unknown".
    """
    return table().lookup(frontend_version, direction, row_name, knobs, facts)


@functools.cache
def table() -> VerdictTable:
    """The table that `lookup` reads; tests put another in its place."""
    return VerdictTable(json.loads(Path(__file__).with_name("verdicts_data.json").read_text(encoding="utf-8")))


def row_of(plan_name: str) -> str:
    """A plan's name without its knobs."""
    return plan_name.partition("[")[0]


def is_backend_plan(plan_name: str) -> bool:
    """Whether cuDNN itself, and not a Python engine of the frontend, runs the plan."""
    return plan_name == BACKEND or _BACKEND_PLAN.fullmatch(plan_name) is not None


def knobs_by_name(knobs: Any) -> dict[str, int] | None:
    """{public knob name: value} from the forms that releases use, without knobs that are unset; None for no knobs at all."""
    if knobs is None:
        return None
    if isinstance(knobs, Mapping):
        named = {getattr(knob, "name", knob): value for knob, value in knobs.items()}
    else:
        named = {_KNOB_FIELDS.get(name, name.upper()): value for name, value in vars(knobs).items()}
    return {name: int(value) for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class Row:
    """One engine of one release, as the table has it.

    placement: among the plans for a ragged graph, ahead of cuDNN's own ("leads"), behind them ("trails"), or either
    ("sometimes", and note says when).  An opt-in engine leads once it is offered.
    """

    release: str
    direction: str
    row: str
    engine_id: int
    cc: tuple[int, int]
    default_on: bool
    placement: str
    serves: tuple[Mapping[str, Any], ...]
    cases: tuple[Mapping[str, Any], ...]
    source: tuple[str, ...]
    note: str = ""

    def admits(self, facts: AttentionFacts) -> bool | None:
        """Whether the engine takes a ragged graph with these facts; None where a fact is missing."""
        return _all([_between(facts.cc, *self.cc), _any([holds(serves, facts, None) for serves in self.serves])])


@dataclass(frozen=True, eq=False)
class VerdictTable:
    """verdicts_data.json's content; an empty document knows nothing."""

    document: Mapping[str, Any]
    _rows: dict[tuple[str, str, str], Row] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = {}
        for raw in self.document.get("rows", ()):
            row = Row(**{key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()})
            rows[row.release, row.direction, row.row] = row
        object.__setattr__(self, "_rows", rows)

    @property
    def releases(self) -> tuple[str, ...]:
        return tuple(self.document.get("releases", ()))

    def rows(self, release: str, direction: str) -> Iterator[Row]:
        return (row for row in self._rows.values() if (row.release, row.direction) == (release, direction))

    def possible_cases(self, row: Row, knobs: Mapping[str, int] | None, facts: AttentionFacts) -> tuple[list[Mapping[str, Any]], bool]:
        """(the cases that may apply, up to the first that surely does; whether one surely does)."""
        found = []
        for case in row.cases:
            applies = holds(case["when"], facts, knobs)
            if applies is not False:
                found.append(case)
            if applies:
                return found, True
        return found, False

    def lookup(self, frontend_version: str, direction: str, row_name: str, knobs: Any, facts: AttentionFacts) -> Verdict:
        if direction not in DIRECTIONS:
            raise ValueError(f"direction: got {direction!r}; accepted are {', '.join(map(repr, DIRECTIONS))}")
        if frontend_version not in self.releases:
            return self._unknown(direction, f"no verdicts for nvidia-cudnn-frontend {frontend_version}")
        if is_backend_plan(row_name):
            return self._backend(direction, facts)
        row = self._rows.get((frontend_version, direction, row_of(row_name)))
        if row is None:
            return self._unknown(direction, f"no verdict on {row_of(row_name)} of nvidia-cudnn-frontend {frontend_version}")
        if not _between(facts.cc, *row.cc):
            return self._unknown(direction, f"{row.row} isn't known on compute capability {facts.cc}")
        named = knobs_by_name(knobs)
        strange = self._strange_knobs(named)
        if strange:
            return self._unknown(direction, f"no verdict on {row.row} with {strange}")
        cases, covered = self.possible_cases(row, named, facts)
        if not covered:
            return self._unknown(direction, f"no case of {row.row} surely covers this attention")
        return self.merged(row, cases)

    def _strange_knobs(self, knobs: Mapping[str, int] | None) -> str:
        known = self.document["knobs"]
        return ", ".join(f"{name}={value}" for name, value in (knobs or {}).items() if name not in known or known[name] and value not in known[name])

    def merged(self, row: Row, cases: Sequence[Mapping[str, Any]]) -> Verdict:
        """What the behaviours of these cases agree on; the rest is unknown."""
        behaviours = [self.document["behaviours"][case["is"]] for case in cases]
        safe = {behaviour["nan_safe"] for behaviour in behaviours}
        ports = {}
        for port in PORTS[row.direction]:
            said = {behaviour["offsets"].get(port, behaviour["offsets"].get("*")) for behaviour in behaviours}
            if said != {None}:  # a paged k or v has no offset to read
                ports[port] = said.pop() if len(said) == 1 else "unknown"
        measured = [behaviour["measured"] for behaviour in behaviours if "measured" in behaviour]
        lines = dict.fromkeys([*row.source, *(line for case in cases for line in case.get("source", ()))])
        return Verdict(
            row.direction,
            ports,
            safe.pop() if len(safe) == 1 else None,
            tuple(dict.fromkeys(port for behaviour in behaviours for port in behaviour.get("exposed", ()))),
            all(behaviour.get("gap_sequences", False) for behaviour in behaviours),
            next((behaviour["excluded"] for behaviour in behaviours if "excluded" in behaviour), None),
            behaviours[0]["basis"] if len(behaviours) == 1 else "read",
            "; ".join([*measured, f"nvidia-cudnn-frontend {row.release}: {', '.join(lines)}"]),
            behaviours[0]["why"] if len(behaviours) == 1 else "it depends on knobs or facts that aren't known here",
        )

    def _backend(self, direction: str, facts: AttentionFacts) -> Verdict:
        backend = self.document["backend"]
        ports = {port: backend["offsets"].get(port, backend["offsets"].get("*", "unknown")) for port in PORTS[direction]}
        for measured in backend["measured"]:
            known_version = facts.cudnn is not None and any(low <= facts.cudnn <= high for low, high in measured["cudnn"])
            if facts.cc == measured["cc"] and direction in measured["directions"] and known_version:
                return Verdict(direction, ports, measured["nan_safe"], basis="measured", source=measured["where"], reason="cuDNN's own engine")
        return Verdict(direction, ports, basis="documented", source=backend["documented"], reason="cuDNN's own engine")

    def backend_serves(self, direction: str, facts: AttentionFacts) -> bool:
        """Whether cuDNN's own engines take these head dims, as far as the table knows."""
        if facts.dim_qk % 8 or facts.dim_v % 8:
            return False
        for rule in self.document.get("backend", {}).get("head_dims", ()):
            if rule["direction"] == direction and _between(facts.cc, *rule["cc"]):
                return max(facts.dim_qk, facts.dim_v) <= rule["upto"] or [facts.dim_qk, facts.dim_v] in rule.get("also", [])
        return False

    @staticmethod
    def _unknown(direction: str, reason: str) -> Verdict:
        return Verdict(direction, dict.fromkeys(PORTS[direction], "unknown"), reason=reason)


def holds(when: Mapping[str, Any], facts: AttentionFacts, knobs: Mapping[str, int] | None) -> bool | None:
    """Whether all conditions hold; None where one is undecided and none fails."""
    return _all(
        [_knobs_hold(wanted, knobs) if name == "knobs" else _CONDITIONS.get(name, _undecided)(facts, wanted) for name, wanted in when.items()]
    )


def _knobs_hold(wanted: Mapping[str, list], knobs: Mapping[str, int] | None) -> bool | None:
    """{knob: accepted values}, null among them where an unset knob is accepted."""
    if knobs is None:
        return None
    return _all([knobs.get(name) in accepted if name in knobs or None in accepted else None for name, accepted in wanted.items()])


def _all(parts: list[bool | None]) -> bool | None:
    return False if False in parts else None if None in parts else True


def _any(parts: list[bool | None]) -> bool | None:
    return True if True in parts else None if None in parts else False


def _between(value: int | None, low: int, high: int) -> bool | None:
    return None if value is None else low <= value <= high


def _undecided(facts: AttentionFacts, wanted: Any) -> None:
    return None


def _of_dims(rule: Callable[[int, int, Any], bool]) -> Callable[[AttentionFacts, Any], bool | None]:
    return lambda facts, wanted: None if facts.dim_qk is None or facts.dim_v is None else rule(facts.dim_qk, facts.dim_v, wanted)


def _one_of(name: str) -> Callable[[AttentionFacts, Any], bool | None]:
    return lambda facts, wanted: None if getattr(facts, name) is None else getattr(facts, name) in wanted


def _equals(name: str) -> Callable[[AttentionFacts, Any], bool | None]:
    return lambda facts, wanted: None if getattr(facts, name) is None else getattr(facts, name) == wanted


def _grouped(facts: AttentionFacts, wanted: bool) -> bool | None:
    return None if facts.heads_q is None or facts.heads_kv is None else (facts.heads_q != facts.heads_kv) == wanted


#: The table's conditions: name -> (facts, what the table says) -> whether it holds.
_CONDITIONS: dict[str, Callable[[AttentionFacts, Any], bool | None]] = {
    "cc": _one_of("cc"),
    "dtype": _one_of("dtype"),
    "max_q": _one_of("max_q"),
    "dims": _of_dims(lambda qk, v, pairs: [qk, v] in pairs),
    "dims_over": _of_dims(lambda qk, v, floor: min(qk, v) > floor),
    "dims_upto": _of_dims(lambda qk, v, limit: max(qk, v) <= limit),
    "dims_multiple": _of_dims(lambda qk, v, multiple: qk % multiple == 0 and v % multiple == 0),
    "dims_equal": _of_dims(lambda qk, v, wanted: (qk == v) == wanted),
    "dqk_ge_dv": _of_dims(lambda qk, v, wanted: (qk >= v) == wanted),
    "grouped": _grouped,
    **{name: _equals(name) for name in ("window", "bottom_right", "deterministic", "sink", "cu_form", "paged", "gate")},
}
