"""Packed sequences with padding between them, forward and backward, and which plan served them.

Run it anywhere: on a GPU cuDNN computes, elsewhere the reference plan.
"""

import torch

from te_thd_bridge import ThdLayout, plan_report, thd_attention


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cu_seqlens = torch.tensor([0, 100, 128, 190], dtype=torch.int32, device=device)
    cu_seqlens_padded = torch.tensor([0, 112, 144, 208], dtype=torch.int32, device=device)
    layout = ThdLayout.from_cu_seqlens(cu_seqlens, cu_seqlens_q_padded=cu_seqlens_padded, max_seqlen_q=100)

    q = torch.randn(208, 8, 64, dtype=dtype, device=device)
    k, v = (torch.randn(208, 2, 64, dtype=dtype, device=device) for _ in range(2))
    for tensor in (q, k, v):
        tensor[100:112] = float("nan")  # padding may hold anything
        tensor.requires_grad_()

    out = thd_attention(q, k, v, layout, mask="padding_causal")
    out.sum().backward()
    assert torch.isfinite(out).all() and (out[100:112] == 0).all() and (v.grad[100:112] == 0).all()

    for port in ("q", "k", "v", "o", "stats"):
        print(f"{port:<6} starts at rows {layout.offsets[port].values[:-1].tolist()}")
    for row in plan_report():
        print(f"plan {row['plan']} ({row['direction']}) ran {row['calls']} times on {row['device']}")


if __name__ == "__main__":
    main()
