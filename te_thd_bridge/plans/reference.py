"""Attention in plain torch, sequence by sequence: the plan of every device without a GPU.

It computes in fp64 for fp64 tensors and in fp32 for all others.  It reads lengths and offsets on the host, so on a GPU it
synchronises; there it runs only where it is asked for by name.  The backward computes the weights anew from lse, which
like out may come from another plan.

Rows that see no key are left out of every product: 0 in out and dq, -inf in lse, and nothing that q or do hold there
reaches a gradient.  A non-finite value in any other real row spreads as in ordinary attention, where a key that a row
does not see still takes part with a weight of 0.

Legend: n rows and m keys of one sequence, K key heads, G query heads for each of them, D channels.
"""

from __future__ import annotations

from typing import Iterator, NamedTuple

import torch
from torch import Tensor

from ..layout import PORTS, QUERY_PORTS, ThdLayout
from ..spec import AttentionSpec, Band
from . import BackwardTensors, ForwardTensors

#: Query rows taken at a time: the logits of a block stay in a CPU's cache and are bounded for long sequences.
_ROWS_AT_ONCE = 128
_NO_KEY = float("-inf")


class _Sequence(NamedTuple):
    """One sequence with rows and keys: its place in the batch, lengths, and first row in each port's tensor."""

    index: int
    n: int
    m: int
    start: dict[str, int]

    def rows(self, port: str, first: int = 0, end: int | None = None) -> slice:
        length = self.n if port in QUERY_PORTS else self.m
        return slice(self.start[port] + first, self.start[port] + (length if end is None else end))


