"""FP8 layers against fp64, and the Triton kernels against the definition. Without a GPU they run in the interpreter."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library

from kernels import fp8
from kernels.common import registering
from kernels.fp8 import Scaled, definition, triton_kernels
from kernels.fp8.definition import E4M3, E5M2
from tests.kernels.accuracy import is_rounded
from trainer.precision import has_fp8

HAS_FP8 = has_fp8(torch.device("cuda"))
DEVICE = "cuda" if HAS_FP8 else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The largest relative error of a normal number, the smallest normal number, and the largest error below it.
BOUNDS = {E4M3: (2.0**-4, 2.0**-6, 2.0**-10), E5M2: (2.0**-3, 2.0**-14, 2.0**-17)}
SHAPES = [(16, 16), (80, 144), (208, 48)]  # multiples of 16, but not of a tile
LARGE_SHAPES = [(4112, 784), (16384, 3072)]  # for a GPU
needs_fp8 = pytest.mark.skipif(torch.cuda.is_available() and not HAS_FP8, reason="needs a GPU with FP8")


def scaled(peak: float, dtype: torch.dtype) -> Scaled:
    """Return the scale for numbers up to `peak`, a power of two, and empty statistics."""
    scale = torch.tensor(2 * peak / torch.finfo(dtype).max, device=DEVICE).log2().ceil().exp2()
    return Scaled(scale, torch.zeros(3, device=DEVICE))


def spread(rows: int, columns: int, dtype: torch.dtype = FP32) -> Tensor:
    """Return numbers of both signs and many magnitudes, zeros among them."""
    torch.manual_seed(rows)
    x = torch.randn(rows, columns) * torch.exp2(torch.randint(-14, 9, (rows, columns)))
    x[::5, ::7] = 0
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [FP32, BF16, FP16], ids=str)
def test_rounding_is_within_the_formats_bounds(dtype, source):
    """Also fp32 is rounded within these bounds, because it passes through bf16, which has more digits."""
    x, (scale, statistics) = spread(48, 80, source), scaled(4.0, dtype)  # some numbers are beyond the range
    out, transposed = definition.quantise(x, scale, statistics, dtype)
    assert torch.equal(transposed.view(torch.uint8), out.view(torch.uint8).T) and transposed.is_contiguous()
    relative, smallest, below = BOUNDS[dtype]
    wanted = (x if source != FP32 else x.bfloat16()).double() / scale.double()
    limit = torch.finfo(dtype).max
    assert ((wanted.abs() > limit).any() and (wanted.abs() < smallest).any()) or dtype == E5M2
    wanted = wanted.clamp(-limit, limit)
    allowed = torch.where(wanted.abs() >= smallest, relative * wanted.abs(), below)
    assert ((out.double() - wanted).abs() <= allowed).all()
    lost = ((out.float() == 0) & (wanted != 0)).float().mean()
    assert (lost > 0) == (dtype == E4M3)
    largest = (x if source != FP32 else x.bfloat16()).abs().max()
    assert statistics.tolist() == [largest, lost, 1.0]


def test_statistics_collect_several_tensors_and_no_number_stays_no_number():
    one, (scale, statistics) = torch.tensor([[1.0, 2.0**-12, 0.0, -3.0]], device=DEVICE), scaled(224.0, E4M3)
    for x in (one, one / 2):
        definition.quantise(x, scale, statistics, E4M3)
    assert scale == 1 and statistics.tolist() == [3.0, 0.5, 2.0]
    one[0, 1] = torch.nan
    out, _ = definition.quantise(one, scale, statistics, E4M3)
    assert out.float().isnan().tolist() == [[False, True, False, False]] and statistics[0].isnan()


@needs_fp8
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_products_match_fp64_up_to_rounding(dtypes):
    """Hopper's tensor cores sum FP8 products with about 14 bits before they add to sums in fp32."""
    a, b = (spread(rows, 80).clamp(-400, 400).to(dtype) for rows, dtype in zip((48, 112), dtypes, strict=True))
    scales = torch.tensor(2.0**-7, device=DEVICE), torch.tensor(2.0**3, device=DEVICE)
    exact = a.double() @ b.double().T * 2.0**-4
    found = torch.ops.fp8.product(a, b, *scales, None, None, FP32)
    limit = 2.0**-12 if HAS_FP8 else 2e-6
    assert found.dtype == FP32 and (found.double() - exact).norm() <= limit * exact.norm()
    bias, residual = (exact.std() * torch.randn(shape, device=DEVICE).to(BF16) for shape in (112, (48, 112)))
    bias, residual = bias.float(), residual.to(BF16)
    before = residual.clone()
    found = torch.ops.fp8.product(a, b, *scales, bias, residual, BF16)
    assert found.dtype == BF16 and is_rounded(found, exact + bias.double() + residual.double(), 1.6)
    assert torch.equal(residual, before), "the residual must not be overwritten"


