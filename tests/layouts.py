"""Batches for tests: drawn or spelled out, with tensors whose padding holds what a test wants."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from te_thd_bridge import RaggedOffset, ThdLayout
from te_thd_bridge.layout import PORTS, QUERY_PORTS

from .oracle import Batch, Truth, truth

NAN = float("nan")
GRADIENTS = {"do": "o", "dq": "q", "dk": "k", "dv": "v"}
BANDS = {"padding": (-1, False), "padding_causal": (0, False), "padding_causal_bottom_right": (0, True)}


def prefix(values: list[int], first: int = 0) -> list[int]:
    return [first + sum(values[:i]) for i in range(len(values) + 1)]


@dataclass
class Packed:
    """Lengths, slots and where ports start; `offsets` overrides the padded prefix of single ports."""

    n: list[int]
    gaps: list[int]
    m: list[int] = None
    gaps_kv: list[int] = None
    tail: int = 0
    tail_kv: int = None
    lead: int = 0
    dtype: torch.dtype = torch.int32
    own: dict = None  # port -> (starts, rows, unit, multiplier, with_end)

    def __post_init__(self):
        self.cross = self.m is not None
        self.m = self.n if self.m is None else self.m
        self.gaps_kv = self.gaps if self.gaps_kv is None else self.gaps_kv
        self.tail_kv = self.tail if self.tail_kv is None else self.tail_kv
        self.own = self.own or {}
        self.padded_q = prefix([a + b for a, b in zip(self.n, self.gaps)], self.lead)
        self.padded_kv = prefix([a + b for a, b in zip(self.m, self.gaps_kv)], self.lead)
        self.rows = {"q": self.padded_q[-1] + self.tail, "k": self.padded_kv[-1] + self.tail_kv}
        self.starts = {port: (self.padded_q if port in QUERY_PORTS else self.padded_kv)[:-1] for port in PORTS if port not in GRADIENTS}
        self.starts |= {port: starts for port, (starts, *_) in self.own.items()}
        self.starts |= {gradient: self.starts[port] for gradient, port in GRADIENTS.items() if gradient not in self.own}
        reach = {port: rows for port, (_, rows, *_) in self.own.items()}
        # lse has q's rows, v those of k, and a gradient those of its tensor.
        rows_q = max([self.rows["q"], *(reach.get(port, 0) for port in ("q", "stats", "dq"))])
        rows_kv = max([self.rows["k"], *(reach.get(port, 0) for port in ("k", "v", "dk", "dv"))])
        rows_o = max(reach.get("o", rows_q), reach.get("do", 0))
        self.rows = dict.fromkeys(("q", "stats", "dq"), rows_q) | dict.fromkeys(("k", "v", "dk", "dv"), rows_kv) | dict.fromkeys(("o", "do"), rows_o)

    def tensor(self, values, device):
        return torch.tensor(values, dtype=self.dtype, device=device)

    def layout(self, device, strides=None, itemsize=None, **kwargs) -> ThdLayout:
        """strides, itemsize: row stride in elements, and bytes of one, of each port whose own offsets count in them."""
        offsets = {}
        for port, (starts, rows, unit, multiplier, with_end) in self.own.items():
            step = 1 if unit == "token" else strides[port] * (itemsize[port] if unit == "byte" else 1)
            values = [value * step for value in [*starts, rows][: len(starts) + with_end]]
            if unit != "token" and step % multiplier:
                multiplier = 1  # it must divide the row stride
            offsets[port] = RaggedOffset(torch.tensor([value // multiplier for value in values], dtype=torch.int64, device=device), unit, multiplier)
        cu_q = self.tensor(prefix(self.n), device)
        padded = self.tensor(self.padded_q, device)
        return ThdLayout.from_cu_seqlens(
            cu_q,
            self.tensor(prefix(self.m), device) if self.cross else None,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=self.tensor(self.padded_kv, device) if self.cross else None,
            max_seqlen_q=max(self.n, default=0),
            max_seqlen_kv=max(self.m, default=0),
            offsets=offsets or None,
            **kwargs,
        )

    def real(self, port) -> list[int]:
        lengths = self.n if port in QUERY_PORTS else self.m
        return [row for start, length in zip(self.starts[port], lengths) for row in range(start, start + length)]

    def padding(self, port) -> list[int]:
        real = set(self.real(port))
        return [row for row in range(self.rows[port]) if row not in real]

    def random(self, port, heads, dim, dtype, device, fill=NAN, seed=0):
        generator = torch.Generator().manual_seed(seed)
        tensor = torch.randn(self.rows[port], heads, dim, generator=generator, dtype=torch.float64).to(dtype)
        tensor[self.padding(port)] = fill
        return tensor.to(device)

    def qkv(self, heads, heads_kv, dim, dim_v, dtype, device, fill=NAN, seed=0):
        shapes = (("q", heads, dim), ("k", heads_kv, dim), ("v", heads_kv, dim_v))
        return [self.random(port, h, d, dtype, device, fill, seed + i) for i, (port, h, d) in enumerate(shapes)]

    def truth(self, q, k, v, *, mask="padding_causal", window=(-1, -1), sink=None, scale=None, do=None, of=None) -> Truth:
        right, bottom_right = BANDS[mask]
        batch = Batch(self.n, self.m, self.starts, self.rows, window[0], right if right >= 0 else window[1], bottom_right, sink, scale, of)
        return truth(q, k, v, batch, do)


def row_strides(heads: int, heads_kv: int, dim: int, dim_v: int) -> dict[str, int]:
    """Elements from row to row of contiguous tensors, by port."""
    strides = {"q": heads * dim, "k": heads_kv * dim, "v": heads_kv * dim_v, "o": heads * dim_v, "stats": heads}
    return strides | {gradient: strides[port] for gradient, port in GRADIENTS.items()}


def itemsizes(dtype: torch.dtype) -> dict[str, int]:
    """Bytes of one element, by port."""
    return dict.fromkeys(PORTS, dtype.itemsize) | {"stats": max(4, dtype.itemsize)}


def sinks(heads: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(heads, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(got, wanted) -> float:
    """Relative error in the Euclidean norm; NaN where got holds one."""
    scale = torch.linalg.vector_norm(wanted)
    return float(torch.linalg.vector_norm(got.detach().double() - wanted) / (scale if scale > 0 else 1.0))


@st.composite
def packed(draw, max_batch=6, lengths=(0, 0, 1, 2, 5, 9, 17), cross=None, own=True, ports=("k", "v", "o", "stats")):
    """Any batch a caller may bind: zero lengths, gaps, leading rows, tails, dummy slots, per-port offsets in any order.

    own: some of ``ports`` get an offset of their own.
    """
    batch = draw(st.integers(0, max_batch))
    some = st.lists(st.sampled_from(lengths), min_size=batch, max_size=batch)
    gaps = st.lists(st.sampled_from([0, 0, 1, 4, 11]), min_size=batch, max_size=batch)
    dummies = draw(st.sampled_from([0, 0, 3]))
    n, gap = draw(some) + [0] * dummies, draw(gaps) + [0] * dummies
    crossed = draw(st.booleans()) if cross is None else cross
    m, gap_kv = (draw(some) + [0] * dummies, draw(gaps) + [0] * dummies) if crossed else (None, None)
    offsets = {}
    for port in draw(st.lists(st.sampled_from(ports), unique=True, max_size=4)) if own else []:
        sizes = n if port in QUERY_PORTS else (m or n)
        order, at, starts = draw(st.permutations(range(len(sizes)))), draw(st.integers(0, 3)), [0] * len(sizes)
        for i in order:
            starts[i] = at
            at += sizes[i] + draw(st.sampled_from([0, 1, 3]))
        unit, multiplier = draw(st.sampled_from([("token", 1), ("element", 1), ("element", 8), ("byte", 1), ("byte", 4)]))
        offsets[port] = (starts, at, unit, multiplier, draw(st.booleans()))
    return Packed(
        n,
        gap,
        m,
        gap_kv,
        tail=draw(st.sampled_from([0, 3])),
        tail_kv=draw(st.sampled_from([0, 5])) if crossed else None,
        lead=draw(st.sampled_from([0, 2])),
        dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        own=offsets,
    )
