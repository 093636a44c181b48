"""Opt-in checks of device values, for finding the batch that a producer got wrong."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Iterator

from .layout import PORTS, QUERY_PORTS, ThdLayout
from .spec import AttentionSpec

_enabled: ContextVar[bool] = ContextVar("te_thd_bridge_debug_checks", default=False)


@contextmanager
def debug_checks() -> Iterator[None]:
    """Within it every thd_attention call reads its layout's values, at the cost of a synchronisation.

    Raises ValueError, naming the tensor, the sequence and the values, where a prefix decreases, a length exceeds
    max_seqlen, a sequence reaches outside its tensor's rows or into another sequence, or an offset isn't a whole row.
    """
    token = _enabled.set(True)
    try:
        yield
    finally:
        _enabled.reset(token)


def enabled() -> bool:
    return _enabled.get()


def check_values(layout: ThdLayout, spec: AttentionSpec, rows: dict[str, int]) -> None:
    """Raise ValueError for what `debug_checks` lists; ``rows`` maps ports to the row counts of their tensors."""
    lengths = {}
    for side, prefix, longest in (
        ("q", layout.cu_seqlens_q.tolist(), layout.max_seqlen_q),
        ("kv", layout.cu_seqlens_kv.tolist(), layout.max_seqlen_kv),
    ):
        lengths[side] = [b - a for a, b in zip(prefix, prefix[1:])]
        for i, length in enumerate(lengths[side]):
            if length < 0:
                raise ValueError(f"cu_seqlens_{side}: entry {i + 1} is {prefix[i + 1]} after {prefix[i]}; accepted are entries that never decrease")
            if length > longest:
                raise ValueError(f"cu_seqlens_{side}: sequence {i} has {length} tokens; max_seqlen_{side} promises at most {longest}")
    for port in PORTS:
        if port in rows:
            _check_port(layout, spec, port, rows[port], lengths["q" if port in QUERY_PORTS else "kv"])


def _check_port(layout: ThdLayout, spec: AttentionSpec, port: str, rows: int, lengths: list[int]) -> None:
    offset, taken = layout.offsets[port], []
    n, d = spec.offset_fraction(offset, port)
    for i, (value, length) in enumerate(zip(offset.values.tolist(), lengths)):
        if value * n % d:
            raise ValueError(
                f"offsets[{port!r}]: sequence {i} starts {value * offset.multiplier} {offset.unit}s in, inside a row; accepted are whole rows"
            )
        start = value * n // d
        if length and (start < 0 or start + length > rows):
            raise ValueError(f"offsets[{port!r}]: sequence {i} takes rows {start} to {start + length - 1}; the tensor has {rows} rows")
        if length:
            taken.append((start, start + length, i))
    taken.sort()
    for (_, end, i), (start, _, j) in zip(taken, taken[1:]):
        if start < end:
            raise ValueError(f"offsets[{port!r}]: sequence {i} ends at row {end} and sequence {j} starts at row {start}; accepted are lengths that fit their slots")
