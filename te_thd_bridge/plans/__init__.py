"""Ways to compute an AttentionSpec.  A plan has a name and computes into tensors that the caller allocated.

Contract of every plan, forward and backward: real rows as the mathematics says in the stated dtype's accuracy,
padding rows of out, dq, dk, dv exactly 0 and of lse -inf, whatever the inputs' padding rows hold.  A plan never
allocates an output and never changes an input (rows that ``ThdLayout(padding="scrub")`` gives it excepted).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..layout import ThdLayout
from ..spec import AttentionSpec


@dataclass(slots=True)
class ForwardTensors:
    """T rows, H heads, D channels.

    q [T_q, H_q, D_qk], k [T_kv, H_kv, D_qk], v [T_kv, H_kv, D_v]; out [T_o, H_q, D_v] is written.
    lse:       [T_stats, H_q] fp32, natural log; written where it is not None.
    max_logit: [H_q] fp32, largest scaled logit of a real row over the keys it sees; written where it is not None.
    softmax_offset: [H_q] fp32 or None.  rng_state: [2] int64 (seed, offset) on the device, or None without dropout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None = None
    max_logit: Tensor | None = None
    softmax_offset: Tensor | None = None
    rng_state: Tensor | None = None


@dataclass(slots=True)
class BackwardTensors:
    """As in the forward; do has out's shape; dq, dk, dv (shaped as q, k, v) and d_softmax_offset [H_q] fp32 are written."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    do: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    softmax_offset: Tensor | None = None
    d_softmax_offset: Tensor | None = None
    rng_state: Tensor | None = None


class Plan(Protocol):
    name: str

    def __init__(self, spec: AttentionSpec) -> None: ...

    def forward(self, tensors: ForwardTensors, layout: ThdLayout) -> None: ...

    def backward(self, tensors: BackwardTensors, layout: ThdLayout) -> None: ...
