"""The measured table of the README: `python -m tests.gpu.report [FILE.json]` on a GPU machine.

Accuracy against fp64 for head dims x head groups x masks x dtypes, with padding that holds 0, NaN and inf, beside the same
plan on packed input; what a packed caller gets and pays; time of the offset kernels.
"""

import json
import math
import platform
import statistics
import sys
import time

import torch

from te_thd_bridge import ThdLayout, metadata, plan_report, thd_attention
from te_thd_bridge.metadata.types import Origins
from te_thd_bridge.spec import Band

from ..layouts import NAN, Packed, prefix, relative
from .test_on_device import CUDA, kernels, run, wanted

LENGTHS, GAPS = [300, 77, 0, 411, 64], [84, 51, 3, 101, 64]
PADDED, PACKED = Packed(LENGTHS, GAPS, tail=37), Packed(LENGTHS, [0] * 5)
DIMS = {"64": (64, 64), "128": (128, 128), "192/128": (192, 128), "256": (256, 256), "512 fwd": (512, 512)}
GROUPS = {"MHA": (8, 8), "GQA 8": (16, 2), "MQA": (8, 1)}
MASKS = {"full": "padding", "causal": "padding_causal", "bottom right": "padding_causal_bottom_right"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def accuracy() -> list[dict]:
    rows = []
    for dim_name, (dim, dim_v) in DIMS.items():
        backward = dim <= 256
        for dtype_name, dtype in DTYPES.items():
            row = {"head dim": dim_name, "dtype": dtype_name, "cases": 0, "error": {}, "ratio": 0.0, "zero": True, "same forward": True, "same gradients": True}
            for heads, heads_kv in GROUPS.values():
                for mask in MASKS.values():
                    _one(row, dict(heads=heads, heads_kv=heads_kv, dim=dim, dim_v=dim_v, dtype=dtype, backward=backward), mask)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def _one(row: dict, shape: dict, mask: str) -> None:
    row["cases"] += 1
    true, runs = wanted(PADDED, **shape, mask=mask), []
    for fill in (0.0, NAN, float("inf")):
        got = run(PADDED, **shape, mask=mask, fill=fill)
        runs.append(got)
        for port, tensor in zip(("o", "q", "k", "v"), (got[0], *got[2:5])):
            row["zero"] &= bool((tensor[PADDED.padding(port)] == 0).all())
    row["same forward"] &= all(torch.equal(runs[0][0], other[0]) for other in runs[1:])
    if shape["backward"]:
        fixed = [run(PADDED, **shape, mask=mask, fill=fill, deterministic=True) for fill in (0.0, NAN)]
        row["same gradients"] &= all(torch.equal(a, b) for a, b in zip(fixed[0], fixed[1]))

    # The same plan on the same real rows, packed.
    rows_q, rows_k = PADDED.real("q"), PADDED.real("k")
    q, k, v = (x[rows].clone().requires_grad_(shape["backward"]) for x, rows in zip(_qkv(shape), (rows_q, rows_k, rows_k)))
    layout = ThdLayout.from_cu_seqlens(PACKED.tensor(prefix(LENGTHS), CUDA), max_seqlen_q=max(LENGTHS))
    out = thd_attention(q, k, v, layout, mask=mask)
    packed = [out]
    if shape["backward"]:
        do = PADDED.random("o", shape["heads"], shape["dim_v"], shape["dtype"], CUDA, seed=3)
        packed += torch.autograd.grad(out, (q, k, v), do[rows_q])
    truths = (true.out[rows_q], true.dq[rows_q], true.dk[rows_k], true.dv[rows_k])
    for name, truth, plain, rows in zip(("o", "dq", "dk", "dv"), truths, packed, (rows_q, rows_q, rows_k, rows_k)):
        worst = max(relative(got[0 if name == "o" else 1 + ("o", "dq", "dk", "dv").index(name)][rows], truth) for got in runs)
        row["error"][name] = max(row["error"].get(name, 0.0), worst)
        row["ratio"] = max(row["ratio"], worst / relative(plain, truth))


def _qkv(shape: dict) -> list[torch.Tensor]:
    return PADDED.qkv(shape["heads"], shape["heads_kv"], shape["dim"], shape["dim_v"], shape["dtype"], CUDA)


def packed_caller() -> dict:
    """A packed caller against a packed graph written out by hand: bitwise, and launches per call."""
    import cudnn

    lengths, heads, heads_kv, dim = [300, 200, 411, 64], 8, 2, 128
    cu = torch.tensor(prefix(lengths), dtype=torch.int32, device=CUDA)
    q, k, v = (torch.randn(sum(lengths), h, dim, device=CUDA, dtype=torch.bfloat16) for h in (heads, heads_kv, heads_kv))
    layout = ThdLayout.from_cu_seqlens(cu, max_seqlen_q=max(lengths))
    ours = thd_attention(q, k, v, layout)
    torch.cuda.synchronize()
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT, handle=handle
    )
    b, s, out = len(lengths), 512, torch.zeros_like(q)

    def index(name, values, data_type):
        tensor = torch.tensor(values, dtype=torch.int32 if data_type == cudnn.data_type.INT32 else torch.int64, device=CUDA)
        return graph.tensor(name=name, dim=[len(values), 1, 1, 1], stride=[1, 1, 1, 1], data_type=data_type), tensor

    def over(name, h):
        return graph.tensor(name=name, dim=[b, h, s, dim], stride=[s * h * dim, dim, h * dim, 1], data_type=cudnn.data_type.BFLOAT16)

    n_q, n_q_values = index("n_q", lengths, cudnn.data_type.INT32)
    n_kv, n_kv_values = index("n_kv", lengths, cudnn.data_type.INT32)
    pack, tensors = {n_q: n_q_values, n_kv: n_kv_values}, []
    for name, memory, h in (("q", q, heads), ("k", k, heads_kv), ("v", v, heads_kv)):
        tensor = over(name, h)
        offset, values = index(f"offset_{name}", [x * h * dim for x in prefix(lengths)], cudnn.data_type.INT64)
        tensor.set_ragged_offset(offset)
        tensors.append(tensor)
        pack |= {tensor: memory, offset: values}
    o, _ = graph.sdpa(
        name="sdpa", q=tensors[0], k=tensors[1], v=tensors[2], generate_stats=False, attn_scale=1 / math.sqrt(dim), use_padding_mask=True, seq_len_q=n_q,
        seq_len_kv=n_kv, diagonal_band_right_bound=0,
    )  # fmt: skip
    o.set_output(True).set_dim([b, heads, s, dim]).set_stride([s * heads * dim, dim, heads * dim, 1]).set_data_type(cudnn.data_type.BFLOAT16)
    offset, values = index("offset_o", [x * heads * dim for x in prefix(lengths)], cudnn.data_type.INT64)
    o.set_ragged_offset(offset)
    pack |= {o: out, offset: values}
    graph.build([cudnn.heur_mode.A])
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=CUDA)

    def by_hand():
        graph.execute(pack, workspace, handle=handle)

    by_hand()
    torch.cuda.synchronize()
    return {
        "bitwise equal": torch.equal(ours, out),
        "kernels of the graph by hand": len(kernels(by_hand)),
        "kernels of thd_attention": len(kernels(lambda: thd_attention(q, k, v, layout))),
    }


