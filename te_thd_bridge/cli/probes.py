"""Canaries of the attention backends that are installed: padded THD with finite and with NaN padding, forward and backward.

A probe is a function of one batch that returns out [T, H_q, D_v]; gradients come from torch.autograd.  What it computes is
compared, at real rows, with a dense fp64 softmax over each sequence alone.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ThdLayout, thd_attention
from ..plans.verdicts import AttentionFacts, table

#: Lengths and the rows behind each; an empty sequence with a slot, a length past a tile's edge, a slot of one row.
LENGTHS, GAPS = (70, 0, 130, 1, 64), (26, 16, 14, 0, 33)
HEADS, HEADS_KV = 4, 2
PADDINGS = {"finite": 3.0, "NaN": float("nan")}
#: bf16 attention lands within 1 % of fp64; a wrong row is off by its whole size.
TOLERANCE = 3e-2


@dataclass(frozen=True)
class Batch:
    """Self-attention, causal within sequences, between whose rows lies ``filler``.  q [T, H_q, D], k, v [T, H_kv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor

    @classmethod
    def drawn(cls, dim: int, filler: float, device: torch.device) -> Batch:
        starts, rows = _starts()
        padding = torch.ones(rows, dtype=torch.bool)
        for start, length in zip(starts, LENGTHS):
            padding[start : start + length] = False
        tensors = []
        for seed, heads in enumerate((HEADS, HEADS_KV, HEADS_KV, HEADS)):
            tensor = torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
            tensor[padding] = filler
            tensors.append(tensor.to(device))
        lengths = torch.tensor([0, *LENGTHS]).cumsum(0)
        prefixes = (lengths, torch.tensor([*starts, starts[-1] + LENGTHS[-1] + GAPS[-1]]))
        return cls(*tensors, *(prefix.to(device, torch.int32) for prefix in prefixes))

    @property
    def lengths(self) -> Tensor:
        return self.cu_seqlens.diff()


def _starts() -> tuple[list[int], int]:
    slots = [length + gap for length, gap in zip(LENGTHS, GAPS)]
    return [sum(slots[:i]) for i in range(len(slots))], sum(slots)


@dataclass(frozen=True)
class Probe:
    """name: what is probed.  ours: the bridge promises a pass, with NaN in padding too.  package: the distribution it needs."""

    name: str
    run: Callable[[Batch], Tensor]
    package: str | None = None
    dim: int = 128
    ours: bool = False
    forward_only: bool = False


@dataclass(frozen=True)
class Outcome:
    """verdict: "pass" | "FAIL" | "skipped"."""

    probe: Probe
    padding: str
    verdict: str
    detail: str

    @property
    def alarming(self) -> bool:
        """NaN in padding is more than backends besides the bridge promise to bear."""
        return self.verdict == "FAIL" and (self.probe.ours or self.padding == "finite")


def probes(frontend_release: str | None, cc: int | None) -> list[Probe]:
    """All that are known, those of the frontend's engines for this GPU among them."""
    ours = [Probe("te_thd_bridge, plan auto", _bridge("auto"), ours=True), Probe("te_thd_bridge, cuDNN graph", _bridge("cudnn"), ours=True)]
    for row in table().rows(frontend_release, "fwd"):
        for dim in (128, 512):
            facts = AttentionFacts(cc=cc, dtype="bf16", dim_qk=dim, dim_v=dim, heads_q=HEADS, heads_kv=HEADS_KV, sink=False)
            if cc is not None and row.admits(facts):
                ours.append(Probe(f"te_thd_bridge, {row.row}, d = {dim}", _bridge(f"cudnn:{row.row}"), dim=dim, ours=True, forward_only=True))
    return [
        *ours,
        Probe("TransformerEngine DotProductAttention", _transformer_engine, "transformer-engine"),
        Probe("flash-attn-4", _flash_attention_4, "flash-attn-4"),
        Probe("cudnn.flex_attention", _flex_attention, "nvidia-cudnn-frontend"),
    ]


def run_probes(chosen: list[Probe], device: torch.device | None) -> list[Outcome]:
    """Every probe with every padding; nothing is launched without a device."""
    return [_outcome(probe, padding, device) for probe in chosen for padding in PADDINGS]


def _outcome(probe: Probe, padding: str, device: torch.device | None) -> Outcome:
    if probe.package is not None and not _installed(probe.package):
        return Outcome(probe, padding, "skipped", f"{probe.package} is not installed")
    if device is None:
        return Outcome(probe, padding, "skipped", "no GPU here, or canaries are off")
    batch = Batch.drawn(probe.dim, PADDINGS[padding], device)
    leaves = [tensor.requires_grad_() for tensor in (batch.q, batch.k, batch.v)]
    try:
        with torch.set_grad_enabled(not probe.forward_only):
            out = probe.run(batch)
            computed = {"out": out}
            if not probe.forward_only:
                computed |= zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, batch.do.reshape(out.shape)))
    except (ValueError, NotImplementedError) as refusal:
        return Outcome(probe, padding, "skipped", _first_line(refusal))
    except Exception as error:  # a backend that breaks in its own way must not end the report
        return Outcome(probe, padding, "FAIL", _first_line(error))
    errors = compare(computed, batch)
    worst = max(errors.values(), key=lambda error: math.inf if math.isnan(error) else error)
    told = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return Outcome(probe, padding, "pass" if worst < TOLERANCE else "FAIL", told)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]


