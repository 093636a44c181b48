"""Device offset consumption: from lengths and bound ragged offsets, on the device, to what plans need."""

from .launch import clear, runs_kernels, widen
from .types import Metadata, Origins

__all__ = ["Metadata", "Origins", "clear", "runs_kernels", "widen"]
