"""`te-thd-bridge explain`: the plans for one attention, who reads the offsets that are bound, and what the bridge does about it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..layout import PADDING_MODES, PORTS, ThdLayout
from ..plans import ranking
from ..plans.verdicts import DIRECTIONS, AttentionFacts, Decision, LayoutFacts, decide, table
from ..spec import MASKS, AttentionSpec, Band

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PARAMS_CLASS = "megatron.core.packed_seq_params.PackedSeqParams"
_PARAMS_FIELDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv")
_SHOWN_SEQUENCES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help="h200, b200, gb300, rtx-pro-6000, sm90, ...; it needn't be here (default: the GPU at hand)")
    parser.add_argument("--head-dim", required=True, metavar="D[,DV]", help="channels of a head of q and k, and of v where they differ")
    parser.add_argument("--heads", type=int, required=True, metavar="H", help="query heads")
    parser.add_argument("--kv-heads", type=int, metavar="HK", help="key heads (default: as many as query heads)")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16")
    parser.add_argument("--mask", choices=MASKS, default="padding_causal")
    parser.add_argument(
        "--window", metavar="LEFT,RIGHT", default="-1,-1", help="keys besides the diagonal's that a row sees; -1 is unbounded (default)"
    )
    parser.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="both")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a batch, where no --packed-seq-params tell (default 8)")
    parser.add_argument("--max-seqlen", type=int, default=4096, help="longest sequence, where no --packed-seq-params tell (default 4096)")
    parser.add_argument("--padding", choices=PADDING_MODES, default="any", help="what is known of rows between sequences (default any)")
    parser.add_argument("--packed-seq-params", type=Path, metavar="FILE", help="a PackedSeqParams as JSON or saved by torch: shows what it binds")
    parser.add_argument("--frost", action="store_true", help=f"as with {ranking.FROST_FLAG}=1")
    parser.add_argument("--frontend", metavar="VERSION", help="a release of nvidia-cudnn-frontend (default: the installed one)")
    parser.add_argument("--json", action="store_true", help="print a list of plans for a program")


@dataclass(frozen=True)
class Explained:
    plan: ranking.RankedPlan
    decision: Decision

    def served_by(self) -> str:
        """Without its proof on the device a plan doesn't run."""
        return "excluded" if self.decision.served_by == "needs_canary" else self.decision.served_by

    def as_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan.name,
            "direction": self.plan.direction,
            "default_on": self.plan.default_on,
            "offsets": dict(self.plan.verdict.ports),
            "served_by": self.served_by(),
            "reason": f"{self.reason()} [{self.plan.verdict.source or 'no source'}]",
        }

    def reason(self) -> str:
        return f"{self.decision.reason}. {self.plan.note}" if self.plan.note else self.decision.reason


def run(arguments: argparse.Namespace) -> int:
    gpu = ranking.gpu_named(arguments.gpu) if arguments.gpu else ranking.gpu_at_hand()
    if gpu is None:
        raise ValueError(f"--gpu: not given, and no GPU is here; accepted are {', '.join(ranking.GPUS)}")
    layout = None if arguments.packed_seq_params is None else _layout_in(arguments.packed_seq_params, arguments.padding)
    spec = _spec(arguments, layout)
    frost = arguments.frost or ranking.flag_is_set()
    explained, notes = [], []
    for direction in DIRECTIONS if arguments.direction == "both" else (arguments.direction,):
        found = _ranking(arguments.frontend, spec, direction, gpu, frost)
        facts = LayoutFacts(True, True, True) if layout is None else LayoutFacts.of(layout, PORTS)
        explained += [Explained(plan, decide(plan.verdict, facts, arguments.padding)) for plan in found.plans]
        notes += [f"{direction}: {note}" for note in found.notes]
        if not found.plans:
            notes.append(f"{direction}: no engine computes this attention on {gpu.name}")
    if arguments.json:
        print(json.dumps([entry.as_json() for entry in explained], indent=1))
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        return 0
    if layout is not None:
        _show_layout(layout)
    release = arguments.frontend or ranking.installed_frontend() or table().releases[-1]
    print(
        f"{gpu.name} (compute capability {gpu.cc // 10}.{gpu.cc % 10}), nvidia-cudnn-frontend {release}{', FROST engines on' if frost else ''}, {_told(spec)}\n"
    )
    _show(explained)
    print("".join(f"\nnote: {note}" for note in notes))
    return 0


def _ranking(release: str | None, spec: AttentionSpec, direction: str, gpu: ranking.Gpu, frost: bool) -> ranking.Ranking:
    if release is None or release == ranking.installed_frontend():
        return ranking.rank(spec, direction, gpu, frost=frost)
    return ranking.rank_from_table(release, direction, AttentionFacts.of(spec, gpu.cc), frost=frost)


