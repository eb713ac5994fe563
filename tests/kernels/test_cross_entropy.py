"""Cross-entropy over a linear head against fp64, beside torch's own in the same dtype.

Without a GPU the Triton kernels run in the interpreter.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import kernels.cross_entropy.op as op
from kernels.cross_entropy import definition, launch, linear_cross_entropy, triton_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def reference(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses and the gradient of their sum by autograd, in the dtype of the logits."""
    logits = logits.detach().requires_grad_()
    losses = F.cross_entropy(logits[:, :vocab_size], targets, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


@pytest.mark.parametrize("implementation", [definition, triton_kernels], ids=["definition", "Triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab_size", "padded"),
    [
        (4, 3, 4),
        (3, 1, 64),
        (2, 64, 64),
        (5, 257, 320),
        (2, 4095, 4096),
        (2, 8192, 8192),
        (3, 9001, 9024),
        (2, 50257, 50304),
    ],
)
def test_losses_and_gradients_are_as_accurate_as_torchs(implementation, dtype, rows, vocab_size, padded):
    torch.manual_seed(vocab_size)
    logits = (4 * torch.randn(rows, padded)).to(DEVICE, dtype)
    logits[:, vocab_size:] = 1e4  # would dominate the softmax
    logits[0, 0] = 60  # a row that predicts one token with certainty
    targets = torch.randint(vocab_size, (rows,), device=DEVICE)
    targets[-1] = vocab_size - 1
    exact_losses, exact = reference(logits.double(), targets, vocab_size)
    theirs = reference(logits.float(), targets, vocab_size)[1]
    found = logits.clone()
    losses = implementation.cross_entropy_(found, targets, vocab_size, True)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), exact_losses, rtol=2e-6, atol=1e-5)
    assert found[:, vocab_size:].eq(0).all()
    rounded = theirs.to(dtype).double()  # no result in this dtype can be closer
    assert (found.double() - exact).norm() <= 1.05 * (rounded - exact).norm() + 1e-6 * rows


