"""Settings of all tests. Without a GPU, Triton kernels run in Triton's interpreter, set before Triton is imported."""

import gc
import os
import shutil
import signal
from collections.abc import Iterator

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # Two test processes share the cores, and their waiting threads spin.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # A shell ignores it in background jobs, and children inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import numpy
import pytest
from hypothesis import Phase, settings
from playwright.sync_api import Browser, sync_playwright
from torch.utils._triton import has_triton_package


def pytest_configure():
    if os.environ.get("TRITON_INTERPRET") and has_triton_package():
        import triton

        versions = [tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, numpy)]
        if versions[0] < (3, 7) and versions[1] >= (2, 4):
            pytest.exit(f"the interpreter of Triton {triton.__version__} needs numpy<2.4; pip install 'numpy<2.4'", 4)


# A kernel call takes a second in the interpreter. Without the shrink phase, a failing example is reported as it was
# drawn; the search for a smaller one would exceed the test's time limit and report nothing.
settings.register_profile("kernels", deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))


# torch lists its factory functions when a device is first used as a context. Do that before a test patches them.
with torch.device("meta"):
    torch.empty(0)

# At the first backward of a process, autograd starts a thread for each device. Forks (tests.e2e.Fork) cannot run a
# backward after that. Without a GPU, fake tensors (FSDP, torch.compile) make autograd count 8 devices. So run a
# backward before the tests.
if not torch.cuda.is_available():
    torch.ones((), requires_grad=True).backward()


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fill torch.empty and empty_like with NaN, so that a kernel fails if it leaves an element unwritten."""

    def poison(allocate):
        def allocate_poisoned(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.is_meta:
                tensor.detach().fill_(float("nan"))
            return tensor

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start the Chromium that CHROMIUM names, or one on the path. Skip the tests if neither exists."""
    installed = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    path = os.environ.get("CHROMIUM") or next(filter(None, installed), None)
    if path is None:
        pytest.skip("needs Chromium: install it, or name it by CHROMIUM=/path/to/chromium")
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync")
    arguments = ["--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in quiet)]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def no_traces_in_gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Return the memory that a GPU test has freed, so that several processes of pytest can share a GPU. Forget its
    peak, which a later run in the same process would report as its own.
    """
    yield
    if request.node.get_closest_marker("gpu"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
