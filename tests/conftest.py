"""Where there is no GPU, Triton kernels run in Triton's interpreter; that is chosen when Triton is first imported."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # the tests run side by side, and threads of two that wait spin

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import numpy
import pytest
from hypothesis import Phase, settings
from torch.utils._triton import has_triton_package


def pytest_configure():
    if os.environ.get("TRITON_INTERPRET") and has_triton_package():
        import triton

        versions = [tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, numpy)]
        if versions[0] < (3, 7) and versions[1] >= (2, 4):
            pytest.exit(f"the interpreter of Triton {triton.__version__} needs numpy<2.4; pip install 'numpy<2.4'", 4)


# In the interpreter a kernel takes a second a call: what fails is told as it was drawn, since looking for something
# smaller would outlast the test's time, and nothing would be told.
settings.register_profile("kernels", deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))


# torch lists its factory functions when a device is first used as a context: before any test has patched them.
with torch.device("meta"):
    torch.empty(0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """torch.empty and empty_like full of NaN, so that a kernel that leaves an element unwritten cannot pass."""

    def poison(allocate):
        def allocate_poisoned(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.is_meta:
                tensor.detach().fill_(float("nan"))
            return tensor

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
