"""What is derived from a layout's values is made once, shared by every call on it, and made anew when the values change."""

import pytest
import torch

from te_thd_bridge import ThdLayout
from te_thd_bridge.plans import products
from te_thd_bridge.plans.products import PortGeometry, widen_request, widened
from te_thd_bridge.spec import Band

PORTS = tuple(PortGeometry(port, 13, stride, (1, 1)) for port, stride in (("q", 32), ("k", 16), ("v", 16), ("o", 32), ("stats", 4)))


@pytest.fixture
def layout(device):
    cu, padded = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 3, 5, 9], [0, 4, 8, 13]))
    return ThdLayout.from_cu_seqlens(cu, cu_seqlens_q_padded=padded, max_seqlen_q=4)


@pytest.fixture
def launches(monkeypatch):
    made, real = [], products.metadata.widen
    monkeypatch.setattr(products.metadata, "widen", lambda *arguments: made.append(arguments) or real(*arguments))
    return made


def test_one_launch_serves_every_layer_of_a_layout(layout, launches):
    request = widen_request(PORTS, Band(-1, 0), 4)
    assert all(widened(layout, request, 0, False) is widened(layout, request, 0, False) for _ in range(5))
    assert len(launches) == 1
    assert widen_request(PORTS, Band(-1, 0), 4) is request, "requests are interned"


def test_ports_that_share_an_offset_and_a_stride_share_a_vector(layout, launches):
    product = widened(layout, widen_request(PORTS, Band(-1, 0), 4), 0, False)
    assert product.ragged["k"].data_ptr() == product.ragged["v"].data_ptr() and product.group["q"] == product.group["o"]
    assert product.ragged["q"].tolist()[:3] == [0, 128, 256] and product.ragged["stats"].tolist()[:3] == [0, 16, 32]
    groups, rows = launches[0][2], launches[0][5]
    assert len(groups) == 2 and len(rows) == 3


def test_another_stream_band_or_value_gets_its_own(layout, launches):
    request = widen_request(PORTS, Band(-1, 0), 4)
    widened(layout, request, 0, False)
    widened(layout, request, 1, False)
    widened(layout, widen_request(PORTS, Band(2, 0), 4), 0, False)
    assert len(launches) == 3
    layout.offsets["q"].values.add_(0)
    widened(layout, request, 0, False)
    layout.refresh()
    widened(layout, request, 0, False)
    assert len(launches) == 5


def test_nothing_is_reused_inside_a_capture_or_for_inference_tensors(layout, launches):
    request = widen_request(PORTS, Band(-1, 0), 4)
    widened(layout, request, 0, False)
    widened(layout, request, 0, True)
    widened(layout, request, 0, True)
    assert len(launches) == 3
    with torch.inference_mode():
        other = ThdLayout.from_cu_seqlens(layout.cu_seqlens_q.clone(), max_seqlen_q=4)
        widened(other, request, 0, False)
        widened(other, request, 0, False)
    assert len(launches) == 5


def test_rows_are_cleared_until_the_device_has_told_that_there_are_none(layout):
    product = widened(layout, widen_request(PORTS, Band(-1, 0), 4), 0, False)
    product._told = torch.tensor([-1, -1])
    assert product.may_have_gaps("o")
    product._told = torch.tensor([0, 4])
    assert not product.may_have_gaps("o") and product.may_have_gaps("v")
