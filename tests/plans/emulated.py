"""A cuDNN that runs on a CPU: it executes a declared graph by the graph's own dims, strides, offsets and multipliers.

Like the engines it stands for, it touches no row outside the bound lengths, and like cuDNN before 9.25 it answers NaN for
a row without a key.
"""

from contextlib import nullcontext

import torch

from te_thd_bridge.plans import graph as graph_plans


class EmulatedGraph:
    def __init__(self, declared):
        self.declared, self.node = declared, declared.nodes[0]

    def get_execution_plan_count(self):
        return 1

    def get_plan_name_at_index(self, index):
        return "eng0_emulated"

    def build_plan_at_index(self, index):
        pass

    def get_workspace_size_plan_at_index(self, index):
        return 0

    def execute_plan_at_index(self, buffers, workspace=None, index=0, handle=None, *, tensor_uids=None):
        self.bound = dict(zip(tensor_uids, buffers))
        inputs = self.node.inputs
        if "cu_seq_len_q" in inputs:
            n, m = (self._vector(inputs[name]).diff().tolist() for name in ("cu_seq_len_q", "cu_seq_len_kv"))
        else:
            n, m = (self._vector(inputs[name]).tolist() for name in ("seq_len_q", "seq_len_kv"))
        run = self._backward if "dO" in inputs else self._forward
        for b in range(inputs["q"].dim[0]):
            if n[b] or m[b]:
                run(b, n[b], m[b])

    def _vector(self, tensor):
        buffer = self.bound[tensor.uid]
        assert buffer.is_contiguous() and buffer.numel() >= tensor.dim[0], "cuDNN would read past the end"
        return buffer[: tensor.dim[0]]

    def _piece(self, tensor, b, rows):
        """[H, rows, W] of sequence b where the declaration says it lies."""
        buffer = self.bound[tensor.uid]
        if tensor.ragged_offset is None:
            offset = b * tensor.stride[0]
        else:
            offset = int(self._vector(tensor.ragged_offset)[b]) * tensor.ragged_offset_multiplier
        _, heads, _, width = tensor.dim
        return buffer.as_strided((heads, rows, width), tuple(tensor.stride[1:3]) + (1,), buffer.storage_offset() + offset)

    def _logits(self, b, n, m):
        inputs, params = self.node.inputs, self.node.params
        q, k = self._piece(inputs["q"], b, n).double(), self._piece(inputs["k"], b, m).double()
        group = q.shape[0] // k.shape[0]
        k = k.repeat_interleave(group, 0)
        shift = m - n if "diagonal_alignment" in params else 0
        distance = torch.arange(m)[None, :] - torch.arange(n)[:, None] - shift
        seen = torch.ones(n, m, dtype=torch.bool)
        if "diagonal_band_left_bound" in params:
            seen &= distance > -params["diagonal_band_left_bound"]
        if "diagonal_band_right_bound" in params:
            seen &= distance <= params["diagonal_band_right_bound"]
        logits = (params["attn_scale"] * q @ k.transpose(1, 2)).masked_fill(~seen, float("-inf"))
        return q, k, group, logits

    def _forward(self, b, n, m):
        inputs, outputs = self.node.inputs, self.node.outputs
        _, _, group, logits = self._logits(b, n, m)
        v = self._piece(inputs["v"], b, m).double().repeat_interleave(group, 0)
        largest = logits.amax(2, keepdim=True) if m else torch.full((logits.shape[0], n, 1), float("nan"), dtype=torch.float64)
        total = torch.exp(logits - largest).sum(2, keepdim=True)
        lse = largest + total.log()
        if "sink_token" in inputs:
            lse = torch.logaddexp(lse, self.bound[inputs["sink_token"].uid].double()[:, None, None].expand_as(lse))
        self._piece(outputs["O"], b, n).copy_(torch.exp(logits - lse) @ v)
        for name, value in (("Stats", lse), ("score_max", largest), ("score_sum_exp", total)):
            if outputs.get(name) is not None:
                self._piece(outputs[name], b, n).copy_(value)

    def _backward(self, b, n, m):
        inputs, outputs = self.node.inputs, self.node.outputs
        q, k, group, logits = self._logits(b, n, m)
        v, o, do, lse = (self._piece(inputs[name], b, m if name == "v" else n).double() for name in ("v", "o", "dO", "stats"))
        weights = torch.exp(logits - lse)
        d_logits = weights * (do @ v.repeat_interleave(group, 0).transpose(1, 2) - (do * o).sum(2, keepdim=True)) * self.node.params["attn_scale"]
        self._piece(outputs["dQ"], b, n).copy_(d_logits @ k)
        for name, value in (("dK", d_logits.transpose(1, 2) @ q), ("dV", weights.transpose(1, 2) @ do)):
            self._piece(outputs[name], b, m).copy_(value.unflatten(0, (-1, group)).sum(1))


def install(monkeypatch, *, capability: int, backend_version: int, refuse_sinks: bool = False) -> list:
    """Make GraphPlan run on CPU tensors through emulated graphs; returns the specs that were declared."""
    import cudnn

    declared = []

    def build_graph(spec, direction, *, packed_stats=True, **arguments):
        if refuse_sinks and spec.sink and direction == "fwd":
            raise graph_plans.UnsupportedByGraph("no engine compiles")
        declared.append((direction, spec))
        return EmulatedGraph(graph_plans._declare(cudnn, spec, direction, packed_stats, {}))

    monkeypatch.setattr(graph_plans, "build_graph", build_graph)
    monkeypatch.setattr(graph_plans, "compute_capability", lambda index: capability)
    monkeypatch.setattr(graph_plans, "_handle", lambda index: None)
    monkeypatch.setattr(cudnn, "backend_version", lambda: backend_version)
    monkeypatch.setattr(cudnn, "set_stream", lambda handle, stream: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return declared
