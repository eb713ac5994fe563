"""LayerNorm after a residual branch against fp64; where there is no GPU the kernels run in the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library

from kernels import operators
from kernels.layer_norm import definition, normalise, triton_kernels
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


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [definition, triton_kernels], ids=["definition", "Triton"])


def check_forward(implementation, shape: tuple[int, int], dtype: torch.dtype, with_branch: bool) -> None:
    """Of every result that it is fp64's, rounded; what is normalised is the sum after its own rounding."""
    _, branch, x, weight, *_ = draw(*shape, dtype)
    bias, branch = torch.randn_like(weight), branch if with_branch else None
    stream, *found = implementation.forward(x, branch, weight, bias, EPS)
    if with_branch:
        assert torch.equal(stream, x + branch)
    else:
        assert stream.numel() == 0
    rows = (stream if with_branch else x).double()
    wanted = torch.native_layer_norm(rows, shape[1:], weight.double(), bias.double(), EPS)
    assert [y.dtype for y in found] == [dtype, torch.float32, torch.float32]
    assert all(is_rounded(ours, exact) for ours, exact in zip(found, wanted, strict=True))


@IMPLEMENTATIONS
@pytest.mark.parametrize("with_branch", [True, False], ids=["branch", "alone"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (37, 48), (130, 64), (5, 1030), (3, 5000)], ids=str)
def test_the_sum_and_what_is_normalised_are_fp64s_rounded(implementation, dtype, shape, with_branch, monkeypatch):
    monkeypatch.setattr(triton_kernels, "ELEMENTS", 256)  # several rows to a tile, and a last one that is not whole
    monkeypatch.setattr(triton_kernels, "FORWARD_PROGRAMS", 2)  # and several tiles to a program where rows are long
    check_forward(implementation, shape, dtype, with_branch)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (37, 48), (130, 64), (5, 1030), (3, 5000)], ids=str)
def test_gradients_are_fp64s_rounded(implementation, dtype, shape, monkeypatch):
    monkeypatch.setattr(triton_kernels, "PROGRAMS", 2)  # so that a program has several tiles
    monkeypatch.setattr(triton_kernels, "ELEMENTS", 256)
    inputs = draw(*shape, dtype)
    dx, dweight, dbias = implementation.backward(*inputs)
    wanted, wanted_weight, wanted_bias = reference(*inputs[:4])
    assert dx.dtype == dtype and dweight.dtype == dbias.dtype == torch.float32
    assert is_rounded(dx, wanted)
    torch.testing.assert_close(dweight.double(), wanted_weight, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dbias.double(), wanted_bias, rtol=1e-5, atol=1e-4)


@IMPLEMENTATIONS
def test_a_variance_is_that_around_the_mean(implementation):
    """Of rows 300 deviations from zero, whose mean of squares minus square of the mean has few digits left."""
    x = torch.randn(8, 96, device=DEVICE) + 300
    ones = torch.ones(96, device=DEVICE)
    *_, rstd = implementation.forward(x, None, ones, ones, EPS)
    wanted = torch.native_layer_norm(x.double(), (96,), None, None, EPS)[2]
    torch.testing.assert_close(rstd.double(), wanted, rtol=1e-5, atol=0)


@IMPLEMENTATIONS
def test_a_branch_may_be_of_another_dtype_and_layout_but_of_no_other_shape(implementation, monkeypatch):
    monkeypatch.setattr(operators, "implementation", lambda *_: implementation)
    x, branch = torch.randn(8, 24, device=DEVICE), torch.randn(24, 8, device=DEVICE, dtype=torch.float64).t()
    ones = torch.ones(24, device=DEVICE)
    for inputs in ((x, branch), (branch, x)):
        stream, out = normalise(inputs[0], ones, ones, EPS, inputs[1])
        assert stream.dtype == out.dtype == inputs[0].dtype
        total = inputs[0] + inputs[1].to(inputs[0].dtype)
        torch.testing.assert_close(stream, total)
        torch.testing.assert_close(out, F.layer_norm(total, (24,), ones.to(total), ones.to(total), EPS))
    with pytest.raises(ValueError, match=r"a branch of shape \(1, 24\) cannot end on x of shape \(8, 24\)"):
        normalise(x, ones, ones, EPS, x[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 768), (20001, 1600), (8192, 2560), (700, 8192), (300, 9000)], ids=str)
def test_results_of_a_models_size_are_fp64s_rounded(shape):
    """Of a size that no tile divides, and wider than the kernels go."""
    check_forward(triton_kernels, shape, torch.bfloat16, with_branch=True)
    inputs = draw(*shape, torch.bfloat16)
    found = triton_kernels.backward(*inputs)
    for ours, wanted in zip(found, reference(*inputs[:4]), strict=True):
        assert is_rounded(ours, wanted)
    assert all(map(torch.equal, found, triton_kernels.backward(*inputs))), "the sums' order is fixed"


@IMPLEMENTATIONS
@pytest.mark.parametrize("with_branch", [True, False], ids=["branch", "alone"])
def test_gradients_reach_all_through_any_shape(implementation, with_branch, monkeypatch):
    """As those of an addition, whose sum goes on beside its LayerNorm."""
    monkeypatch.setattr(operators, "implementation", lambda *_: implementation)
    torch.manual_seed(0)
    x, branch = (torch.randn(3, 24, 5, device=DEVICE).transpose(1, 2).requires_grad_() for _ in range(2))  # not dense
    weight = torch.randn(24, 2, device=DEVICE).requires_grad_()[:, 0]
    inputs = [x, weight, torch.randn(24, device=DEVICE, requires_grad=True)] + ([branch] if with_branch else [])
    found = normalise(x, *inputs[1:3], EPS, *inputs[3:])
    total = x + branch if with_branch else x * 1
    expected = total, F.layer_norm(total, (24,), *inputs[1:3], EPS)
    by = torch.randn(2, 3, 5, 24, device=DEVICE)
    ours, theirs = (torch.autograd.grad(outputs, inputs, list(by)) for outputs in (found, expected))
    for mine, wanted in zip((*found, *ours), (*expected, *theirs), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


def test_results_are_in_the_streams_dtype_under_autocast_too():
    x, branch = (torch.randn(4, 8, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(8, device=DEVICE, requires_grad=True) for _ in range(2))
    with torch.autocast(DEVICE, torch.bfloat16):
        stream, out = normalise(x, weight, bias, EPS, branch)
    (stream + out).sum().backward()
    assert stream.dtype == out.dtype == x.grad.dtype == branch.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == bias.grad.dtype == torch.float32


@IMPLEMENTATIONS
@pytest.mark.parametrize("columns", [30, 64])
def test_the_operators_are_well_formed(implementation, columns, monkeypatch):
    """Their results share no memory: the compiler takes each for a tensor that begins at a multiple of 16 bytes."""
    monkeypatch.setattr(operators, "implementation", lambda *_: implementation)
    dout, branch, x, weight, *statistics = draw(6, columns, torch.float32)
    library.opcheck(torch.ops.layer_norm.backward.default, (dout, branch, x, weight, *statistics))
    for added in (branch, None):
        library.opcheck(torch.ops.layer_norm.forward.default, (x, added, weight, weight + 1, EPS))
