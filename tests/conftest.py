"""Where there is no GPU, Triton kernels run in Triton's interpreter; that is chosen when Triton is first imported."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # the tests run side by side, and threads of two that wait spin

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

# torch lists its factory functions when a device is first used as a context: before any test has patched them.
with torch.device("meta"):
    torch.empty(0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """torch.empty and empty_like full of NaN, so that a kernel that leaves an element unwritten cannot pass."""

    def poison(allocate):
        def allocate_poisoned(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