def draw(rows: int, vocab_size: int, depth: int, dtype: torch.dtype, offset: float = -30) -> tuple[torch.Tensor, ...]:
    """Return hidden states, a weight with rows of padding that would dominate the softmax, and sampled targets.

    All logits are near `offset`, as GPT-2's share an offset. With several rows, the first one predicts its target with
    near certainty, and one target is ignored.
    """
    torch.manual_seed(rows)
    hidden, weight = torch.randn(rows, depth), 3 * depth**-0.5 * torch.randn(-(-vocab_size // 64) * 64, depth)
    hidden[:, 0], weight[:, 0] = 10, offset / 10
    weight[vocab_size:] = hidden[0].sign() * 10
    hidden, weight = hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype)
    targets = (hidden.float() @ weight[:vocab_size].float().T).softmax(1).multinomial(1)[:, 0]
    if rows > 1:
        hidden[0] = weight[targets[0]] * 5
        targets[rows // 2] = -100
    return hidden, weight, targets


def exact_losses(hidden, weight, targets, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return in fp64 the losses, their gradient by the logits, and the logits minus the target's; zero if ignored."""
    logits, counts = (hidden.double() @ weight.double().T)[:, :vocab_size], targets >= 0
    losses, gradient = reference(logits, targets.clamp(min=0), vocab_size)
    beyond = logits - logits.gather(1, targets.clamp(min=0)[:, None])
    return losses * counts, gradient * counts[:, None], beyond * counts[:, None]


def completed(out: torch.Tensor, scales: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the gradient by the logits in fp64 from relative_losses' out and scales."""
    whole, (scale, rest) = out.double(), scales.double()
    return whole.scatter_add_(1, targets.clamp(min=0)[:, None], rest[:, None]) * scale[:, None]


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


RELATIVE = [(1, 50257, 768), (200, 50257, 64), (1000, 50257, 1600), (9000, 5000, 200)]  # rows, vocab_size, depth


@pytest.mark.parametrize("offset", [0, -30])
@pytest.mark.parametrize(("rows", "vocab_size", "depth"), [(1, 257, 16), (60, 1100, 300)])
def test_errors_of_relative_losses_are_those_of_rounding(rows, vocab_size, depth, offset):
    """Two numbers are rounded: a logit minus the target's, weighted by its probability, and its exponential."""
    hidden, weight, targets = draw(rows, vocab_size, depth, torch.bfloat16, offset)
    out = torch.full((rows, len(weight)), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    losses, scales = definition.relative_losses(hidden, weight, targets, vocab_size, out)
    expected, gradient, beyond = exact_losses(hidden, weight, targets, vocab_size)
    unit = torch.finfo(out.dtype).eps / 2
    moved = 1.02 * unit * beyond.abs()  # first order, and 2 % for the rest
    of_loss = ((beyond - expected[:, None]).exp() * moved).sum(1, keepdim=True) + 1e-5
    assert losses.dtype == scales.dtype == torch.float32
    assert ((losses - expected).abs() <= of_loss[:, 0]).all()
    assert out[:, vocab_size:].eq(0).all() and scales[:, targets < 0].eq(0).all()
    own = torch.arange(vocab_size, device=DEVICE) == targets[:, None]
    error = (completed(out, scales, targets)[:, :vocab_size] - gradient).abs()
    share = (gradient + own.double()).abs()  # the probability
    bound = 1.02 * (share * (moved + of_loss) + unit * gradient.abs() * ~own) + 1e-5
    assert (error <= bound * (targets >= 0)[:, None]).all()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("rows", "vocab_size", "depth"), [(1, 257, 16), (35, 1100, 300)])
def test_the_kernels_around_the_product_match_the_definition(rows, vocab_size, depth, dtype):
    hidden, weight, targets = draw(rows, vocab_size, depth, dtype)
    wanted = hidden.new_empty(rows, len(weight))
    losses, scales = definition.relative_losses(hidden, weight, targets, vocab_size, wanted)
    logits, own = hidden.float() @ weight.float().T, targets.clamp(min=0)[:, None]
    found = triton_kernels.target_logits(hidden, weight, targets)
    torch.testing.assert_close(found, logits.gather(1, own)[:, 0], rtol=1e-5, atol=1e-5)
    exponentials = (logits - logits.gather(1, own)).to(dtype).float().exp()
    exponentials[:, vocab_size:] = 0
    sums, out = torch.stack([tile.sum(1) for tile in exponentials.split(256, 1)]), exponentials.to(dtype)
    ours = triton_kernels.relative_losses_(out, sums, targets)
    torch.testing.assert_close((ours[0], ours[1][0]), (losses, scales[0]), rtol=1e-5, atol=1e-5)
    counts = targets >= 0
    torch.testing.assert_close(out[counts], wanted[counts], rtol=max(torch.finfo(dtype).eps, 1e-6), atol=1e-5)
    whole = [completed(*of, targets).gather(1, own) for of in ((out, ours[1]), (wanted, scales))]
    torch.testing.assert_close(*whole, rtol=1e-5, atol=1e-5)  # 1 - l, rounded in either direction
    scales[1] *= 1000  # makes the rests visible
    given = hidden.flip(0), hidden, weight, targets, scales
    (mine, *others), (theirs, *_) = ([x.clone() for x in given] for _ in range(2))
    scaled = triton_kernels.rescale_(mine, *others), definition.rescale_(theirs, *others)
    torch.testing.assert_close((mine, scaled[0]), (theirs, scaled[1]), rtol=torch.finfo(dtype).eps, atol=1e-5)
    sums[0, 0] = float("nan")
    ours = triton_kernels.relative_losses_(out, sums, targets)
    assert all(x.isnan().tolist() == [True] + [False] * (rows - 1) for x in (ours[0], *ours[1]))


@pytest.mark.parametrize("rescale_", [definition.rescale_, triton_kernels.rescale_], ids=["definition", "Triton"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_of_rows_apply_to_both_gradients(weight_dtype, rescale_, monkeypatch):
    """Uses the definition of Hopper's losses, in parts."""
    monkeypatch.setattr(op, "PART_TOKENS", (4, 16))
    relative = SimpleNamespace(losses=lambda *of: definition.relative_losses(*of[:4], of[5]), rescale_=rescale_)
    monkeypatch.setattr(op, "implementation", lambda *of: relative)
    hidden, weight, targets = draw(50, 1000, 32, torch.bfloat16)
    hidden, weight = hidden.requires_grad_(), weight.to(weight_dtype).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.stack([targets, targets], 1)[:, 0], 1000)
    found = torch.autograd.grad(loss, (hidden, weight))
    logits = (hidden.double() @ weight.to(hidden.dtype).double().T)[:, :1000]
    exact_loss = F.cross_entropy(logits, targets)
    exact = torch.autograd.grad(exact_loss, (hidden, weight))
    assert abs(loss - exact_loss) <= 1e-2
    for ours, theirs, bound in zip(found, exact, (4e-3, 6e-3), strict=True):
        assert ours.dtype == theirs.dtype and relative_error(ours, theirs.double()) <= bound


def hopper_losses():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    from kernels.cross_entropy import hopper

    return hopper.losses


# Ragged tiles of rows and of columns, one step, and more tiles of rows than run at a time.
@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, -30])
@pytest.mark.parametrize(("rows", "vocab_size", "depth"), RELATIVE)
def test_hoppers_losses_match_the_definition(rows, vocab_size, depth, offset):
    """Sums in another order round some numbers differently. This must change less than rounding itself.

    Truncation, a too low limit on logits, or sums that are off by 1 % would change more.
    """
    losses_of, given = hopper_losses(), draw(rows, vocab_size, depth, torch.bfloat16, offset)
    out = torch.full((rows, len(given[1])), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wanted = torch.empty_like(out)
    losses, scales = losses_of(*given, vocab_size, out)
    expected, expected_scales = definition.relative_losses(*given, vocab_size, wanted)
    exact, gradient, _ = exact_losses(*given, vocab_size)
    assert (losses - expected).norm() <= 0.5 * (expected - exact).norm() + 1e-5 * rows**0.5
    assert out[:, vocab_size:].eq(0).all() and scales[:, given[2] < 0].eq(0).all()
    both = (out, scales), (wanted, expected_scales)
    found, defined = (completed(*of, given[2])[:, :vocab_size] for of in both)
    assert (found - defined).norm() <= 0.5 * (defined - gradient).norm() + 1e-5 * rows**0.5
    assert torch.equal(losses_of(*given, vocab_size, out)[0], losses)


@pytest.mark.gpu
def test_on_hopper_logits_far_above_the_target_saturate_and_nan_stays_nan():
    losses_of = hopper_losses()
    hidden, weight, targets = draw(1000, 50257, 768, torch.bfloat16)
    hidden[1:3], targets[1:3] = 0, 8
    hidden[1, 1], hidden[2, 1], weight[:, 1], weight[7, 1] = 30, 0.625, 0, 96  # token 7 is 2880 and 60 nats above
    out = torch.empty(1000, len(weight), dtype=torch.bfloat16, device=DEVICE)
    losses, _ = losses_of(hidden, weight, targets, 50257, out)
    torch.testing.assert_close(losses[1:3].cpu(), torch.tensor([definition.HIGHEST, 60.0]))
    hidden.requires_grad_()
    (gradient,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, 50257), hidden)
    wanted = (weight[7] - weight[8]).float() / (len(targets) - 1)
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient[1].float(), wanted, rtol=0.02, atol=1e-5)
    hidden.data[5, 3] = float("nan")
    assert linear_cross_entropy(hidden, weight, targets, 50257).isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_by_hoppers_product_are_as_accurate_as_the_plain_ones(weight_dtype, monkeypatch):
    hopper_losses()
    hidden, weight, targets = draw(10000, 50257, 256, torch.bfloat16)
    hidden, weight = hidden.requires_grad_(), weight.to(weight_dtype).requires_grad_()
    fused, ran = launch.selection.fuses, []
    monkeypatch.setattr(launch.selection, "fuses", lambda *of: ran.append(fused(*of)) or ran[-1])
    loss = linear_cross_entropy(hidden, weight, targets, 50257)
    found = torch.autograd.grad(loss, (hidden, weight))
    assert len(ran) == 3 and all(ran)
    monkeypatch.setattr(launch.selection, "fuses", lambda *of: False)
    plain_loss = linear_cross_entropy(hidden, weight, targets, 50257)
    plain = torch.autograd.grad(plain_loss, (hidden, weight))
    logits = (hidden.double() @ weight.to(hidden.dtype).double().T)[:, :50257]
    exact_loss = F.cross_entropy(logits, targets)
    exact = torch.autograd.grad(exact_loss, (hidden, weight))
    assert abs(loss - exact_loss) <= abs(plain_loss - exact_loss) + 1e-5
    for ours, theirs, wanted in zip(found, plain, exact, strict=True):
        assert relative_error(ours, wanted.double()) <= 1.1 * relative_error(theirs, wanted.double()) + 2**-9


@pytest.mark.parametrize("implementation", [definition, triton_kernels], ids=["definition", "Triton"])
@pytest.mark.parametrize("vocab_size", [63, 9000])
def test_a_negative_target_is_ignored(implementation, vocab_size):
    logits = torch.randn(3, 9024, device=DEVICE)[:, : -(-vocab_size // 64) * 64].contiguous()
    targets = torch.tensor([5, -100, 7], device=DEVICE)
    exact_losses, exact = reference(logits.double()[[0, 2]], targets[[0, 2]], vocab_size)
    losses = implementation.cross_entropy_(logits, targets, vocab_size, True)
    assert losses[1] == 0 and logits[1].eq(0).all()
    torch.testing.assert_close(losses[[0, 2]].double(), exact_losses, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(logits[[0, 2]].double(), exact, rtol=1e-5, atol=1e-6)


def test_the_mean_skips_ignored_targets():
    hidden, weight = torch.randn(4, 16, device=DEVICE), torch.randn(64, 16, device=DEVICE, requires_grad=True)
    targets = torch.tensor([3, -100, 5, -1], device=DEVICE)
    some = linear_cross_entropy(hidden, weight, targets, 64)
    alone = linear_cross_entropy(hidden[[0, 2]], weight, targets[[0, 2]], 64)
    torch.testing.assert_close(some, alone)
    found, expected = (torch.autograd.grad(loss, weight)[0] for loss in (some, alone))
    torch.testing.assert_close(found, expected)


def test_the_scale_of_the_gradient_is_not_rounded_to_16_bits():
    """1 / 15 rounded to bf16 is 0.34 % larger."""
    torch.manual_seed(0)
    hidden = torch.randn(64, 128, device=DEVICE).bfloat16().requires_grad_()
    loss = linear_cross_entropy(hidden, torch.randn(64, 128, device=DEVICE), torch.arange(64, device=DEVICE), 64)
    whole, share = (torch.autograd.grad(loss * x, hidden, retain_graph=True)[0].double() for x in (1, 1 / 15))
    assert ((whole * share).sum() / (whole * whole).sum()).item() == pytest.approx(1 / 15, rel=3e-4)


@pytest.mark.parametrize("implementation", [definition, triton_kernels], ids=["definition", "Triton"])
def test_without_gradient_the_logits_are_unchanged(implementation):
    logits, targets = torch.randn(4, 192, device=DEVICE), torch.tensor([0, 5, 130, 7], device=DEVICE)
    before = logits.clone()
    losses = implementation.cross_entropy_(logits, targets, 131, False)
    assert torch.equal(logits, before)
    torch.testing.assert_close(losses, reference(logits, targets, 131)[0])


@pytest.mark.parametrize("implementation", [definition, launch], ids=["definition", "kernels"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 50, 70], ids=lambda n: f"{n}_tokens")
def test_loss_and_gradients_in_parts_match_those_of_whole_logits(implementation, tokens, dtype, monkeypatch):
    """The parts have 1, 4, 13 and 16 tokens. The gradient of an fp32 weight is summed in fp32 in every case."""
    monkeypatch.setattr(op, "PART_TOKENS", (4, 16))
    monkeypatch.setattr(op, "implementation", lambda *of: implementation)
    products, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: products.append(out.shape) or mm(a, b, out=out))
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 32, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(192, 32, device=DEVICE, requires_grad=True)
    targets = torch.randint(150, (tokens,), device=DEVICE)
    loss = linear_cross_entropy(hidden, weight, targets, 150)
    logits = [rows for rows, columns in products if columns == 192]
    assert sum(logits) == tokens and max(logits) == {1: 1, 16: 4, 50: 13, 70: 16}[tokens]
    found = torch.autograd.grad(3 * loss, (hidden, weight))
    assert [x.dtype for x in found] == [dtype, torch.float32]
    exact = F.cross_entropy((hidden.double() @ weight.to(dtype).double().T)[:, :150], targets)
    expected = torch.autograd.grad(3 * exact, (hidden, weight))
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5 if dtype == torch.float32 else 1e-2)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs.double()) < (1e-5 if dtype == torch.float32 else 1e-2)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, 150), loss)


