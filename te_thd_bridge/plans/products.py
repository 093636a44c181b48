"""What plans derive from a layout's device values, made once per layout and shared by every call on it.

A plan asks for the geometry of its ports (`widen_request`); the layout keeps the answer (`widened`) as long as its
tensors hold the same values and the same stream reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import metadata
from ..layout import QUERY_PORTS, ThdLayout
from ..spec import Band


@dataclass(frozen=True)
class PortGeometry:
    """One tensor of the attention as far as its ragged offset is concerned.

    row_stride: elements, of the memory that an engine reads or writes.  fraction: (n, d) such that sequence i starts at
    row values[i] * n // d.
    """

    port: str
    rows: int
    row_stride: int
    fraction: tuple[int, int]


@dataclass(frozen=True, eq=False)
class WidenRequest:
    """Compared by identity: requests are interned, so that looking a product up hashes one pointer."""

    ports: tuple[PortGeometry, ...]
    band: Band
    capacity: int


_requests: dict[tuple, WidenRequest] = {}
_REQUESTS_KEPT = 4096


def widen_request(ports: tuple[PortGeometry, ...], band: Band, capacity: int) -> WidenRequest:
    key = (ports, band, capacity)
    request = _requests.get(key)
    if request is None:
        if len(_requests) >= _REQUESTS_KEPT:
            _requests.clear()
        request = _requests[key] = WidenRequest(ports, band, capacity)
    return request


@dataclass(slots=True)
class Widened:
    """A layout's widened metadata for one request.

    group:   port -> index into the metadata's groups.
    lengths: live lengths of q and kv, int32 [capacity] each.
    ragged:  port -> int64 [capacity+1], element offset of each sequence's first live row.
    """

    metadata: metadata.Metadata
    lengths: tuple[Tensor, Tensor]
    group: dict[str, int]
    ragged: dict[str, Tensor]
    versions: int
    _told: Tensor | None = None
    _gap_rows: list[int] = field(default_factory=list)

    def may_have_gaps(self, port: str) -> bool:
        """False once the device has told that every row of this port's tensor is live; never waits for it."""
        if not self._gap_rows:
            if self._told is None:
                return True
            told = self._told.tolist()
            if min(told) < 0:
                return True
            self._gap_rows = told
        return self._gap_rows[self.group[port]] != 0


def widened(layout: ThdLayout, request: WidenRequest, stream: int, capturing: bool) -> Widened:
    """The layout's product for ``request``, launched on the current stream if it isn't there yet.

    Inside a CUDA-graph capture nothing is reused or kept: the launch becomes part of the graph, so that a replay
    reads the values its tensors hold by then.  Nor is it for inference tensors, whose changes torch doesn't count.
    """
    if capturing or any(tensor.is_inference() for tensor in _values(layout)):
        return _widen(layout, request, 0, tell=False)
    key = (request, stream)
    versions = _versions(layout)
    product = layout.products.get(key)
    if product is None or product.versions != versions:
        product = layout.products[key] = _widen(layout, request, versions, tell=layout.device.type == "cuda")
    return product


def _versions(layout: ThdLayout) -> int:
    return sum(tensor._version for tensor in _values(layout))


def _values(layout: ThdLayout) -> tuple[Tensor, ...]:
    return (layout.cu_seqlens_q, layout.cu_seqlens_kv, *(offset.values for offset in layout.distinct_offsets))


def _widen(layout: ThdLayout, request: WidenRequest, versions: int, *, tell: bool) -> Widened:
    groups: list[metadata.Origins] = []
    rows_of: list[tuple[int, int]] = []
    seen_groups: dict[tuple, int] = {}
    seen_ragged: dict[tuple[int, int], int] = {}
    group_of: dict[str, int] = {}
    row_of: dict[str, int] = {}
    for geometry in request.ports:
        values, (n, d) = layout.offsets[geometry.port].values, geometry.fraction
        side = "q" if geometry.port in QUERY_PORTS else "kv"
        key = (id(values), n, d, side, geometry.rows)
        if key not in seen_groups:
            seen_groups[key] = len(groups)
            groups.append(metadata.Origins(values, n, d, side, geometry.rows))
        group = group_of[geometry.port] = seen_groups[key]
        ragged = (group, geometry.row_stride)
        if ragged not in seen_ragged:
            seen_ragged[ragged] = len(rows_of)
            rows_of.append(ragged)
        row_of[geometry.port] = seen_ragged[ragged]
    made = metadata.widen(layout.cu_seqlens_q, layout.cu_seqlens_kv, groups, request.band, request.capacity, rows_of)
    told = None
    if tell:
        # The device writes how many rows lie outside sequences into pinned memory; the host looks, but never waits.
        told = torch.full((len(groups),), -1, dtype=torch.int64, pin_memory=True)
        told.copy_(made.gap_ends_cum[:, -1], non_blocking=True)
    return Widened(made, (made.lengths[0], made.lengths[1]), group_of, {port: made.ragged[row] for port, row in row_of.items()}, versions, told)
