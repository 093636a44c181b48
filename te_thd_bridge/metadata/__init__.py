"""Device offset consumption: from lengths and bound ragged offsets, on the device, to what plans need."""

from .launch import clear, gap_sequences, gather_rows, key_intervals, runs_kernels, sanitise_rows, scatter_rows, scrub_, widen
from .types import Metadata, Origins

__all__ = [
    "Metadata",
    "Origins",
    "clear",
    "gap_sequences",
    "gather_rows",
    "key_intervals",
    "runs_kernels",
    "sanitise_rows",
    "scatter_rows",
    "scrub_",
    "widen",
]