class ReferencePlan:
    name = "reference"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._accumulate = torch.float64 if spec.dtype == torch.float64 else torch.float32

    def forward(self, tensors: ForwardTensors, layout: ThdLayout) -> None:
        bound = ("q", "k", "v", "o")
        if tensors.lse is not None:
            bound += ("stats",)
            tensors.lse.fill_(_NO_KEY)
        tensors.out.zero_()
        if tensors.max_logit is not None:
            tensors.max_logit.fill_(_NO_KEY)
        for sequence in _sequences(self.spec, layout, bound):
            keys, values = (x[sequence.rows(port)].to(self._accumulate) for port, x in (("k", tensors.k), ("v", tensors.v)))
            for first, end in _blocks(self.spec.band, sequence):
                logits = self._logits(self._grouped(tensors.q[sequence.rows("q", first, end)]), keys, sequence, first, end)
                lse = torch.logsumexp(logits, -1)  # [K, G, n]
                if tensors.max_logit is not None:
                    largest = logits.amax((2, 3)).flatten()
                    torch.maximum(tensors.max_logit, largest.to(tensors.max_logit.dtype), out=tensors.max_logit)
                if tensors.softmax_offset is not None:
                    lse = torch.logaddexp(lse, self._by_head(tensors.softmax_offset)[:, :, None])
                weights = torch.exp(logits - lse[..., None])
                if tensors.rng_state is not None:
                    weights = weights * self._kept(tensors.rng_state, sequence, first, end)
                out = torch.einsum("kgnm,mkd->nkgd", weights, values).flatten(1, 2)
                tensors.out[sequence.rows("o", first, end)] = out.to(tensors.out.dtype)
                if tensors.lse is not None:
                    tensors.lse[sequence.rows("stats", first, end)] = lse.flatten(0, 1).T.to(tensors.lse.dtype)

    def backward(self, tensors: BackwardTensors, layout: ThdLayout) -> None:
        t = tensors
        for gradient in (t.dq, t.dk, t.dv, t.d_softmax_offset):
            if gradient is not None:
                gradient.zero_()
        for sequence in _sequences(self.spec, layout, PORTS):
            keys, values = (x[sequence.rows(port)].to(self._accumulate) for port, x in (("k", t.k), ("v", t.v)))
            d_keys, d_values = torch.zeros_like(keys), torch.zeros_like(values)
            for first, end in _blocks(self.spec.band, sequence):
                query = self._grouped(t.q[sequence.rows("q", first, end)])  # [n, K, G, D]
                d_out = self._grouped(t.do[sequence.rows("do", first, end)])
                out = self._grouped(t.out[sequence.rows("o", first, end)])
                lse = self._grouped(t.lse[sequence.rows("stats", first, end)]).permute(1, 2, 0)  # [K, G, n]
                weights = torch.exp(self._logits(query, keys, sequence, first, end) - lse[..., None])  # [K, G, n, m]
                kept = 1.0 if t.rng_state is None else self._kept(t.rng_state, sequence, first, end)
                d_values += torch.einsum("kgnm,nkgd->mkd", weights * kept, d_out)
                normaliser_gradient = torch.einsum("nkgd,nkgd->kgn", d_out, out)
                d_logits = weights * (torch.einsum("nkgd,mkd->kgnm", d_out, values) * kept - normaliser_gradient[..., None])
                d_query = self.spec.scale * torch.einsum("kgnm,mkd->nkgd", d_logits, keys)
                t.dq[sequence.rows("dq", first, end)] = d_query.flatten(1, 2).to(t.dq.dtype)
                d_keys += self.spec.scale * torch.einsum("kgnm,nkgd->mkd", d_logits, query)
                if t.d_softmax_offset is not None:
                    sink_weights = torch.exp(self._by_head(t.softmax_offset)[:, :, None] - lse)
                    t.d_softmax_offset -= (sink_weights * normaliser_gradient).sum(-1).flatten().to(t.d_softmax_offset.dtype)
            t.dk[sequence.rows("dk")] = d_keys.to(t.dk.dtype)
            t.dv[sequence.rows("dv")] = d_values.to(t.dv.dtype)

    def _grouped(self, rows: Tensor) -> Tensor:
        """[n, H, ...] -> [n, K, G, ...]: the query heads that share a key head are neighbours."""
        return rows.to(self._accumulate).unflatten(1, (self.spec.heads_kv, -1))

    def _by_head(self, softmax_offset: Tensor) -> Tensor:
        return softmax_offset.to(self._accumulate).unflatten(0, (self.spec.heads_kv, -1))

    def _logits(self, query: Tensor, keys: Tensor, sequence: _Sequence, first: int, end: int) -> Tensor:
        """Scaled logits [K, G, n, m], -inf where a key isn't seen."""
        hidden = ~_visible(self.spec.band, sequence, first, end, keys.device)
        return (torch.einsum("nkgd,mkd->kgnm", query, keys) * self.spec.scale).masked_fill(hidden, _NO_KEY)

    def _kept(self, rng_state: Tensor, sequence: _Sequence, first: int, end: int) -> Tensor:
        """[K, G, n, m] of 0 and 1 / (1 - dropout_p), the same for the same seed, sequence and rows."""
        seed, offset = rng_state.tolist()
        generator = torch.Generator(rng_state.device).manual_seed(hash((seed, offset, sequence.index, first)) & (2**63 - 1))
        shape = (self.spec.heads_kv, self.spec.heads_q // self.spec.heads_kv, end - first, sequence.m)
        drawn = torch.rand(shape, generator=generator, dtype=torch.float32, device=rng_state.device)
        return (drawn >= self.spec.dropout_p).to(self._accumulate) / (1.0 - self.spec.dropout_p)


def _blocks(band: Band, sequence: _Sequence) -> Iterator[tuple[int, int]]:
    """Ranges of the rows that see a key; both bounds of the band rise with the row, so they lie in one piece."""
    shift = _shift(band, sequence)
    live_first = 0 if band.right < 0 else max(0, -band.right - shift)
    live_end = sequence.n if band.left < 0 else min(sequence.n, sequence.m + band.left - shift)
    for first in range(live_first, live_end, _ROWS_AT_ONCE):
        yield first, min(live_end, first + _ROWS_AT_ONCE)


def _shift(band: Band, sequence: _Sequence) -> int:
    return sequence.m - sequence.n if band.bottom_right else 0


def _visible(band: Band, sequence: _Sequence, first: int, end: int, device: torch.device) -> Tensor:
    rows, keys = torch.arange(first, end, device=device), torch.arange(sequence.m, device=device)
    distance = keys[None, :] - rows[:, None] - _shift(band, sequence)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if band.left >= 0:
        visible &= distance >= -band.left
    if band.right >= 0:
        visible &= distance <= band.right
    return visible


def _sequences(spec: AttentionSpec, layout: ThdLayout, bound: tuple[str, ...]) -> Iterator[_Sequence]:
    prefix_q, prefix_kv = layout.cu_seqlens_q.tolist(), layout.cu_seqlens_kv.tolist()
    starts = {}
    for port in bound:
        offset = layout.offsets[port]
        numerator, denominator = spec.offset_fraction(offset, port)
        starts[port] = [value * numerator // denominator for value in offset.values.tolist()]
    for i in range(layout.batch):
        n, m = prefix_q[i + 1] - prefix_q[i], prefix_kv[i + 1] - prefix_kv[i]
        if n > 0 and m > 0:
            yield _Sequence(i, n, m, {port: start[i] for port, start in starts.items()})
