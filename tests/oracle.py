"""The tests' own attention: fp64, dense, one head of one sequence at a time, gradients by torch.autograd.

It shares no code with the package and takes plain Python lists.
"""

from dataclasses import dataclass, field

import torch


@dataclass
class Truth:
    out: torch.Tensor
    lse: torch.Tensor
    max_logit: torch.Tensor
    dq: torch.Tensor = None
    dk: torch.Tensor = None
    dv: torch.Tensor = None
    d_sink: torch.Tensor = None


@dataclass
class Batch:
    """Lengths and first rows as lists.  starts: one list for each of the nine ports; rows: T of o.  of: the sequences to look at."""

    n: list[int]
    m: list[int]
    starts: dict[str, list[int]]
    rows: dict[str, int]
    left: int = -1
    right: int = -1
    bottom_right: bool = False
    sink: torch.Tensor = None
    scale: float = None
    of: list[int] = field(default=None)


def truth(q, k, v, batch: Batch, do=None) -> Truth:
    """q [T, H, D], k, v [T_kv, H_kv, D...]; values between sequences are never looked at.  Runs on the tensors' device."""
    device, heads, group = q.device, q.shape[1], q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if batch.scale is None else batch.scale
    zeros = lambda rows, h, d: torch.zeros(rows, h, d, dtype=torch.float64, device=device)  # noqa: E731
    result = Truth(
        zeros(batch.rows["o"], heads, v.shape[2]),
        torch.full((q.shape[0], heads), float("-inf"), dtype=torch.float64, device=device),
        torch.full((heads,), float("-inf"), dtype=torch.float64, device=device),
        zeros(*q.shape),
        zeros(*k.shape),
        zeros(*v.shape),
        torch.zeros(heads, dtype=torch.float64, device=device),
    )
    for i in range(len(batch.n)) if batch.of is None else batch.of:
        n, m = batch.n[i], batch.m[i]
        if n == 0 or m == 0:
            continue
        sq, sk, sv, so, sl, sdo, sdq, sdk, sdv = (batch.starts[port][i] for port in ("q", "k", "v", "o", "stats", "do", "dq", "dk", "dv"))
        row, key = torch.arange(n, device=device), torch.arange(m, device=device)
        distance = key[None, :] - row[:, None] - (m - n if batch.bottom_right else 0)
        seen = torch.ones(n, m, dtype=torch.bool, device=device)
        if batch.left >= 0:
            seen &= distance >= -batch.left
        if batch.right >= 0:
            seen &= distance <= batch.right
        alive = seen.any(1)
        if not alive.any():
            continue
        for h in range(heads):
            x = q[sq : sq + n, h].detach().double().requires_grad_()
            y = k[sk : sk + m, h // group].detach().double().requires_grad_()
            z = v[sv : sv + m, h // group].detach().double().requires_grad_()
            logits = (x @ y.T * scale)[alive].masked_fill(~seen[alive], float("-inf"))
            everything, sink = logits, None
            if batch.sink is not None:
                sink = batch.sink[h].detach().double().requires_grad_()
                everything = torch.cat([logits, sink.expand(len(logits), 1)], 1)
            weights = everything.softmax(1)[:, :m]
            out = weights @ z
            rows = row[alive]
            result.out[so + rows, h] = out.detach()
            result.lse[sl + rows, h] = everything.detach().logsumexp(1)
            result.max_logit[h] = max(result.max_logit[h], logits.detach().max())
            if do is not None:
                out.backward(do[sdo + rows, h].double())
                result.dq[sdq : sdq + n, h] = x.grad
                result.dk[sdk : sdk + m, h // group] += y.grad
                result.dv[sdv : sdv + m, h // group] += z.grad
                if sink is not None:
                    result.d_sink[h] += sink.grad
    return result
