"""The frozen description of one attention: the plan cache's key, and all that a plan builder may look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .layout import RaggedOffset

#: A mask's right bound and diagonal, by the name callers use.  TransformerEngine's "no_mask" and "causal" mean their
#: padding forms in THD.
MASKS = {
    "padding": (-1, False),
    "padding_causal": (0, False),
    "padding_causal_bottom_right": (0, True),
    "no_mask": (-1, False),
    "causal": (0, False),
    "causal_bottom_right": (0, True),
}


@dataclass(frozen=True)
class Band:
    """Which keys a query row sees: key j of a sequence, for row i, iff -left <= j - (i + shift) <= right.

    left, right: tokens, inclusive; -1 is unbounded.  shift is 0, or with ``bottom_right`` len_kv - len_q, which puts
    the diagonal through the last row and the last key.  Same terms as cuDNN's diagonal band (whose left bound is
    exclusive, left + 1) and TransformerEngine's window_size.
    """

    left: int = -1
    right: int = -1
    bottom_right: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """One attention, as far as a plan can depend on it.  Sizes that vary from step to step are buckets.

    device:  the device of all tensors.
    dtype:   dtype of q, k, v, o and their gradients.
    batch, max_q, max_kv, tokens_q, tokens_kv, tokens_o: upper bounds of B, the lengths and the row counts.
    strides: {port: (row stride, head stride)} in elements as a sorted tuple of pairs; channels have stride 1.
    bound:   {port: multiplier} as a sorted tuple of pairs where the caller's int32 prefixes are bound as they are, with
             cu_seqlens as cu_seq_len; empty where offsets and lengths are converted.
    offset_strides: {port: row stride in bytes} as a sorted tuple of pairs, for ports whose offsets count elements or
             bytes: of the caller's tensor, for a gradient that follows its tensor of that tensor.  It can differ from
             ``strides``, which are those of the memory that is read or written.
    sink:    a softmax_offset takes part.  max_logit: the forward also reports each row's largest logit.
    """

    device: torch.device
    dtype: torch.dtype
    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_v: int
    batch: int
    max_q: int
    max_kv: int
    tokens_q: int
    tokens_kv: int
    tokens_o: int
    band: Band
    scale: float
    sink: bool
    dropout_p: float
    deterministic: bool
    needs_lse: bool
    max_logit: bool
    strides: tuple[tuple[str, tuple[int, int]], ...]
    bound: tuple[tuple[str, int], ...] = ()
    offset_strides: tuple[tuple[str, int], ...] = ()

    def stride(self, port: str) -> tuple[int, int]:
        """(row stride, head stride) of a port, in elements."""
        for name, pair in self.strides:
            if name == port:
                return pair
        raise KeyError(port)

    def itemsize(self, port: str) -> int:
        """Bytes of one element of a port's tensor; stats are fp32, fp64 for fp64 inputs."""
        return max(4, self.dtype.itemsize) if port == "stats" else self.dtype.itemsize

    def offset_fraction(self, offset: "RaggedOffset", port: str) -> tuple[int, int]:
        """``(n, d)``: sequence i of a port starts at row values[i] * n // d."""
        return offset.tokens_as_fraction(dict(self.offset_strides).get(port, 0), self.itemsize(port), port)
