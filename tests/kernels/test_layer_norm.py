"""LayerNorm of a residual stream against fp64; where there is no GPU the kernels run in the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library

from kernels.common import registering as operators
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
    """The gradients by x, weight, bias and a bias of x's in fp64."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    bias, added_bias = (torch.zeros_like(weight, requires_grad=True) for _ in range(2))
    total = x + added_bias
    outputs = total, F.layer_norm(total, x.shape[1:], weight, bias, EPS)
    return torch.autograd.grad(outputs, (x, weight, bias, added_bias), (dstream.double(), dout.double()))


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [definition, triton_kernels], ids=["definition", "Triton"])


def check_forward(implementation, shape: tuple[int, int], dtype: torch.dtype) -> None:
    _, _, x, weight, *_ = draw(*shape, dtype)
    bias = torch.randn_like(weight)
    found = implementation.forward(x, weight, bias, EPS)
    wanted = torch.native_layer_norm(x.double(), shape[1:], weight.double(), bias.double(), EPS)
    assert [y.dtype for y in found] == [dtype, torch.float32, torch.float32]
    assert all(is_rounded(ours, exact) for ours, exact in zip(found, wanted, strict=True))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (37, 48), (130, 64), (5, 1030), (3, 5000)], ids=str)
def test_results_are_fp64s_rounded(implementation, dtype, shape, monkeypatch):
    monkeypatch.setattr(triton_kernels, "ELEMENTS", 256)  # several rows to a tile, and a last one that is not whole
    monkeypatch.setattr(triton_kernels, "FORWARD_PROGRAMS", 2)  # and several tiles to a program where rows are long
    check_forward(implementation, shape, dtype)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (37, 48), (130, 64), (5, 1030), (3, 5000)], ids=str)
def test_gradients_are_fp64s_rounded(implementation, dtype, shape, monkeypatch):
    monkeypatch.setattr(triton_kernels, "PROGRAMS", 2)  # so that a program has several tiles
    monkeypatch.setattr(triton_kernels, "ELEMENTS", 256)
    inputs = draw(*shape, dtype)
    dx, sums = implementation.backward(*inputs, True)
    wanted, *wanted_sums = reference(*inputs[:4])
    assert dx.dtype == dtype and is_rounded(dx, wanted)
    for ours, exact in zip(sums, wanted_sums, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)
    assert all(map(torch.equal, implementation.backward(*inputs, False), (dx, sums[:2])))


@IMPLEMENTATIONS
def test_a_variance_is_that_around_the_mean(implementation):
    """Of rows 300 deviations from zero, whose mean of squares minus square of the mean has few digits left."""
    x = torch.randn(8, 96, device=DEVICE) + 300
    ones = torch.ones(96, device=DEVICE)
    *_, rstd = implementation.forward(x, ones, ones, EPS)
    wanted = torch.native_layer_norm(x.double(), (96,), None, None, EPS)[2]
    torch.testing.assert_close(rstd.double(), wanted, rtol=1e-5, atol=0)


def test_a_bias_of_another_width_is_refused():
    x, ones = torch.randn(8, 24, device=DEVICE), torch.ones(24, device=DEVICE)
    with pytest.raises(ValueError, match=r"an added_bias of shape \(1,\) is none of 24 columns"):
        normalise(x, ones, ones, EPS, ones[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 768), (20001, 1600), (8192, 2560), (700, 8192), (300, 9000)], ids=str)
def test_results_of_a_models_size_are_fp64s_rounded(shape):
    """Of a size that no tile divides, and wider than the kernels go."""
    check_forward(triton_kernels, shape, torch.bfloat16)
    inputs = draw(*shape, torch.bfloat16)
    found = triton_kernels.backward(*inputs, True)
    for ours, wanted in zip((found[0], *found[1]), reference(*inputs[:4]), strict=True):
        assert is_rounded(ours, wanted)
    assert all(map(torch.equal, found, triton_kernels.backward(*inputs, True))), "the sums' order is fixed"


@IMPLEMENTATIONS
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(24,), (3, 24, 5)], ids=str)
def test_gradients_reach_all_through_any_shape(implementation, shape, with_bias, monkeypatch):
    """As those of an addition of the bias, whose sum goes on beside its LayerNorm."""
    monkeypatch.setattr(operators, "implementation", lambda *_: implementation)
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE)
    x = (x.transpose(1, 2) if x.ndim > 1 else x).requires_grad_()  # not dense
    weight, added_bias = torch.randn(24, 2, device=DEVICE).requires_grad_().unbind(1)
    inputs = [x, weight, torch.randn(24, device=DEVICE, requires_grad=True)] + [added_bias] * with_bias
    found = normalise(*inputs[:3], EPS, *inputs[3:])
    total = sum(inputs[3:], x * 1)
    shift = added_bias.detach() if with_bias else 0  # which is in x already
    expected = total - shift, F.layer_norm(total - shift, (24,), *inputs[1:3], EPS)
    by = torch.randn(2, *x.shape, device=DEVICE)
    ours, theirs = (torch.autograd.grad(outputs, inputs, list(by)) for outputs in (found, expected))
    for mine, wanted in zip((*found, *ours), (*expected, *theirs), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


def test_results_are_in_the_streams_dtype_under_autocast_too():
    x = torch.randn(4, 8, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight, bias, added_bias = (torch.randn(8, device=DEVICE, requires_grad=True) for _ in range(3))
    with torch.autocast(DEVICE, torch.bfloat16):
        stream, out = normalise(x, weight, bias, EPS, added_bias)
    (stream + out).sum().backward()
    assert stream.dtype == out.dtype == x.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == bias.grad.dtype == added_bias.grad.dtype == torch.float32


@IMPLEMENTATIONS
@pytest.mark.parametrize("columns", [30, 64])
def test_the_operators_are_well_formed(implementation, columns, monkeypatch):
    """Their results share no memory: the compiler takes each for a tensor that begins at a multiple of 16 bytes."""
    monkeypatch.setattr(operators, "implementation", lambda *_: implementation)
    dout, dstream, x, weight, *statistics = draw(6, columns, torch.float32)
    for with_sum in (True, False):
        library.opcheck(torch.ops.layer_norm.backward.default, (dout, dstream, x, weight, *statistics, with_sum))
    library.opcheck(torch.ops.layer_norm.forward.default, (x, weight, weight + 1, EPS))
