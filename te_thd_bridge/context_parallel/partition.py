"""Which rows of a padded batch each context-parallel rank holds.

A sequence's slot is cut into 2 * cp chunks of equal length; rank r holds chunks r and 2 * cp - 1 - r of every sequence,
which balances causal work.  TransformerEngine's thd_get_partitioned_indices and Megatron-Core cut the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rank_rows(cu_seqlens_padded: Tensor, cp_size: int, rank: int) -> Tensor:
    """Rows of the whole batch that ``rank`` holds, in the order in which it holds them, int64 on the prefix's device.

    cu_seqlens_padded: int32 or int64 [B+1], first row of each slot.  Its values are read on the host: this is for data
    loaders and tests, not for a training step.

    Raises ValueError for a slot whose length 2 * cp_size does not divide, naming the sequence, and for a bad rank.
    """
    if cp_size < 1 or not 0 <= rank < cp_size:
        raise ValueError(f"rank, cp_size: got {rank} of {cp_size}; accepted are 0 <= rank < cp_size")
    bounds = cu_seqlens_padded.tolist()
    chunks, pieces = 2 * cp_size, [torch.zeros(0, dtype=torch.int64)]
    for i, (start, end) in enumerate(zip(bounds, bounds[1:])):
        if (end - start) % chunks:
            raise ValueError(
                f"cu_seqlens_padded: the slot of sequence {i} has {end - start} rows; accepted are multiples of 2 * cp_size = {chunks}, "
                "so that each rank gets two chunks of equal length"
            )
        length = (end - start) // chunks
        pieces += [torch.arange(start + chunk * length, start + (chunk + 1) * length) for chunk in (rank, chunks - 1 - rank)]
    return torch.cat(pieces).to(cu_seqlens_padded.device)
