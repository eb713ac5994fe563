"""GELU with its bias against fp64; where there is no GPU the Triton kernels run in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

from kernels.gelu import bias_gelu, definition, triton_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x with values far out on both sides among its first, bias in fp32, and dout."""
    torch.manual_seed(columns)
    x, dout = 3 * torch.randn(rows, columns), torch.randn(rows, columns)
    x.flatten()[:3] = torch.tensor([-100.0, 100.0, 0.0])[: x.numel()]
    return x.to(DEVICE, dtype), torch.randn(columns, device=DEVICE), dout.to(DEVICE, dtype)


@pytest.mark.parametrize("implementation", [definition, triton_kernels], ids=["definition", "Triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 63), (33, 192), (3, 1025), (70, 8)])
def test_results_are_fp64s_rounded(implementation, dtype, rows, columns, monkeypatch):
    monkeypatch.setattr(triton_kernels, "SLABS", 4)  # so that a program of the backward pass has several tiles of rows
    x, bias, dout = draw(rows, columns, dtype)
    inputs = (x.double() + bias.double()).requires_grad_()
    exact = F.gelu(inputs, approximate="tanh")
    (dx,) = torch.autograd.grad(exact, inputs, dout.double())
    out = implementation.forward(x, bias)
    found_dx, found_dbias, again = implementation.backward(dout, x, bias, True)
    assert out.dtype == found_dx.dtype == dtype and found_dbias.dtype == torch.float32
    assert torch.equal(again, out) and implementation.backward(dout, x, bias, False)[2].numel() == 0
    for found, wanted in ((out, exact), (found_dx, dx)):
        rounding = (wanted.to(dtype).double() - wanted).norm()
        assert (found.double() - wanted).norm() <= 1.05 * rounding + 1e-6 * wanted.norm()
    # the sum is of unrounded terms, whatever the dtype
    torch.testing.assert_close(found_dbias.double(), dx.sum(0), rtol=1e-5, atol=1e-5 * rows)


def test_gradients_reach_input_and_bias_through_any_shape():
    x, bias, dout = draw(30, 24, torch.float32)
    x, dout = x.view(2, 24, 15).transpose(1, 2), dout.view(2, 15, 24)  # x is not dense
    inputs = x.detach().requires_grad_(), bias.requires_grad_()
    found = torch.autograd.grad(bias_gelu(*inputs), inputs, dout)
    expected = torch.autograd.grad(F.gelu(inputs[0] + inputs[1], approximate="tanh"), inputs, dout)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_operators_are_well_formed():
    x, bias, dout = draw(6, 20, torch.float32)
    torch.library.opcheck(torch.ops.gelu.forward, (x, bias))
    for again in (False, True):
        torch.library.opcheck(torch.ops.gelu.backward, (dout, x, bias, again))
