"""Context parallelism over padded THD: so far, which rows of a batch belong to a rank."""

from .partition import rank_rows

__all__ = ["rank_rows"]
