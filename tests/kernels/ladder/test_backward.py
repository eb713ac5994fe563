"""The backward steps of the ladder against fp64. Without a GPU, the first two run in Triton's interpreter."""

import pytest
import torch

from errors import UserError
from kernels.common.launching import triton_version
from kernels.flash2 import definition, dispatch
from kernels.flash2.options import Options
from kernels.ladder import BACKWARD, load, training
from model.attention import CustomConfig, check_attention
from tests.kernels.accuracy import Case, draw, exact, outcome
from tests.kernels.flash2_cases import BF16, F16, F32, KERNEL_DEVICE

FUNCTIONS = "split", "atomics", "tma_adds", "specialised_warps"


def assert_gradients(step: str, case: Case, device: str, packed: bool, tolerance: float) -> None:
    """Compare the gradients of a step with fp64. q, k and v are contiguous or views of one packed projection."""
    q, k, v, dout = inputs = draw(case, device)
    if packed:
        q, k, v = torch.stack((q, k, v), 2).unbind(2)
    forward = (definition if device == "cpu" else dispatch).forward
    out, logsumexp = forward(q, k, v, *Options(causal=case.causal, scale=case.head_dim**-0.5))
    grads = load(step).backward(dout, q, k, v, out, logsumexp, case.causal)
    for name, got, want in zip(("dq", "dk", "dv"), grads, exact(case, *inputs)[1:], strict=True):
        assert got.shape == want.shape and got.dtype == case.dtype and got.is_contiguous(), name
        error = (got.double() - want).norm(dim=-1)  # of each row, so that one wrong tile does not drown
        assert error.norm() < tolerance * want.norm(), name
        assert (error < 10 * tolerance * want.norm(dim=-1).mean()).all(), name


@pytest.mark.skipif(KERNEL_DEVICE != "cpu", reason="a GPU runs all steps")
@pytest.mark.parametrize("step", BACKWARD[:2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-5), (F16, 2e-3)], ids=str)
@pytest.mark.parametrize(("causal", "packed"), [(True, True), (False, False)])
def test_plain_steps_are_attention_in_the_interpreter(step, dtype, tolerance, causal, packed):
    """Two batches, two heads and several tiles of both kinds. The interpreter computes bf16 wrongly."""
    case = Case(2, 192, 192, head_dim=64, causal=causal, dtype=dtype)
    assert_gradients(step, case, "cpu", packed, tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(triton_version() < (3, 6), reason="needs Triton 3.6 or later")
@pytest.mark.parametrize("step", BACKWARD)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "packed"), [(BF16, True), (F16, False)], ids=str)
def test_steps_are_attention(step, head_dim, causal, dtype, packed):
    """The longer case has more programs than multiprocessors, and many programs that add to the same rows of dQ."""
    if step not in BACKWARD[:2] and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    for length, heads in ((128, 2), (256, 3), (1024, 16)):
        case = Case(2, length, length, heads, heads, head_dim, causal, dtype)
        assert_gradients(step, case, "cuda", packed, 1e-2)


@pytest.mark.skipif(KERNEL_DEVICE != "cpu", reason="the next test runs all functions on a GPU")
def test_a_function_trains_under_compile_with_any_scale_and_length():
    """The whole function is one graph. Sampling is refused, and the message says what to set."""
    case = Case(1, 100, 100, head_dim=64, dtype=F32)
    compiled = torch.compile(training.split, fullgraph=True, backend="aot_eager")
    assert_trains(compiled, case, "cpu", 1e-5)
    config = CustomConfig(function="kernels.ladder.training:split")
    kind = {"head_dim": 64, "dtype": F32, "dropout_p": 0.0, "device": torch.device("cpu"), "context_length": 128}
    check_attention(config, **kind)
    with pytest.raises(UserError, match="train.sample_tokens=0"):
        check_attention(config, **kind, sampling=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_on_a_cpu_that_it_needs_a_gpu(monkeypatch, name):
    """Triton's message was "0 active drivers"."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    case = Case(1, 128, 128, head_dim=64, dtype=F32)
    with pytest.raises(ValueError, match="the ladder's kernels need a GPU"):
        assert_trains(getattr(training, name), case, "cpu", 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(triton_version() < (3, 6), reason="needs Triton 3.6 or later")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_functions_train_under_compile(name, head_dim):
    if name in FUNCTIONS[2:] and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    torch.compiler.reset()  # all functions share one code object, and torch compiles one code object at most 8 times
    compiled = torch.compile(getattr(training, name), fullgraph=True)
    for length in (1000, 1024):
        assert_trains(compiled, Case(2, length, length, head_dim=head_dim, dtype=BF16), "cuda", 1e-2)


def assert_trains(attention, case: Case, device: str, tolerance: float) -> None:
    """Compare output and gradients with fp64 for parts of a packed projection and an unusual scale."""
    *qkv, dout = draw(case, device)
    qkv = torch.stack(qkv, 2)
    scale = 1.25 * case.head_dim**-0.5
    got = outcome(lambda q, k, v: attention(q, k, v, causal=case.causal, scale=scale), *qkv.unbind(2), dout)
    q, k, v = qkv.unbind(2)
    want = exact(case, q * 1.25, k, v, dout)
    for name, x, y, factor in zip(("out", "dq", "dk", "dv"), got, want, (1, 1.25, 1, 1), strict=True):
        assert (x.double() - factor * y).norm() < tolerance * (factor * y).norm(), name