def compare(computed: dict[str, Tensor], batch: Batch) -> dict[str, float]:
    """Relative errors at real rows; NaN where a real row holds one."""
    wanted = reference(batch)
    starts, _ = _starts()
    real = [row for start, length in zip(starts, LENGTHS) for row in range(start, start + length)]
    errors = {}
    for name, got in computed.items():
        difference = got.detach().reshape(wanted[name].shape)[real].double() - wanted[name][real]
        errors[name] = float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(wanted[name][real]))
    return errors


def reference(batch: Batch) -> dict[str, Tensor]:
    """out, dq, dk, dv in fp64; 0 outside real rows."""
    tensors = [tensor.detach().double().nan_to_num(0.0).requires_grad_() for tensor in (batch.q, batch.k, batch.v)]
    group, pieces = HEADS // HEADS_KV, []
    for start, length, gap in zip(_starts()[0], LENGTHS, GAPS):
        q, k, v = (tensor[start : start + length] for tensor in tensors)
        logits = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) / math.sqrt(q.shape[2])
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        pieces.append(torch.einsum("hij,jhd->ihd", logits.masked_fill(future, -math.inf).softmax(-1), v.repeat_interleave(group, 1)))
        pieces.append(q.new_zeros(gap, *q.shape[1:]))
    out = torch.cat(pieces)
    gradients = torch.autograd.grad(out, tensors, batch.do.double().nan_to_num(0.0))
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients))}


def _bridge(plan: str) -> Callable[[Batch], Tensor]:
    def run(batch: Batch) -> Tensor:
        layout = ThdLayout.from_cu_seqlens(batch.cu_seqlens, cu_seqlens_q_padded=batch.cu_seqlens_padded, max_seqlen_q=max(LENGTHS))
        return thd_attention(batch.q, batch.k, batch.v, layout, plan=plan)

    return run


def _transformer_engine(batch: Batch) -> Tensor:
    import transformer_engine.pytorch as te

    attention = te.DotProductAttention(HEADS, batch.q.shape[2], num_gqa_groups=HEADS_KV, qkv_format="thd", attn_mask_type="padding_causal")
    prefixes = {f"cu_seqlens_{side}": batch.cu_seqlens for side in ("q", "kv")} | {
        f"cu_seqlens_{side}_padded": batch.cu_seqlens_padded for side in ("q", "kv")
    }
    return attention(batch.q, batch.k, batch.v, **prefixes, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS), pad_between_seqs=True)


def _flash_attention_4(batch: Batch) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    padded = {"cu_seqlens_q": batch.cu_seqlens_padded, "cu_seqlens_k": batch.cu_seqlens_padded}
    longest = {"max_seqlen_q": max(LENGTHS), "max_seqlen_k": max(LENGTHS)}
    out = flash_attn_varlen_func(batch.q, batch.k, batch.v, **padded, **longest, seqused_q=batch.lengths, seqused_k=batch.lengths, causal=True)
    return out[0] if isinstance(out, tuple) else out


def _flex_attention(batch: Batch) -> Tensor:
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    visible = torch.zeros(1, 1, batch.q.shape[0], dtype=torch.int32, device=batch.q.device)
    for start, length in zip(_starts()[0], LENGTHS):
        visible[0, 0, start : start + length] = torch.arange(1, length + 1, dtype=torch.int32, device=batch.q.device)
    padded = {"cu_seqlens_q": batch.cu_seqlens_padded, "cu_seqlens_k": batch.cu_seqlens_padded}
    slot = max(length + gap for length, gap in zip(LENGTHS, GAPS))
    plan = create_mask_plan(visible, batch.q, batch.k, batch.v, **padded, max_seqlen_q=slot, max_seqlen_k=slot)
    return flex_attn_func(batch.q, batch.k, batch.v, mask_plan=plan)


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
