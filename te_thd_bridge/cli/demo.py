"""`te-thd-bridge demo`: the problem on thirteen rows, then real documents packed into padded batches.

Every error that is printed is measured against `_per_document`, a dense fp64 softmax over each document alone.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Iterable, Iterator

import torch
from torch import Tensor

from .. import RaggedOffset, ThdLayout, plan_report, thd_attention

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="text files to pack (default: some that ship with Python)")
    parser.add_argument("--heads", type=int, default=8, help="query heads (default 8)")
    parser.add_argument("--kv-heads", type=int, default=2, help="key heads (default 2)")
    parser.add_argument("--head-dim", type=int, default=64, help="channels of a head (default 64)")
    parser.add_argument("--cp", type=int, default=8, help="pad each document to a multiple of twice this (default 8)")
    parser.add_argument("--tokens", type=int, help="tokens of a batch (default 2048, on a GPU 65536)")
    parser.add_argument("--batches", type=int, default=8, help="batches at most (default 8)")
    parser.add_argument("--dtype", choices=_DTYPES, help="default fp32, on a GPU bf16")
    parser.add_argument("--device", help="default: a GPU if there is one")


def run(arguments: argparse.Namespace) -> int:
    for name in ("heads", "kv_heads", "head_dim", "cp", "batches"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: got {getattr(arguments, name)}; accepted is an int of at least 1")
    device = torch.device(arguments.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    dtype = _DTYPES[arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (no GPU: the reference plan computes)"
    print(f"te_thd_bridge demo on {where}, {str(dtype).removeprefix('torch.')}\n")
    _show_identifier_batch(device, dtype)
    _run_documents(arguments, device, dtype)
    _show_plans()
    return 0


def _show_identifier_batch(device: torch.device, dtype: torch.dtype) -> None:
    lengths, slots = [3, 2, 4], [4, 4, 5]
    prefix, padded = _prefix(lengths), _prefix(slots)
    q, k, v = (torch.randn(padded[-1], 2, 64, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    real = _rows(padded, lengths)
    for tensor in (q, k, v):
        tensor[[row for row in range(padded[-1]) if row not in real]] = 50.0  # identifier tokens, and padding
    q, k, v = (tensor.to(device) for tensor in (q, k, v))
    tensors = {"cu_seqlens_q": _index(prefix, device), "max_seqlen_q": max(lengths)}
    bound = ThdLayout.from_cu_seqlens(**tensors, cu_seqlens_q_padded=_index(padded, device))
    derived = ThdLayout.from_cu_seqlens(**tensors, offsets={port: RaggedOffset(_index(prefix, device)) for port in ("q", "k", "v", "o", "stats")})
    wanted = _per_document(q, k, v, padded, lengths)

    print("1. Three sequences with identifier tokens (1 2 3) and padding between them\n")
    print("   row     " + " ".join(f"{row:2d}" for row in range(padded[-1])))
    print("   buffer  " + "  ".join("aaa1bb22cccc3").rjust(38))
    print(f"   cu_seqlens {prefix}, cu_seqlens_padded {padded}\n")
    print("   starts from               a   b   c    relative error of a, b, c against each sequence alone")
    for name, layout, starts in (("lengths (derived)", derived, prefix), ("cu_seqlens_padded (bound)", bound, padded)):
        out = thd_attention(q, k, v, layout)
        errors = [_error(out[p : p + n], wanted[p : p + n]) for p, n in zip(padded, lengths)]
        print(f"   {name:<26}" + "".join(f"{start:<4d}" for start in starts[:3]) + " " + "  ".join(f"{error:8.1e}" for error in errors))
    print("\n   An engine that derives starts from lengths gives the first line; the bridge gives the second.\n")


def _run_documents(arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    paths = arguments.files or _default_files()
    tokens = arguments.tokens or (65536 if device.type == "cuda" else 2048)
    documents = [document for path in paths for document in _pieces(path.read_bytes(), tokens // 2)]
    if not documents:
        raise ValueError("the files hold no text; accepted are files of at least one byte")
    batches = list(_batches(documents, tokens, 2 * arguments.cp))[: arguments.batches]
    print(f"2. {len(documents)} documents of {len(paths)} files, byte by byte, padded to multiples of {2 * arguments.cp}\n")

    heads, kv_heads, dim = arguments.heads, arguments.kv_heads, arguments.head_dim
    tables = [torch.randn(256, h, dim, generator=torch.Generator().manual_seed(i)).to(device, dtype) for i, h in enumerate((heads, kv_heads, kv_heads))]
    real_tokens = padded_tokens = 0
    seconds, worst = 0.0, {"out": 0.0, "dq": 0.0, "dk": 0.0, "dv": 0.0}
    for number, batch in enumerate(batches):
        _progress(number, len(batches))
        lengths = [len(document) for document in batch]
        padded = _prefix([-(-n // (2 * arguments.cp)) * 2 * arguments.cp for n in lengths])
        rows = torch.zeros(padded[-1], dtype=torch.int64)
        for start, document in zip(padded, batch):
            rows[start : start + len(document)] = torch.frombuffer(bytearray(document), dtype=torch.uint8).long()
        q, k, v = (table[rows.to(device)] for table in tables)
        filler = torch.ones(padded[-1], dtype=torch.bool)
        filler[_rows(padded, lengths)] = False
        for tensor in (q, k, v):
            tensor[filler.to(device)] = float("nan")
            tensor.requires_grad_()
        layout = ThdLayout.from_cu_seqlens(_index(_prefix(lengths), device), cu_seqlens_q_padded=_index(padded, device), max_seqlen_q=max(lengths))
        gradient = torch.randn(q.shape, generator=torch.Generator().manual_seed(number)).to(device, dtype)
        seconds += _timed(lambda: torch.autograd.grad(thd_attention(q, k, v, layout), (q, k, v), gradient), device, warm=number == 0)

        out = thd_attention(q, k, v, layout)
        gradients = torch.autograd.grad(out, (q, k, v), gradient)
        shown = _shortest(lengths)
        checked = _rows(padded, lengths, shown)
        for name, got, wanted in zip(worst, (out, *gradients), _per_document_with_gradients(q, k, v, gradient, padded, lengths, shown)):
            worst[name] = max(worst[name], _error(got[checked], wanted[checked]))
        real_tokens, padded_tokens = real_tokens + sum(lengths), padded_tokens + padded[-1]
    _progress(len(batches), len(batches))
    share = 100 * (1 - real_tokens / padded_tokens)
    print(f"   {len(batches)} batches, {real_tokens} tokens in {padded_tokens} rows ({share:.2f} % padding, filled with NaN)")
    print(f"   forward and backward: {real_tokens / seconds:,.0f} tokens/s")
    print("   worst relative error against the per-document reference: " + ", ".join(f"{name} {error:.1e}" for name, error in worst.items()) + "\n")


def _show_plans() -> None:
    print("3. Plans that ran\n")
    rows = [row for row in plan_report() if row["calls"]]
    columns = ["plan", "direction", "device", "dtype", "heads", "head_dim", "batch", "max_seqlen", "calls"]
    widths = [max(len(column), *(len(str(row[column])) for row in rows)) for column in columns]
    for cells in (columns, *([str(row[column]) for column in columns] for row in rows)):
        print("   " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())


def _per_document(q: Tensor, k: Tensor, v: Tensor, starts: list[int], lengths: list[int]) -> Tensor:
    """Causal attention in fp64 of each document alone, [T, H, D]; zeros between documents."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // k.shape[1]
    for start, n in zip(starts, lengths):
        rows = slice(start, start + n)
        query, key, value = q[rows].double(), k[rows].double().repeat_interleave(group, 1), v[rows].double().repeat_interleave(group, 1)
        logits = torch.einsum("ihd,jhd->hij", query, key) / math.sqrt(q.shape[2])
        future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        out[rows] = torch.einsum("hij,jhd->ihd", logits.masked_fill(future, float("-inf")).softmax(-1), value)
    return out


