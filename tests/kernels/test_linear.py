"""A linear layer against fp64, by the gradients of its weight above all."""

import pytest
import torch
import torch.nn.functional as F
from torch import library

from kernels.linear import linear, weight_gradient
from tests.kernels.accuracy import is_rounded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [(FP32, FP32), (BF16, FP32), (FP16, FP32), (BF16, BF16), (FP32, BF16)]  # of the input, of the weights


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_gradients_are_fp64s_rounded_once_to_the_dtype_of_what_they_are_of(dtypes, bias, autocast):
    dtype, weight_dtype = dtypes
    torch.manual_seed(0)
    x = torch.randn(3, 40, 50, device=DEVICE).to(dtype).transpose(1, 2).requires_grad_()  # not dense
    weight = torch.randn(24, 40, device=DEVICE).to(BF16).to(weight_dtype).requires_grad_()
    inputs = [x, weight]
    if bias:
        inputs.append(torch.randn(24, device=DEVICE).to(BF16).to(weight_dtype).requires_grad_())
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        out = linear(*inputs)
    dout = torch.randn(24, 3, 50, device=DEVICE).to(out.dtype).permute(1, 2, 0)
    exact = [t.detach().to(dtype).double().requires_grad_() for t in inputs]
    wanted = F.linear(*exact)
    assert out.dtype == dtype and is_rounded(out, wanted, 1.5)  # a CPU rounds before it adds the bias
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        found = torch.autograd.grad(out, inputs, dout)
    for gradient, of, reference in zip(found, inputs, torch.autograd.grad(wanted, exact, dout.double()), strict=True):
        assert gradient.dtype == of.dtype and is_rounded(gradient, reference)


def test_a_single_token_needs_no_dimension_of_its_own():
    x, weight = torch.randn(4, device=DEVICE, requires_grad=True), torch.randn(3, 4, device=DEVICE, requires_grad=True)
    found, expected = (torch.autograd.grad(of(x, weight).sum(), (x, weight)) for of in (linear, F.linear))
    torch.testing.assert_close(found, expected)


def test_the_operator_is_well_formed():
    dout, x = torch.randn(7, 5, device=DEVICE), torch.randn(7, 3, device=DEVICE)
    for dtype in (FP32, BF16):
        library.opcheck(torch.ops.linear.weight_gradient, (dout.to(dtype), x.to(dtype), FP32))
    with torch.autocast(DEVICE, BF16):
        assert weight_gradient(dout, x, FP32).dtype == FP32