def microseconds(work, repeats: int = 50) -> float:
    """Median GPU time of all kernels of one call, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as measured:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    times = [event.device_time_total for event in measured.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    per_call = len(times) // repeats
    return statistics.median(sum(times[i * per_call : (i + 1) * per_call]) for i in range(repeats))


def copy_bandwidth() -> float:
    """Bytes a microsecond, read and written, of a large copy on the device."""
    source = torch.randn(1 << 29, dtype=torch.float32, device=CUDA)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / microseconds(lambda: target.copy_(source), 10)


def offset_kernels() -> dict:
    b, heads, dim = 64, 32, 128
    cu = torch.arange(0, (b + 1) * 200, 200, dtype=torch.int32, device=CUDA)
    padded = torch.arange(0, (b + 1) * 256, 256, dtype=torch.int32, device=CUDA)
    rows = 64 * 256
    groups = [Origins(padded, 1, 1, "q", rows), Origins(padded, 1, 1, "kv", rows)]
    ragged = [(0, heads * dim), (1, 8 * dim), (0, heads)]
    made = metadata.widen(cu, cu, groups, Band(-1, 0), b, ragged)
    bandwidth = copy_bandwidth()
    result = {"widen B=64 us": microseconds(lambda: metadata.widen(cu, cu, groups, Band(-1, 0), b, ragged)), "copy TB/s": bandwidth / 1e6}
    outs = [torch.empty(rows, heads, dim, device=CUDA, dtype=torch.bfloat16) for _ in range(8)]
    turn = iter(range(1 << 30))
    gap_bytes = 64 * 56 * heads * dim * 2
    cleared = microseconds(lambda: metadata.clear([(outs[next(turn) % 8], 0, 0.0)], made))
    filled = microseconds(lambda: outs[next(turn) % 8].zero_())
    result |= {"clear us": cleared, "clear / (gap bytes over copy bandwidth)": cleared * bandwidth / gap_bytes, "zero_ of the whole tensor us": filled}
    wide = 4 * rows
    lengths = torch.arange(0, (b + 1) * 800, 800, dtype=torch.int32, device=CUDA)
    starts = torch.arange(0, (b + 1) * 1024, 1024, dtype=torch.int32, device=CUDA)
    long = metadata.widen(lengths, lengths, [Origins(starts, 1, 1, "q", wide)], Band(-1, 0), b, [])
    for h, d in ((1, 64), (8, 128), (32, 128)):
        source, packed = (torch.randn(wide, h, d, device=CUDA).to(torch.bfloat16) for _ in range(2))
        live = 64 * 800 * h * d * 2
        gathered = microseconds(lambda: metadata.gather_rows(source, packed, long, 0, "q"))
        scattered = microseconds(lambda: metadata.scatter_rows(packed, source, long, 0, "q"))
        result[f"gather {h}x{d}: share of copy bandwidth"] = (live + wide * h * d * 2) / gathered / bandwidth
        result[f"scatter {h}x{d}: share of copy bandwidth"] = (live + wide * h * d * 2) / scattered / bandwidth
    return result


def overhead() -> dict:
    """CPU time of one call on a warm plan, 16 x (960 + 64), 32/8/128, the GPU idle before each."""
    batch = Packed([960] * 16, [64] * 16)
    q, k, v = (torch.randn(batch.rows["q"], h, 128, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for h in (32, 8, 8))
    layout, do = batch.layout(CUDA), torch.randn(batch.rows["q"], 32, 128, device=CUDA, dtype=torch.bfloat16)

    def cpu(work):
        times = []
        for _ in range(100):
            torch.cuda.synchronize()
            started = time.perf_counter()
            work()
            times.append((time.perf_counter() - started) * 1e6)
        return statistics.median(times[20:])

    def both():
        torch.autograd.grad(thd_attention(q, k, v, layout), (q, k, v), do)

    with torch.no_grad():
        forward = cpu(lambda: thd_attention(q, k, v, layout))
        gpu = microseconds(lambda: thd_attention(q, k, v, layout), 20)
    return {"forward CPU us": forward, "forward+backward CPU us": cpu(both), "forward GPU us": gpu, "forward+backward GPU us": microseconds(both, 20)}


def main() -> None:
    import cudnn
    import triton

    versions = {
        "gpu": torch.cuda.get_device_name(CUDA),
        "torch": torch.__version__,
        "cudnn frontend": cudnn.__version__,
        "cudnn": cudnn.backend_version(),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(versions, flush=True)
    results = {"versions": versions, "packed caller": packed_caller(), "offset kernels": offset_kernels(), "overhead": overhead()}
    for name, value in results.items():
        print(name, json.dumps(value, indent=1), flush=True)
    results["accuracy"] = accuracy()
    results["plans"] = sorted({row["plan"] for row in plan_report()})
    print(results["plans"])
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