def test_autocast_has_no_effect():
    """Autocast would round the fp32 sum of the weight's gradient to 16 bits after each part."""
    torch.manual_seed(0)
    weight, targets = torch.randn(192, 32, device=DEVICE, requires_grad=True), torch.arange(40, device=DEVICE)
    hidden = torch.randn(40, 32, device=DEVICE).bfloat16()
    plain = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, 192), weight)[0]
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, 192)
    assert torch.equal(torch.autograd.grad(loss, weight)[0], plain)


def test_the_operator_is_well_formed():
    weight, targets = torch.randn(64, 16, device=DEVICE), torch.arange(8, device=DEVICE)
    for gradient in (True, False):
        hidden = torch.randn(8, 16, device=DEVICE)
        torch.library.opcheck(torch.ops.cross_entropy.linear, (hidden, weight, targets, 60, gradient))


@pytest.mark.parametrize(
    ("hidden", "weight", "targets", "vocab_size", "message"),
    [
        ((8, 16), (64, 16), (10,), 60, r"\(8, 16\), \(64, 16\), \(10,\) do not fit"),
        ((2, 8, 16), (64, 16), (2, 8), 60, r"hidden \(N, C\), weight \(V, C\) and targets \(N,\)"),
        ((8, 16), (64, 24), (8,), 60, r"\(8, 16\), \(64, 24\), \(8,\) do not fit"),
        ((8, 16), (64, 16), (8,), 65, "vocab_size=65 is out of range; give 1 to the 64 rows of weight"),
        ((8, 16), (64, 16), (8,), 0, "vocab_size=0 is out of range; give 1 to"),
    ],
    ids=["more targets than tokens", "tokens in rows", "another depth", "vocabulary too large", "no vocabulary"],
)
def test_shapes_that_do_not_fit_are_refused(hidden, weight, targets, vocab_size, message):
    """Additional targets once counted in the mean, and with too few rows of weight padding counted as tokens."""
    targets = torch.zeros(targets, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(torch.randn(hidden), torch.randn(weight), targets, vocab_size)