def _spec(arguments: argparse.Namespace, layout: ThdLayout | None) -> AttentionSpec:
    dim_qk, dim_v = _ints("--head-dim", arguments.head_dim, "D or D,DV", 1, 2) * (1 if "," in arguments.head_dim else 2)
    left, right = _ints("--window", arguments.window, "LEFT,RIGHT", -1, 2, exactly=True)
    heads = arguments.heads
    heads_kv = heads if arguments.kv_heads is None else arguments.kv_heads
    for name, value in (("--heads", heads), ("--kv-heads", heads_kv), ("--batch", arguments.batch), ("--max-seqlen", arguments.max_seqlen)):
        if value < 1:
            raise ValueError(f"{name}: got {value}; accepted is an int of at least 1")
    if heads % heads_kv:
        raise ValueError(f"--kv-heads: got {heads_kv}, which does not divide the {heads} of --heads; accepted are its divisors")
    mask_right, bottom_right = MASKS[arguments.mask]
    batch, max_q, max_kv = (
        (arguments.batch, *[arguments.max_seqlen] * 2) if layout is None else (layout.batch, layout.max_seqlen_q, layout.max_seqlen_kv)
    )
    batch, max_q, max_kv = max(batch, 1), max(max_q, 1), max(max_kv, 1)
    widths = {"q": (heads, dim_qk), "k": (heads_kv, dim_qk), "v": (heads_kv, dim_v), "o": (heads, dim_v)}
    widths |= {"do": widths["o"], "dq": widths["q"], "dk": widths["k"], "dv": widths["v"]}
    return AttentionSpec(
        device=torch.device("cuda", 0),
        dtype=_DTYPES[arguments.dtype],
        heads_q=heads,
        heads_kv=heads_kv,
        dim_qk=dim_qk,
        dim_v=dim_v,
        batch=batch,
        max_q=max_q,
        max_kv=max_kv,
        tokens_q=batch * max_q,
        tokens_kv=batch * max_kv,
        tokens_o=batch * max_q,
        band=Band(left, right if mask_right < 0 else mask_right, bottom_right),
        scale=dim_qk**-0.5,
        sink=False,
        dropout_p=0.0,
        deterministic=False,
        needs_lse=True,
        max_logit=False,
        strides=tuple(sorted((port, (h * d, d)) for port, (h, d) in widths.items())),
    )


def _ints(name: str, text: str, form: str, least: int, most_parts: int, *, exactly: bool = False) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or len(values) > most_parts or (exactly and len(values) != most_parts) or min(values) < least:
        raise ValueError(f"{name}: got {text!r}; accepted is {form}, ints of at least {least}")
    return values


def _told(spec: AttentionSpec) -> str:
    dims = f"{spec.dim_qk}" if spec.dim_qk == spec.dim_v else f"{spec.dim_qk},{spec.dim_v}"
    return f"heads {spec.heads_q}/{spec.heads_kv}, head dim {dims}, {str(spec.dtype).removeprefix('torch.')}"


def _show(explained: list[Explained]) -> None:
    rows = [("plan", "direction", "on", "offsets", "served by", "reason")]
    for entry in explained:
        on = "default" if entry.plan.default_on else "opt-in"
        rows.append((entry.plan.name, entry.plan.direction, on, _offsets(entry.plan.verdict.ports), entry.served_by(), entry.reason()))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def _offsets(ports: dict[str, str]) -> str:
    """ "all derives", or "honors: q o stats, unknown: k v"."""
    said: dict[str, list[str]] = {}
    for port, offset in ports.items():
        said.setdefault(offset, []).append(port)
    return f"all {next(iter(said))}" if len(said) == 1 else ", ".join(f"{offset}: {' '.join(names)}" for offset, names in said.items())


def _layout_in(path: Path, padding: str) -> ThdLayout:
    """The layout of a saved PackedSeqParams; raises ValueError, naming the file and what is accepted."""
    content = path.read_bytes()
    try:
        params = _params_from_json(content) if content.lstrip()[:1] == b"{" else _params_from_torch(path)
        return ThdLayout.from_packed_seq_params(params, padding=padding)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"--packed-seq-params: {path}: {error}") from error


def _params_from_json(content: bytes) -> SimpleNamespace:
    try:
        values = json.loads(content)
    except ValueError as error:
        raise ValueError(f"it is no JSON ({error}); accepted is an object of PackedSeqParams' fields") from error
    return SimpleNamespace(**{name: torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value for name, value in values.items()})


class _SavedParams:
    """Stands for PackedSeqParams, whose package needn't be installed, while a file is read."""


def _params_from_torch(path: Path) -> SimpleNamespace:
    try:
        with torch.serialization.safe_globals([(_SavedParams, _PARAMS_CLASS)]):
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle can fail in any way
        raise ValueError(
            "it is neither JSON nor saved by torch; accepted are JSON, a PackedSeqParams or a dict of its fields saved by torch"
        ) from error
    fields = saved if isinstance(saved, dict) else vars(saved)
    return SimpleNamespace(**{name: fields.get(name) for name in _PARAMS_FIELDS}, qkv_format=fields.get("qkv_format"))


def _show_layout(layout: ThdLayout) -> None:
    print(f"{layout.batch} sequences, max_seqlen_q {layout.max_seqlen_q}, max_seqlen_kv {layout.max_seqlen_kv}")
    for side, prefix, port in (("q", layout.cu_seqlens_q, "q"), ("kv", layout.cu_seqlens_kv, "k")):
        lengths = prefix.diff().tolist()
        starts = (layout.offsets[port].values * layout.offsets[port].multiplier).tolist()
        gaps = [start - before - length for before, length, start in zip(starts, lengths, starts[1:])]
        print(f"  {side + ':':<4} lengths {_some(lengths)}, first rows {_some(starts)}, rows behind each {_some(gaps)}")
    shared: dict[int, list[str]] = {}
    for port in PORTS:
        shared.setdefault(id(layout.offsets[port].values), []).append(port)
    print(f"  starts shared by: {'; '.join(' '.join(ports) for ports in shared.values())}\n")


def _some(values: list[int]) -> str:
    more = f", ... {len(values) - _SHOWN_SEQUENCES} more" if len(values) > _SHOWN_SEQUENCES else ""
    return f"[{', '.join(map(str, values[:_SHOWN_SEQUENCES]))}{more}]"
