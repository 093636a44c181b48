"""Without a GPU the real Triton kernels run through Triton's interpreter, which must be chosen before triton is imported."""

import os

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

hypothesis.settings.register_profile("project", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("project")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