def inputs_of(*sizes: int) -> list[Tensor]:
    """Return x (2, 24, D) in bf16, weight and bias of each layer in fp32, and a residual of the last layer's size."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, 24, sizes[0]).to(BF16)]
    for inputs, outputs in pairwise(sizes):
        tensors += [inputs**-0.5 * torch.randn(outputs, inputs), torch.randn(outputs)]
    tensors.append(torch.randn(2, 24, sizes[-1]).to(BF16))
    return [x.to(DEVICE).requires_grad_() for x in tensors]


def linear(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return fp8.linear(x, weight, bias, residual, scales_for())


def gelu_mlp(*tensors: Tensor) -> Tensor:
    return fp8.gelu_mlp(*tensors, scales_for(), scales_for())


def scales_for() -> tuple[Scaled, Scaled, Scaled]:
    return scaled(8.0, E4M3), scaled(1.0, E4M3), scaled(8.0, E5M2)


def exact_mlp(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, residual: Tensor):
    hidden = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    return F.linear(hidden, out_weight, out_bias) + residual


LAYERS = {
    # FP8 layer, its definition in fp64, sizes, and the largest error of the result and of each gradient, relative to
    # the norm. A product has the rounding of two operands, at most 2^-4 (E4M3) or 2^-3 (E5M2) and a third of that
    # typically. A gradient of the MLP has four of these.
    "linear": (linear, lambda x, w, b, r: F.linear(x, w, b) + r, (80, 112), 2.0**-4, [2.0**-3] * 2 + [2.0**-8] * 2),
    "gelu_mlp": (gelu_mlp, exact_mlp, (80, 208, 48), 2.0**-4, [0.15, 0.15, 0.15, 2.0**-3, 2.0**-8, 2.0**-8]),
}


@needs_fp8
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("autocast", [False, True])
def test_layers_and_their_gradients_match_fp64_within_the_formats_bounds(name, autocast):
    """The gradients of biases and residual do not pass through FP8, except for the bias before GELU."""
    layer, exact_layer, sizes, bound, bounds = LAYERS[name]
    inputs = inputs_of(*sizes)
    with torch.autocast(DEVICE, BF16, enabled=autocast):
        out = layer(*inputs)
    dout = torch.randn(2, sizes[-1], 24, device=DEVICE).to(BF16).transpose(1, 2)  # not dense
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = exact_layer(*exact)
    assert out.dtype == BF16 and out.shape == wanted.shape
    added = wanted - exact[-1]
    error = (out.double() - wanted).norm() / added.norm()
    assert 2.0**-7 < error < bound, "as precise as bf16, or less precise than FP8"
    found, expected = torch.autograd.grad(out, inputs, dout), torch.autograd.grad(wanted, exact, dout.double())
    for gradient, x, reference, limit in zip(found, inputs, expected, bounds, strict=True):
        assert gradient.dtype == x.dtype and gradient.shape == x.shape
        error = (gradient.double() - reference).norm() / reference.norm()
        assert error < limit and (limit == 2.0**-8 or error > 2.0**-7), (x.shape, error)
        if x.dim() == 2:
            assert not torch.equal(gradient, gradient.bfloat16().float()), "weights have gradients in fp32"


@needs_fp8
@pytest.mark.parametrize(("layer", "sizes", "sets"), [(fp8.linear, (16, 32), 1), (fp8.gelu_mlp, (16, 32, 16), 2)])
def test_two_forward_passes_can_come_before_their_backward_passes(layer, sizes, sets):
    """Both backward passes add to the same statistics."""
    inputs, scales = inputs_of(*sizes), [scales_for() for _ in range(sets)]
    first, second = (layer(*inputs, *scales).sum() for _ in range(2))
    gradients = [torch.autograd.grad(out, inputs) for out in (first, second)]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert all(of_gradient.statistics[2] == 2 for _, _, of_gradient in scales)


@needs_fp8
@pytest.mark.parametrize(("layer", "sizes"), [(linear, (16, 32)), (gelu_mlp, (16, 32, 16))])
def test_weights_and_biases_may_have_any_strides(layer, sizes, monkeypatch):
    """The kernels read dense parameters. They once read a strided weight as another matrix."""
    if DEVICE == "cpu":
        interpreted = {name: getattr(triton_kernels, name) for name in ("quantise", "gelu", "gelu_gradient")}
        implementation = SimpleNamespace(**interpreted, product=definition.product)
        monkeypatch.setattr(registering, "implementation", lambda *of: implementation)
    x, *parameters, residual = inputs_of(*sizes)
    strided = [torch.stack([p, p], -1).detach()[..., 0].requires_grad_() for p in parameters]
    results = []
    for given in (parameters, strided):
        inputs = [x, *given, residual]
        out = layer(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert not any(p.is_contiguous() for p in strided)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("layer", "sizes", "which", "shape"),
    [
        *((linear, (16, 32), which, shape) for which, shape in [(0, (48, 32)), (1, (32, 48)), (2, (16,)), (3, (32,))]),
        (gelu_mlp, (16, 32, 16), 2, (16,)),
        (gelu_mlp, (16, 32, 16), 3, (16, 48)),
        (gelu_mlp, (16, 32, 16), 5, (48, 32)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(layer, sizes, which, shape):
    """GELU's kernel would read memory beyond the end of a bias, and a residual of other rows would be broadcast."""
    inputs = inputs_of(*sizes)
    inputs[which] = torch.zeros(shape, device=DEVICE)
    with pytest.raises(ValueError, match=rf"the shapes \(.* do not fit; give fp8\.{layer.__name__} x \(..., D\)"):
        layer(*inputs)


