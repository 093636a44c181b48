"""Sizes that vary from step to step are rounded up, so that a training run stops building plans."""

from __future__ import annotations


def batch_bucket(batch: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ...: powers of two and their three halves."""
    power = 1 << max(0, (batch - 1).bit_length())
    return power * 3 // 4 if power >= 4 and batch <= power * 3 // 4 else power


def length_bucket(length: int) -> int:
    """A power of two of at least 128, the largest tile of a cuDNN engine."""
    return max(128, 1 << (length - 1).bit_length())


def deterministic_length_bucket(length: int) -> int:
    """A multiple of 128: cuDNN's deterministic workspace on Hopper grows with the square of the length."""
    return max(128, -(-length // 128) * 128)


def token_bucket(tokens: int) -> int:
    """At least 1024, in quarters of a power of two: it bounds the backward's workspace, which grows with it."""
    quarter = max(256, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // quarter) * quarter