def _per_document_with_gradients(q, k, v, gradient, starts, lengths, shown) -> list[Tensor]:
    copies = [tensor.detach().double().nan_to_num(0.0).requires_grad_() for tensor in (q, k, v)]
    out = _per_document(*copies, [starts[i] for i in shown], [lengths[i] for i in shown])
    return [out.detach(), *torch.autograd.grad(out, copies, gradient.double())]


def _shortest(lengths: list[int], tokens: int = 4096) -> list[int]:
    """Documents to check, shortest first, as far as a dense fp64 reference is affordable; at least one."""
    order, taken = sorted(range(len(lengths)), key=lengths.__getitem__), []
    for i in order:
        if taken and sum(lengths[j] for j in taken) + lengths[i] > tokens:
            break
        taken.append(i)
    return taken


def _batches(documents: Iterable[bytes], tokens: int, multiple: int) -> Iterator[list[bytes]]:
    batch, rows = [], 0
    for document in documents:
        slot = -(-len(document) // multiple) * multiple
        if batch and rows + slot > tokens:
            yield batch
            batch, rows = [], 0
        batch.append(document)
        rows += slot
    if batch:
        yield batch


def _pieces(text: bytes, longest: int) -> list[bytes]:
    return [text[i : i + longest] for i in range(0, len(text), longest)]


def _default_files() -> list[Path]:
    """Small modules of the standard library: text that every machine with Python has."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.glob("*.py") if 200 < path.stat().st_size < 6000)
    return files[:48]


def _rows(starts: list[int], lengths: list[int], of: Iterable[int] | None = None) -> list[int]:
    return [row for i in (range(len(lengths)) if of is None else of) for row in range(starts[i], starts[i] + lengths[i])]


def _prefix(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def _index(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _error(got: Tensor, wanted: Tensor) -> float:
    return float(torch.linalg.vector_norm(got.detach().double() - wanted) / torch.linalg.vector_norm(wanted))


def _timed(work, device: torch.device, *, warm: bool) -> float:
    if warm:
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        filled = 30 * done // total
        sys.stderr.write(f"\r   [{'#' * filled}{'.' * (30 - filled)}] {done}/{total} batches" + ("\n\n" if done == total else ""))
        sys.stderr.flush()
