"""LayerNorm of a residual stream against fp64. Without a GPU the kernels run in the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library

from kernels.common import registering
from kernels.layer_norm import definition, normalise, triton_kernels
from tests.kernels.accuracy import is_rounded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def draw(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return dout, dstream, x, weight, mean and rstd. Rows of x have different scales, and their means are not zero."""
    torch.manual_seed(columns)
    scale = torch.logspace(-1, 1, rows, device=DEVICE)[:, None]
    dout, dstream, x = (torch.randn(rows, columns, device=DEVICE) for _ in range(3))
    x, weight = ((x + 3) * scale).to(dtype), 1 + torch.randn(columns, device=DEVICE)
    _, mean, rstd = torch.native_layer_norm(x.float(), (columns,), None, None, EPS)
    return dout.to(dtype), dstream.to(dtype), x, weight, mean, rstd


def reference(dout: Tensor, dstream: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients by x, weight, bias and added_bias in fp64."""
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
def test_results_match_fp64_up_to_rounding(implementation, dtype, shape, monkeypatch):
    monkeypatch.setattr(triton_kernels, "ELEMENTS", 256)  # several rows per tile, and a partial last tile
    monkeypatch.setattr(triton_kernels, "FORWARD_PROGRAMS", 2)  # and several tiles per program for long rows
    check_forward(implementation, shape, dtype)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (37, 48), (130, 64), (5, 1030), (3, 5000)], ids=str)
def test_gradients_match_fp64_up_to_rounding(implementation, dtype, shape, monkeypatch):
    monkeypatch.setattr(triton_kernels, "PROGRAMS", 2)  # several tiles per program
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
def test_the_variance_is_computed_around_the_mean(implementation):
    """The mean of rows is 300 deviations. The mean of squares minus the squared mean would lose most digits."""
    x = torch.randn(8, 96, device=DEVICE) + 300
    ones = torch.ones(96, device=DEVICE)
    *_, rstd = implementation.forward(x, ones, ones, EPS)
    wanted = torch.native_layer_norm(x.double(), (96,), None, None, EPS)[2]
    torch.testing.assert_close(rstd.double(), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["weight", "bias", "added_bias"])
def test_a_weight_or_bias_of_another_width_is_refused(name):
    """The kernel would read past its end."""
    x, ones = torch.randn(8, 24, device=DEVICE), torch.ones(24, device=DEVICE)
    given = {"weight": ones, "bias": ones, "added_bias": ones} | {name: ones[:1]}
    with pytest.raises(ValueError, match=rf"^{name} is \(1,\); for x \(..., 24\), give \(24,\)"):
        normalise(x, eps=EPS, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 768), (20001, 1600), (8192, 2560), (700, 8192), (300, 9000)], ids=str)
def test_results_at_the_size_of_a_model_match_fp64_up_to_rounding(shape):
    """The sizes include one that no tile divides, and rows that are too wide for the kernels."""
    check_forward(triton_kernels, shape, torch.bfloat16)
    inputs = draw(*shape, torch.bfloat16)
    found = triton_kernels.backward(*inputs, True)
    for ours, wanted in zip((found[0], *found[1]), reference(*inputs[:4]), strict=True):
        assert is_rounded(ours, wanted)
    assert all(map(torch.equal, found, triton_kernels.backward(*inputs, True))), "the sums' order is fixed"


@IMPLEMENTATIONS
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(24,), (3, 24, 5)], ids=str)
def test_gradients_match_torch_for_any_shape(implementation, shape, with_bias, monkeypatch):
    """The reference adds the bias and uses both the sum and its LayerNorm."""
    monkeypatch.setattr(registering, "implementation", lambda *_: implementation)
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE)
    x = (x.transpose(1, 2) if x.ndim > 1 else x).requires_grad_()  # not dense
    weight, added_bias = torch.randn(24, 2, device=DEVICE).requires_grad_().unbind(1)
    inputs = [x, weight, torch.randn(24, device=DEVICE, requires_grad=True)] + [added_bias] * with_bias
    found = normalise(*inputs[:3], EPS, *inputs[3:])
    total = sum(inputs[3:], x * 1)
    shift = added_bias.detach() if with_bias else 0  # x already contains it
    expected = total - shift, F.layer_norm(total - shift, (24,), *inputs[1:3], EPS)
    by = torch.randn(2, *x.shape, device=DEVICE)
    ours, theirs = (torch.autograd.grad(outputs, inputs, list(by)) for outputs in (found, expected))
    for mine, wanted in zip((*found, *ours), (*expected, *theirs), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


def test_autocast_does_not_change_the_dtype_of_the_stream():
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
    """Results share no memory: the compiler assumes that each one starts at a multiple of 16 bytes."""
    monkeypatch.setattr(registering, "implementation", lambda *_: implementation)
    dout, dstream, x, weight, *statistics = draw(6, columns, torch.float32)
    for with_sum in (True, False):
        library.opcheck(torch.ops.layer_norm.backward.default, (dout, dstream, x, weight, *statistics, with_sum))
    library.opcheck(torch.ops.layer_norm.forward.default, (x, weight, weight + 1, EPS))