@pytest.mark.parametrize(
    ("layer", "sizes", "tokens"),
    [
        *[(linear, (16, 40), 24), (linear, (24, 16), 24), (linear, (16, 16), 20), (gelu_mlp, (16, 24, 16), 24)],
        *[(linear, (16, 16), 0), (gelu_mlp, (16, 16, 16), 0), (linear, (16, 0), 24)],
    ],
)
def test_sides_that_are_not_positive_multiples_of_16_are_refused(layer, sizes, tokens):
    """cuBLAS refuses them too, but names no layer, and the number of tokens only in the backward pass.

    Without tokens, the largest number of the statistics does not exist.
    """
    x, *parameters, residual = inputs_of(*sizes)
    with pytest.raises(ValueError, match=rf"{2 * tokens} tokens and weights \(.* do not suit fp8\.{layer.__name__};"):
        layer(x[:, :tokens], *parameters, residual[:, :tokens])


@pytest.mark.parametrize(
    ("layer", "sizes", "which", "dtype"),
    [
        *((linear, (16, 32), which, dtype) for which, dtype in [(0, FP32), (0, torch.float64), (1, FP16)]),
        *((gelu_mlp, (16, 32, 16), which, dtype) for which, dtype in [(0, FP32), (1, torch.float64), (3, torch.int32)]),
    ],
)
def test_other_dtypes_are_refused(layer, sizes, which, dtype):
    """A CPU once computed them, although the kernels and cuBLAS are for x of 16 bits."""
    inputs = inputs_of(*sizes)
    inputs[which] = inputs[which].detach().to(dtype)
    with pytest.raises(ValueError, match=rf"^x is .*; give fp8\.{layer.__name__} x in bfloat16") as refusal:
        layer(*inputs)
    assert str(dtype) in str(refusal.value)


@needs_fp8
@pytest.mark.parametrize(("layer", "sizes"), [(linear, (16, 32)), (gelu_mlp, (16, 32, 16))])
def test_layers_refuse_a_second_derivative(layer, sizes):
    inputs = inputs_of(*sizes)
    with pytest.raises(RuntimeError, match=r"fp8\.\w+ has no second derivative; use precision=bf16"):
        torch.autograd.grad(layer(*inputs).sum(), inputs[0], create_graph=True)


