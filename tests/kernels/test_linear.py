"""A linear layer against fp64, above all the gradient of its weight."""

import pytest
import torch
import torch.nn.functional as F
from torch import library

from kernels.hopper import selection
from kernels.linear import launch, linear
from tests.kernels.accuracy import is_rounded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [(FP32, FP32), (BF16, FP32), (FP16, FP32), (BF16, BF16), (FP32, BF16)]  # of the input, of the weights
ADDED = "bias", "bias and residual"
ROUNDINGS = {False: 1.5, True: 1.6}  # of product, bias and sum; with a residual one more; in units of the last one


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_gradients_match_fp64_rounded_once_to_their_own_dtype(dtypes, added, autocast):
    dtype, weight_dtype = dtypes
    torch.manual_seed(0)
    x = torch.randn(3, 40, 50, device=DEVICE).to(dtype).transpose(1, 2).requires_grad_()  # not dense
    weight = torch.randn(24, 40, device=DEVICE).to(BF16).to(weight_dtype).requires_grad_()
    inputs = [x, weight, torch.randn(24, device=DEVICE).to(BF16).to(weight_dtype).requires_grad_()]
    if "residual" in added:
        residual = torch.randn(24, 3, 50, device=DEVICE).to(BF16).to(weight_dtype)
        inputs.append(residual.permute(1, 2, 0).requires_grad_())
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        out = linear(*inputs)
    dout = torch.randn(24, 3, 50, device=DEVICE).to(out.dtype).permute(1, 2, 0)
    exact = [t.detach().to(dtype).double().requires_grad_() for t in inputs]
    wanted = F.linear(*exact[:3]) + sum(exact[3:])
    assert out.dtype == dtype and is_rounded(out, wanted, ROUNDINGS["residual" in added])
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        found = torch.autograd.grad(out, inputs, dout)
    for gradient, of, reference in zip(found, inputs, torch.autograd.grad(wanted, exact, dout.double()), strict=True):
        assert gradient.dtype == of.dtype and is_rounded(gradient, reference)


def test_a_single_token_may_be_a_vector():
    shapes = (4,), (3, 4), (3,)
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    found, expected = (torch.autograd.grad(of(*inputs).sum(), inputs) for of in (linear, F.linear))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("which", "shape"), [(0, (6, 3)), (1, (5, 3)), (2, (1,)), (3, (4,)), (3, (5, 4))], ids=str)
def test_shapes_that_do_not_fit_are_refused(which, shape):
    """Hopper's kernel would read zeros past the end of a row, or memory beyond the end of a residual."""
    inputs = [torch.zeros(of, device=DEVICE) for of in ((6, 5), (4, 5), (4,), (6, 4))]
    inputs[which] = torch.zeros(shape, device=DEVICE)
    with pytest.raises(ValueError, match=r"the shapes \(.* do not fit; give linear x \(..., D\), weight \(C, D\)"):
        linear(*inputs)


# Ragged rows, a depth that no step divides, one tile, and more tiles than run at a time.
LARGE_SHAPES = [(128, 256, 64), (1, 256, 8), (33, 512, 200), (40000, 256, 64), (20001, 768, 3072), (4097, 2304, 768)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
def test_hoppers_products_match_fp64_up_to_rounding(dtype, shape):
    """The product is rounded once more than in the definition. The output's memory is poisoned first."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    from kernels.linear import hopper

    rows, columns, depth = shape
    torch.manual_seed(columns)
    x, weight = torch.randn(rows, depth), depth**-0.5 * torch.randn(columns, depth)
    x, weight, residual = (t.to(DEVICE, dtype) for t in (x, weight, torch.randn(rows, columns)))
    bias = torch.randn(columns, device=DEVICE)
    for added in (residual, None):
        poison = torch.full_like(residual, float("nan"))
        del poison  # the allocator reuses its memory for the result
        found = hopper.forward(x, weight, bias, added)
        exact = F.linear(x.double(), weight.double(), bias.double()) + (0 if added is None else added.double())
        assert found.dtype == dtype and is_rounded(found, exact, ROUNDINGS[added is not None])


@pytest.mark.gpu
def test_large_products_are_fused_unless_hopper_cannot_read_them(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    from kernels.linear import hopper

    ran = []
    monkeypatch.setattr(hopper, "forward", lambda *of, forward=hopper.forward: ran.append(1) or forward(*of))
    x, weight = torch.randn(8000, 768, device=DEVICE).to(BF16), (0.04 * torch.randn(768, 768, device=DEVICE)).to(BF16)
    bias, residual = torch.randn(768, device=DEVICE), torch.randn(8000, 768, device=DEVICE).to(BF16)
    shifted = torch.cat([residual.flatten(), x.new_zeros(1)])[1:].view_as(residual)  # an address that TMA cannot read
    for number, (rows, added) in enumerate([(x, residual), (x, None), (x, shifted), (x[:8], residual[:8])]):
        found = launch.forward(rows, weight, bias, added)
        assert len(ran) == min(number + 1, 2)
        exact = rows.double() @ weight.double().T + bias.double()
        assert is_rounded(found, exact + (0 if added is None else added.double()), ROUNDINGS[added is not None])


def test_the_path_through_cublas_computes_the_same_layer(monkeypatch):
    """Other GPUs take this path. Here it runs on any device."""
    monkeypatch.setattr(selection, "fuses_whole_tiles", lambda *of: False)
    torch.manual_seed(0)
    x, weight, residual = (torch.randn(shape, device=DEVICE) for shape in ((7, 5), (3, 5), (7, 3)))
    bias = torch.randn(3, device=DEVICE, dtype=torch.float64)
    for added in (None, residual):
        before = None if added is None else added.clone()
        exact = F.linear(x.double(), weight.double(), bias) + (0 if added is None else added.double())
        torch.testing.assert_close(launch.forward(x, weight, bias, added), exact.float())
        assert added is None or torch.equal(added, before), "the residual must not be overwritten"


@pytest.mark.parametrize("forward", [linear, launch.forward], ids=["device path", "cuBLAS"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_tiny_bias_does_not_decide_how_sums_are_rounded(dtype, forward, monkeypatch):
    """A model's biases are tiny after its first steps. They once broke all ties between two roundings.

    This changed the residual stream of GPT-2 by half a percent, and the loss of its second step by 0.008 nats.
    """
    if forward is launch.forward:
        monkeypatch.setattr(selection, "fuses_whole_tiles", lambda *of: False)
    torch.manual_seed(0)
    x, weight, residual = torch.randn(8000, 64), 0.01 * torch.randn(768, 64), torch.randn(8000, 768)
    x, weight, residual = (t.to(DEVICE, dtype) for t in (x, weight, residual))
    bias = torch.full((768,), 1e-6, device=DEVICE)
    before = residual.clone()
    for sign in (1, -1):
        error = forward(x, weight, sign * bias, residual).double() - (F.linear(x.double(), weight.double()) + residual)
        assert abs(error.mean()) < 4e-6
    assert torch.equal(residual, before), "the residual must not be overwritten"


def test_the_operators_are_well_formed():
    dout, x = torch.randn(7, 5, device=DEVICE), torch.randn(7, 3, device=DEVICE)
    for residual in (None, dout):
        library.opcheck(torch.ops.linear.forward, (x, torch.randn(5, 3, device=DEVICE), dout[0], residual))
    for dtype in (FP32, BF16):
        library.opcheck(torch.ops.linear.weight_gradient, (dout.to(dtype), x.to(dtype), FP32))
    with torch.autocast(DEVICE, BF16):
        assert torch.ops.linear.weight_gradient(dout, x, FP32).dtype == FP32
