"""A linear layer with GELU against fp64. Without a GPU the Triton kernels run in the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import library

from kernels.common import launching
from kernels.gelu import definition, gelu_mlp, launch, triton_kernels
from kernels.hopper import selection
from tests.kernels.accuracy import is_rounded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 8, 3), (33, 192, 48), (70, 63, 16)]  # rows, columns, depth
# Ragged rows, a depth that no step divides, one tile, more tiles than run at a time, and several tiles per program with
# one or two steps each.
LARGE_SHAPES = [(128, 256, 64), (1, 256, 8), (33, 512, 200), (40000, 256, 64), (20000, 512, 128)]
LARGE_SHAPES += [(1000, 3072, 768), (4097, 6400, 1600), (20001, 3072, 768)]


def draw(
    rows: int, columns: int, depth: int, dtype: torch.dtype, bias_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """Return x, weight and bias of the layer before GELU, and weight and output gradient of the layer after it.

    The first row of x has large values.
    """
    torch.manual_seed(columns)
    x, weight = torch.randn(rows, depth), 3 * depth**-0.5 * torch.randn(columns, depth)
    x[0] *= 30
    out_weight, dout = columns**-0.5 * torch.randn(depth, columns), torch.randn(rows, depth)
    x, weight, out_weight, dout = (t.to(DEVICE, dtype) for t in (x, weight, out_weight, dout))
    return x, weight, torch.randn(columns).to(DEVICE, bias_dtype), out_weight, dout


def gelu_and_slope(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = x.double().requires_grad_()
    out = F.gelu(inputs, approximate="tanh")
    return out.detach(), torch.autograd.grad(out.sum(), inputs)[0]


def check(implementation, rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, weight, bias, out_weight, dout = draw(rows, columns, depth, dtype)
    product = dout.double() @ out_weight.double()
    saved, out = implementation.forward(x, weight, bias, False)
    assert saved.dtype == out.dtype == dtype and is_rounded(saved, x.double() @ weight.double().T, 1.5)
    expected, expected_slope = gelu_and_slope(saved.double() + bias.double())
    assert is_rounded(out, expected)
    slope, same = implementation.forward(x, weight, bias, True)
    assert torch.equal(same, out) and is_rounded(slope, expected_slope)
    for keep_output, kept in ((False, saved), (True, slope)):
        wanted = product * (kept.double() if keep_output else expected_slope)
        dpre, sums, recomputed = implementation.backward(dout, out_weight, bias, kept, keep_output)
        assert dpre.dtype == dtype and sums.dtype == torch.float32
        assert is_rounded(dpre, wanted, roundings=2**0.5)  # the product is rounded, then dpre
        # One rounding of a term costs 0.5 eps at most and 0.21 on average. A second one would make it 0.3.
        share = 0.25 if rows > 100 else 0.5
        error = (sums.double() - wanted.sum(0)).norm()
        assert error <= share * torch.finfo(dtype).eps * wanted.norm() + 1e-6 * wanted.abs().sum(0).norm()
        assert recomputed.numel() == 0 if keep_output else torch.equal(recomputed, out)


@pytest.mark.parametrize("implementation", [definition, launch], ids=["definition", "kernels"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layers_and_their_gradients_match_fp64_up_to_rounding(implementation, dtype, shape, monkeypatch):
    monkeypatch.setattr(triton_kernels, "SLABS", 4)  # several tiles per backward program
    check(implementation, *shape, dtype)


@pytest.mark.parametrize("implementation", [definition, launch], ids=["definition", "kernels"])
def test_zero_rows_give_zero_gradients(implementation):
    rows, weight, bias = torch.empty(0, 96, device=DEVICE), torch.randn(96, 96), torch.randn(96)
    dpre, sums, recomputed = implementation.backward(rows, weight.to(DEVICE), bias.to(DEVICE), rows, False)
    assert dpre.shape == recomputed.shape == (0, 96) and sums.eq(0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
def test_hoppers_products_match_fp64_up_to_rounding(dtype, shape):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    from kernels.gelu import hopper

    check(hopper, *shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_products_are_fused_unless_hopper_cannot_read_them(bias_dtype, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    from kernels.gelu import hopper

    ran = []
    monkeypatch.setattr(
        hopper, "launch_product", lambda *args, launch=hopper.launch_product: ran.append(1) or launch(*args)
    )
    x, weight, bias, _, _ = draw(2000, 3072, 768, torch.bfloat16, bias_dtype)
    fused = launch.forward(x, weight, bias, False)
    shifted = torch.cat([x.flatten(), x.new_zeros(1)])[1:].view_as(x)  # an address that TMA cannot read
    spread = torch.stack([bias, bias], 1)[:, 0]
    others = [
        launch.forward(*of, False) for of in ((shifted, weight, bias), (x, weight, spread), (x[:8], weight, bias))
    ]
    assert len(ran) == 1
    exact = x.double() @ weight.double().T
    for saved, out in (fused, others[1]):
        assert is_rounded(saved, exact, 1.5) and is_rounded(out, gelu_and_slope(saved.double() + bias.double())[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keep_output", [True, False])
def test_plain_kernels_round_once(dtype, keep_output):
    """Covers large values of both signs. The sums are of unrounded terms in every dtype."""
    torch.manual_seed(0)
    x, dout = (3 * torch.randn(37, 65)).to(DEVICE, dtype), torch.randn(37, 65).to(DEVICE, dtype)
    x.flatten()[:3] = torch.tensor([-100.0, 100.0, 0.0])
    saved, bias = x.clone(), torch.randn(65, device=DEVICE)
    out = triton_kernels.forward_(saved, bias, keep_output)
    expected, slope = gelu_and_slope(x.double() + bias.double())
    assert is_rounded(out, expected) and (is_rounded(saved, slope) if keep_output else torch.equal(saved, x))
    dx, sums, _ = triton_kernels.backward(dout, saved, bias, keep_output)
    wanted = dout.double() * (saved.double() if keep_output else slope)
    assert is_rounded(dx, wanted)
    torch.testing.assert_close(sums.double(), wanted.sum(0), rtol=1e-5, atol=4e-4)


@pytest.mark.parametrize("shape", [(2, 15), (1,), ()], ids=str)
@pytest.mark.parametrize("keep_output", [True, False])
def test_gradients_match_torch_for_any_shape(keep_output, shape):
    _, weight, bias, _, _ = draw(30, 24, 15, torch.float32)
    x = torch.randn(15, *shape, device=DEVICE).movedim(0, -1).requires_grad_()  # not dense
    out_weight, out_bias = torch.randn(7, 24, device=DEVICE), torch.randn(7, device=DEVICE)
    residual, dout = (torch.randn(7, *shape, device=DEVICE).movedim(0, -1) for _ in range(2))
    inputs = x, *(leaf.requires_grad_() for leaf in (weight, bias, out_weight, out_bias, residual))
    found = gelu_mlp(*inputs, keep_output)
    expected = F.linear(F.gelu(F.linear(x, weight, bias), approximate="tanh"), out_weight, out_bias) + residual
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(out, inputs, dout) for out in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep_output", [True, False])
def test_gradients_of_fp32_weights_are_not_rounded_to_16_bits(keep_output):
    x, weight, bias, out_weight, dout = draw(70, 48, 16, torch.bfloat16)
    weights = [parameter.float().requires_grad_() for parameter in (weight, out_weight)]
    zeros = torch.zeros(len(weights[1]), device=DEVICE)
    out = gelu_mlp(x, weights[0], bias, weights[1], zeros, keep_output=keep_output)
    found = torch.autograd.grad(out, weights, dout)
    for gradient in found:
        assert gradient.dtype == torch.float32 and not torch.equal(gradient, gradient.bfloat16().float())


def test_autocast_has_no_effect():
    x, weight, bias, out_weight, _ = draw(6, 20, 5, torch.float32)
    out_bias = torch.zeros(len(out_weight), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = gelu_mlp(x.requires_grad_(), weight, bias, out_weight, out_bias)
        out.sum().backward()
    assert out.dtype == torch.float32
    (wanted,) = torch.autograd.grad(gelu_mlp(x, weight, bias, out_weight, out_bias).sum(), x)
    assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize(
    ("which", "shape"), [(0, (6, 4)), (1, (20, 4)), (2, (19,)), (3, (5, 19)), (4, (4,)), (5, (5, 6))], ids=str
)
def test_shapes_that_do_not_fit_are_refused(which, shape):
    """Hopper's kernel would read zeros past the end of a row, or memory beyond the end of a bias."""
    inputs = [*draw(6, 20, 5, torch.float32)[:4], torch.zeros(5, device=DEVICE), torch.zeros(6, 5, device=DEVICE)]
    inputs[which] = torch.zeros(shape, device=DEVICE)
    with pytest.raises(ValueError, match=r"the shapes \(.* do not fit; give gelu_mlp x \(..., D\), weight \(C, D\)"):
        gelu_mlp(*inputs)


