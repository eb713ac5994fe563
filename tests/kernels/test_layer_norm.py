"""LayerNorm beside its residual stream against fp64; where there is no GPU the kernel runs in the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library

from kernels import operators
from kernels.layer_norm import definition, normalise, triton_kernel
from tests.kernels.accuracy import is_rounded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def draw(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """dout, dstream, x, weight, mean and rstd; rows lie far from zero, each at a scale of its own."""
    torch.manual_seed(columns)
    scale = torch.logspace(-1, 1, rows, device=DEVICE)[:, None]
    dout, dstream, x = (torch.randn(rows, columns, device=DEVICE) for _ in range(3))
    x, weight = ((x + 3) * scale).to(dtype), 1 + torch.randn(columns, device=DEVICE)
    _, mean, rstd = torch.native_layer_norm(x.float(), (columns,), None, None, EPS)
    return dout.to(dtype), dstream.to(dtype), x, weight, mean, rstd


def reference(dout: Tensor, dstream: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The gradients by x, weight and bias in fp64."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    bias = torch.zeros_like(weight, requires_grad=True)
    outputs = x * 1, F.layer_norm(x, x.shape[1:], weight, bias, EPS)
    return torch.autograd.grad(outputs, (x, weight, bias), (dstream.double(), dout.double()))


@pytest.mark.parametrize("implementation", [definition, triton_kernel], ids=["definition", "Triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (37, 48), (130, 64), (5, 1030), (3, 5000)], ids=str)
def test_gradients_are_fp64s_rounded(implementation, dtype, shape, monkeypatch):
    monkeypatch.setattr(triton_kernel, "PROGRAMS", 2)  # so that a program has several tiles
    monkeypatch.setattr(triton_kernel, "ELEMENTS", 256)
    inputs = draw(*shape, dtype)
    dx, dweight, dbias = implementation.backward(*inputs)
    wanted, wanted_weight, wanted_bias = reference(*inputs[:4])
    assert dx.dtype == dtype and dweight.dtype == dbias.dtype == torch.float32
    assert is_rounded(dx, wanted)
    torch.testing.assert_close(dweight.double(), wanted_weight, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dbias.double(), wanted_bias, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 768), (20001, 1600), (8192, 2560), (700, 8192), (300, 9000)], ids=str)
def test_gradients_of_a_models_size_are_fp64s_rounded(shape):
    """Of a size that no tile divides, and wider than the kernel goes."""
    inputs = draw(*shape, torch.bfloat16)
    found = triton_kernel.backward(*inputs)
    for ours, wanted in zip(found, reference(*inputs[:4]), strict=True):
        assert is_rounded(ours, wanted)
    assert all(map(torch.equal, found, triton_kernel.backward(*inputs))), "the sums' order is fixed"


@pytest.mark.parametrize("implementation", [definition, triton_kernel], ids=["definition", "Triton"])
def test_gradients_reach_all_through_any_shape(implementation, monkeypatch):
    """As those of the addition of what goes on to what is normalised."""
    monkeypatch.setattr(operators, "implementation", lambda *_: implementation)
    torch.manual_seed(0)
    x = torch.randn(3, 24, 5, device=DEVICE).transpose(1, 2).requires_grad_()  # not dense
    weight = torch.randn(24, 2, device=DEVICE).requires_grad_()[:, 0]
    inputs = x, weight, torch.randn(24, device=DEVICE, requires_grad=True)
    stream, found = normalise(*inputs, EPS)
    expected = F.layer_norm(x, (24,), *inputs[1:], EPS)
    assert torch.equal(stream, x)
    torch.testing.assert_close(found, expected)
    by = torch.randn(2, 3, 5, 24, device=DEVICE)
    ours, theirs = (torch.autograd.grad(outputs, inputs, list(by)) for outputs in ((stream, found), (x * 1, expected)))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_results_are_in_the_streams_dtype_under_autocast_too():
    x = torch.randn(4, 8, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (torch.randn(8, device=DEVICE, requires_grad=True) for _ in range(2))
    with torch.autocast(DEVICE, torch.bfloat16):
        stream, out = normalise(x, weight, bias, EPS)
    (stream + out).sum().backward()
    assert stream.dtype == out.dtype == x.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == bias.grad.dtype == torch.float32


@pytest.mark.parametrize("implementation", [definition, triton_kernel], ids=["definition", "Triton"])
@pytest.mark.parametrize("columns", [30, 64])
def test_the_operator_is_well_formed(implementation, columns, monkeypatch):
    """Its results share no memory: the compiler takes each for a tensor that begins at a multiple of 16 bytes."""
    monkeypatch.setattr(operators, "implementation", lambda *_: implementation)
    library.opcheck(torch.ops.layer_norm.backward.default, draw(6, columns, torch.float32))
