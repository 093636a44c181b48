"""From an attention to a built plan: sizes are bucketed, plans are built once, kept, and bounded in number."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, Callable

import torch

from ..spec import AttentionSpec
from . import Plan
from .buckets import batch_bucket, deterministic_length_bucket, length_bucket, token_bucket
from .graph import GraphPlan, UnsupportedByGraph
from .reference import ReferencePlan

#: What `plan=` accepts besides the name of one engine ("cudnn:NAME").
PLAN_NAMES = ("auto", "reference", "cudnn")
_SIZES = ("batch", "max_q", "max_kv", "tokens_q", "tokens_kv", "tokens_o")
#: A built plan serves a smaller batch too, up to this factor in each size: idle blocks cost less than a build.
_REUSE_FACTOR = 2


@dataclass(eq=False)
class BuiltPlan:
    plan: Plan
    direction: str
    calls: int = 0


class PlanCache:
    """Plans by (spec, direction, pin), least recently used first out.  One lock guards all of it.

    on_eviction: called when a plan is let go, for those who hold plans by other keys.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.builds = {"fwd": 0, "bwd": 0}
        self.on_eviction: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._kept: OrderedDict[tuple, BuiltPlan] = OrderedDict()
        self._refused: OrderedDict[tuple, UnsupportedByGraph] = OrderedDict()

    def get(self, spec: AttentionSpec, direction: str, pinned: str) -> BuiltPlan:
        """The plan for a spec whose sizes are exact; raises UnsupportedByGraph where there is none."""
        with self._lock:
            if spec.device.type != "cuda" or pinned == "reference":
                return self._find_or_build((replace(spec, strides=(), **dict.fromkeys(_SIZES, 0)), "both", "reference"))
            key = (_bucketed(spec, direction), direction, pinned)
            if key not in self._kept and (fitting := self._fitting(*key)) is not None:
                key = fitting
            return self._find_or_build(key)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._refused.clear()
            self._tell_of_eviction()

    def report(self) -> list[dict[str, Any]]:
        with self._lock:
            return [_report_row(built) for built in self._kept.values()]

    def _find_or_build(self, key: tuple) -> BuiltPlan:
        if key in self._refused:
            raise self._refused[key]
        built = self._kept.get(key)
        if built is None:
            try:
                built = self._kept[key] = _build(*key)
            except UnsupportedByGraph as refusal:
                self._refused[key] = refusal
                if len(self._refused) > self.limit:
                    self._refused.popitem(last=False)
                raise
            if built.direction != "both":
                self.builds[built.direction] += 1
            if len(self._kept) > self.limit:
                self._kept.popitem(last=False)
                self._tell_of_eviction()
        self._kept.move_to_end(key)
        return built

    def _tell_of_eviction(self) -> None:
        for forget in self.on_eviction:
            forget()

    def _fitting(self, spec: AttentionSpec, direction: str, pinned: str) -> tuple | None:
        """The key of a kept plan that serves the spec with room to spare.

        With dropout the mask depends on the declared sizes, so forward and backward must agree on them: no reuse.
        """
        if spec.dropout_p or spec.bound:
            return None
        sizes = [getattr(spec, name) for name in _SIZES]
        best = None
        for key in self._kept:
            other, other_direction, other_pinned = key
            if (other_direction, other_pinned) != (direction, pinned):
                continue
            if replace(other, **dict(zip(_SIZES, sizes))) != spec:
                continue
            theirs = [getattr(other, name) for name in _SIZES]
            if direction == "bwd" and other.batch != spec.batch:
                continue  # the forward's metadata is as long as its batch
            if all(size <= their <= _REUSE_FACTOR * size for size, their in zip(sizes, theirs)):
                if best is None or theirs < best[0]:
                    best = (theirs, key)
        return None if best is None else best[1]


def _bucketed(spec: AttentionSpec, direction: str) -> AttentionSpec:
    length = deterministic_length_bucket if spec.deterministic else length_bucket
    return replace(
        spec,
        batch=spec.batch if spec.bound else batch_bucket(spec.batch),
        max_q=length(spec.max_q),
        max_kv=length(spec.max_kv),
        # Only the backward's workspace depends on row counts.
        tokens_q=token_bucket(spec.tokens_q) if direction == "bwd" else 0,
        tokens_kv=token_bucket(spec.tokens_kv) if direction == "bwd" else 0,
        tokens_o=0,
    )


def _build(spec: AttentionSpec, direction: str, pinned: str) -> BuiltPlan:
    if pinned == "reference":
        return BuiltPlan(ReferencePlan(spec), direction)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "no plan has been built for this attention yet, and none can be built while a CUDA graph is captured; run it once before the capture"
        )
    return BuiltPlan(GraphPlan(spec, direction, pinned.partition(":")[2] or None), direction)


def _report_row(built: BuiltPlan) -> dict[str, Any]:
    spec = built.plan.spec
    return {
        "plan": built.plan.name,
        "direction": built.direction,
        "device": str(spec.device),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "heads": f"{spec.heads_q}/{spec.heads_kv}",
        "head_dim": f"{spec.dim_qk}" if spec.dim_qk == spec.dim_v else f"{spec.dim_qk},{spec.dim_v}",
        "batch": spec.batch or "any",
        "max_seqlen": f"{spec.max_q}/{spec.max_kv}" if spec.max_q else "any",
        "calls": built.calls,
    }


plan_cache = PlanCache(limit=int(os.environ.get("TE_THD_BRIDGE_PLANS_KEPT", "64")))