def test_the_operators_are_well_formed():
    x, weight, bias, out_weight, dout = draw(6, 20, 5, torch.float32)
    for keep_output in (False, True):
        library.opcheck(torch.ops.gelu.forward, (x, weight, bias, keep_output))
        library.opcheck(torch.ops.gelu.backward, (dout, out_weight, bias, x @ weight.T, keep_output))


def test_only_whole_tiles_and_enough_work_are_fused(monkeypatch):
    monkeypatch.setattr(launching, "triton_version", lambda: (3, 6))
    shape = 131072, 3072, 768, torch.bfloat16
    assert selection.is_fused(*shape, "sm_90")
    assert not selection.is_fused(*shape, "sm_100") and not selection.is_fused(*shape[:3], torch.float32, "sm_90")
    assert not selection.is_fused(131072, 3072, 764, torch.bfloat16, "sm_90"), "rows that TMA cannot read"
    assert not selection.is_fused(131072, 3076, 768, torch.bfloat16, "sm_90"), "rows that are not multiples of 16 bytes"
    assert not selection.is_fused(8, 3072, 768, torch.bfloat16, "sm_90"), "too few rows, as in generation"
    monkeypatch.setattr(selection, "fuses", lambda *of: True)
    x = torch.empty(8, 768)
    assert selection.fuses_whole_tiles(131072, 3072, x) and not selection.fuses_whole_tiles(131072, 3072 + 128, x)
