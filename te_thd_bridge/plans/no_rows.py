"""The plan of a batch without rows or sequences: there is nothing to attend to, so every output is its padding value."""

from __future__ import annotations

from ..layout import ThdLayout
from ..spec import AttentionSpec
from . import BackwardTensors, ForwardTensors


class NoRowsPlan:
    name = "no_rows"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def forward(self, tensors: ForwardTensors, layout: ThdLayout) -> None:
        tensors.out.zero_()
        for statistic in (tensors.lse, tensors.max_logit):
            if statistic is not None:
                statistic.fill_(float("-inf"))

    def backward(self, tensors: BackwardTensors, layout: ThdLayout) -> None:
        for gradient in (tensors.dq, tensors.dk, tensors.dv, tensors.d_softmax_offset):
            if gradient is not None:
                gradient.zero_()
