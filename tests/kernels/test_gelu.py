"""A linear layer with GELU against fp64; where there is no GPU the Triton kernels run in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

from kernels.gelu import definition, gelu_mlp, launch, triton_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x with values far out on both sides among its first, bias in fp32, and dout."""
    torch.manual_seed(columns)
    x, dout = 3 * torch.randn(rows, columns), torch.randn(rows, columns)
    x.flatten()[:3] = torch.tensor([-100.0, 100.0, 0.0])[: x.numel()]
    return x.to(DEVICE, dtype), torch.randn(columns, device=DEVICE), dout.to(DEVICE, dtype)


def draw_layers(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, weight and bias of the layer before GELU; weight of the one after, and the gradient of what that gives. No
    matrix is square, and the first row reaches far out."""
    torch.manual_seed(columns)
    x, weight = torch.randn(rows, depth), 3 * depth**-0.5 * torch.randn(columns, depth)
    x[0] *= 30
    out_weight, dout = columns**-0.5 * torch.randn(depth, columns), torch.randn(rows, depth)
    x, weight, out_weight, dout = (t.to(DEVICE, dtype) for t in (x, weight, out_weight, dout))
    return x, weight, torch.randn(columns, device=DEVICE), out_weight, dout


def poison(*tensors: torch.Tensor) -> None:
    """Leaves NaN in the memory that results of these sizes will get."""
    for x in tensors:
        torch.empty_like(x).fill_(float("nan"))


def is_rounded(found: torch.Tensor, wanted: torch.Tensor, roundings: float = 1) -> bool:
    """Whether the error of `found` is that of rounding fp64's result so many times, and fp32's on the way."""
    rounding = (wanted.to(found.dtype).double() - wanted).norm()
    return bool((found.double() - wanted).norm() <= 1.05 * roundings * rounding + 2e-6 * wanted.norm())


def check(implementation, rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, weight, bias, out_weight, dout = draw_layers(rows, columns, depth, dtype)
    poison(x @ weight.T, x @ weight.T)
    pre, out = implementation.forward(x, weight, bias)
    assert pre.dtype == out.dtype == dtype
    assert is_rounded(pre, x.double() @ weight.double().T)
    inputs = (pre.double() + bias.double()).requires_grad_()
    exact = F.gelu(inputs, approximate="tanh")
    assert is_rounded(out, exact.detach())
    (wanted,) = torch.autograd.grad(exact, inputs, dout.double() @ out_weight.double())
    for again in (False, True):
        poison(pre, pre, bias)
        dpre, dbias, made = implementation.backward(dout, out_weight, pre, bias, again)
        assert dpre.dtype == dtype and dbias.dtype == bias.dtype
        assert is_rounded(dpre, wanted, roundings=2**0.5)  # the product, then itself
        error = (dbias.double() - wanted.sum(0)).norm()
        assert error <= torch.finfo(dtype).eps * wanted.norm() + 1e-6 * wanted.abs().sum(0).norm()
        assert torch.equal(made, out) if again else made.numel() == 0


@pytest.mark.parametrize("implementation", [definition, launch], ids=["definition", "kernels"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 8, 3), (33, 192, 48), (70, 63, 16)])
def test_a_layer_and_its_gradients_are_fp64s_rounded(implementation, dtype, rows, columns, depth):
    check(implementation, rows, columns, depth, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(128, 256, 64), (1, 256, 8), (33, 512, 200), (1000, 3072, 768), (4097, 6400, 1600), (20001, 3072, 768)],
)
def test_hoppers_fused_products_are_fp64s_rounded(dtype, rows, columns, depth):
    """Ragged rows, a depth that no step divides, one tile, and more tiles than the GPU has room for at a time."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper alone")
    from kernels.gelu import hopper

    check(hopper, rows, columns, depth, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 63), (33, 192), (3, 1025), (70, 8)])
def test_plain_kernels_round_once(dtype, rows, columns, monkeypatch):
    monkeypatch.setattr(triton_kernels, "SLABS", 4)  # so that a program of the backward pass has several tiles of rows
    x, bias, dout = draw(rows, columns, dtype)
    inputs = (x.double() + bias.double()).requires_grad_()
    exact = F.gelu(inputs, approximate="tanh")
    (dx,) = torch.autograd.grad(exact, inputs, dout.double())
    out = triton_kernels.forward(x, bias)
    found_dx, found_dbias, again = triton_kernels.backward(dout, x, bias, True)
    assert out.dtype == found_dx.dtype == dtype and found_dbias.dtype == torch.float32
    assert torch.equal(again, out) and triton_kernels.backward(dout, x, bias, False)[2].numel() == 0
    assert is_rounded(out, exact.detach()) and is_rounded(found_dx, dx)
    # the sum is of unrounded terms, whatever the dtype
    torch.testing.assert_close(found_dbias.double(), dx.sum(0), rtol=1e-5, atol=1e-5 * rows)


@pytest.mark.parametrize("keep", [True, False])
def test_gradients_reach_all_parameters_through_any_shape(keep):
    x, weight, bias, _, _ = draw_layers(30, 24, 15, torch.float32)
    x = x.view(2, 15, 15).transpose(1, 2).requires_grad_()  # not dense
    out_weight, out_bias = torch.randn(7, 24, device=DEVICE), torch.randn(7, device=DEVICE)
    dout = torch.randn(7, 2, 15, device=DEVICE).permute(1, 2, 0)
    inputs = x, *(parameter.requires_grad_() for parameter in (weight, bias, out_weight, out_bias))
    found = gelu_mlp(*inputs, keep)
    expected = F.linear(F.gelu(F.linear(x, weight, bias), approximate="tanh"), out_weight, out_bias)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(out, inputs, dout) for out in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_operators_are_well_formed():
    x, weight, bias, out_weight, dout = draw_layers(6, 20, 5, torch.float32)
    torch.library.opcheck(torch.ops.gelu.forward, (x, weight, bias))
    for again in (False, True):
        torch.library.opcheck(torch.ops.gelu.backward, (dout, out_weight, x @ weight.T, bias, again))


def test_only_whole_tiles_of_enough_work_are_fused():
    shape = 131072, 3072, 768, torch.bfloat16
    assert launch.is_fused(*shape, "sm_90")
    assert not launch.is_fused(*shape, "sm_100") and not launch.is_fused(*shape[:3], torch.float32, "sm_90")
    assert not launch.is_fused(131072, 3072 + 128, 768, torch.bfloat16, "sm_90")
    assert not launch.is_fused(131072, 3072, 764, torch.bfloat16, "sm_90")
    assert not launch.is_fused(8, 3072, 768, torch.bfloat16, "sm_90"), "generation's"