@needs_fp8
def test_the_operators_are_well_formed():
    ops, x, pre = torch.ops.fp8, spread(16, 32, BF16), torch.randn(16, 32, device=DEVICE).to(BF16)
    bias, of_out, of_gradient = torch.randn(32, device=DEVICE), scaled(8.0, E4M3), scaled(8.0, E5M2)
    calls = [(ops.quantise, (x, *of_out, E4M3)), (ops.gelu, (pre, bias, *of_out))]
    calls.append((ops.gelu_gradient, (x, pre, bias, *of_gradient, of_out.scale)))
    a, b = x.to(E4M3), torch.ones(48, 32, device=DEVICE).to(E4M3)
    calls.append((ops.product, (a, b, of_out.scale, of_out.scale, torch.randn(48, device=DEVICE), None, BF16)))
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    for op, arguments in calls:
        library.opcheck(op, arguments, test_utils=checks)  # torch cannot compare FP8 tensors, as test_schema does


def steps(x: Tensor) -> Tensor:
    """Return the place of FP8 numbers among all numbers of their format. NaN has the last place."""
    bits = x.cpu().view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def assert_alike(found: Tensor, wanted: Tensor, scale: float) -> None:
    """Compare FP8 tensors up to one step of the format, or up to 1e-5 after scaling. Compare also tensors in fp32.

    Triton's interpreter loses the carry: 1.97 becomes 1 and not 2, and so a few numbers are 2^digits steps off.
    """
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if found.dtype == FP32:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        return
    matters = (found.float() - wanted.float()).abs().cpu() * scale > 1e-5  # GELU's slope is nearly 0 at some numbers
    difference = (steps(found) - steps(wanted)).abs() * matters
    assert difference.max() <= (1 if DEVICE == "cuda" else {E4M3: 8, E5M2: 4}[found.dtype])
    assert (difference > 0).float().mean() < 0.08


@needs_fp8
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", SHAPES + LARGE_SHAPES * HAS_FP8, ids=str)
def test_the_kernel_rounds_to_the_same_bits_as_the_definition(shape, source, dtype):
    """The interpreter does not round to the nearest number, so there the numbers fit the format or its range ends."""
    x, ours, theirs = spread(*shape, source), scaled(4.0, dtype), scaled(4.0, dtype)
    if DEVICE == "cpu":
        fitting, limit = definition.quantise(x, *scaled(4.0, dtype), dtype)[0].float(), torch.finfo(dtype).max
        x = torch.where(fitting.abs() < limit, fitting * ours.scale, x.float()).to(source)
        x[0, 0] = 2.0**-12 * ours.scale
    elif dtype == E4M3:
        x[1, 3] = torch.nan
    found, wanted = triton_kernels.quantise(x, *ours, dtype), definition.quantise(x, *theirs, dtype)
    for one, other in zip(found, wanted, strict=True):
        assert one.is_contiguous() and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if not x.isnan().any():
        torch.testing.assert_close(ours.statistics, theirs.statistics)


@needs_fp8
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", SHAPES + LARGE_SHAPES * HAS_FP8, ids=str)
def test_the_kernels_of_gelu_are_within_one_step_of_the_definition(shape, dtype):
    torch.manual_seed(1)
    pre, bias = (2 * torch.randn(*shape)).to(DEVICE, dtype), torch.randn(shape[1], device=DEVICE)
    dout, out_scale = torch.randn(*shape).to(DEVICE, dtype), scaled(16.0, E4M3).scale
    pairs = [(implementation, scaled(16.0, E4M3)) for implementation in (triton_kernels, definition)]
    assert_alike(*(of.gelu(pre, bias, *to) for of, to in pairs), out_scale.item())
    pairs += [(implementation, scaled(8.0, E5M2)) for implementation in (triton_kernels, definition)]
    found, wanted = (of.gelu_gradient(dout, pre, bias, *to, out_scale) for of, to in pairs[2:])
    for one, other in zip(found, wanted, strict=True):
        assert_alike(one, other, pairs[2][1].scale.item() if one.dtype == E5M2 else out_scale.item())
    assert torch.equal(found[0].view(torch.uint8).T, found[1].view(torch.uint8)), "dpre and its transpose"
    for (_, ours), (_, theirs) in (pairs[:2], pairs[2:]):
        torch.testing.assert_close(ours.statistics[0], theirs.statistics[0], rtol=2.0**-8, atol=0)
