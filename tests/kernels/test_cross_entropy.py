"""Cross-entropy over a linear head against fp64, beside torch's own in the same dtype; where there is no GPU the Triton
kernel runs in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

import kernels.cross_entropy.op as op
from kernels.cross_entropy import definition, launch, linear_cross_entropy, triton_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def reference(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and the gradient of their sum by autograd, in the dtype of the logits."""
    logits = logits.detach().requires_grad_()
    losses = F.cross_entropy(logits[:, :vocab_size], targets, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


@pytest.mark.parametrize("implementation", [definition, triton_kernels], ids=["definition", "Triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab_size", "padded"), [(3, 1, 64), (5, 257, 320), (2, 4095, 4096), (3, 9001, 9024), (2, 50257, 50304)]
)
def test_losses_and_gradients_are_as_accurate_as_torchs(implementation, dtype, rows, vocab_size, padded):
    torch.manual_seed(vocab_size)
    logits = (4 * torch.randn(rows, padded)).to(DEVICE, dtype)
    logits[:, vocab_size:] = 1e4  # would be all of the softmax
    logits[0, 0] = 60  # a row that is sure of one token
    targets = torch.randint(vocab_size, (rows,), device=DEVICE)
    targets[-1] = vocab_size - 1
    exact_losses, exact = reference(logits.double(), targets, vocab_size)
    theirs = reference(logits.float(), targets, vocab_size)[1]
    found = logits.clone()
    losses = implementation.cross_entropy_(found, targets, vocab_size, True)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), exact_losses, rtol=2e-6, atol=1e-5)
    assert found[:, vocab_size:].eq(0).all()
    rounded = theirs.to(dtype).double()  # no result in this dtype can be nearer
    assert (found.double() - exact).norm() <= 1.05 * (rounded - exact).norm() + 1e-6 * rows


def draw(rows: int, vocab_size: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight with rows of padding that would be all of the softmax, and targets as likely as they are.

    Logits share an offset, as GPT-2's do; one row is all but sure of its target, and one target does not count.
    """
    torch.manual_seed(rows)
    hidden, weight = torch.randn(rows, depth), 3 * depth**-0.5 * torch.randn(-(-vocab_size // 64) * 64, depth)
    hidden[:, 0], weight[:, 0] = 10, -3
    weight[vocab_size:] = hidden[0].sign() * 10
    hidden, weight = hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype)
    targets = (hidden.float() @ weight[:vocab_size].float().T).softmax(1).multinomial(1)[:, 0]
    hidden[0] = weight[targets[0]] * 5
    targets[rows // 2] = -100
    return hidden, weight, targets


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("rows", "vocab_size", "depth"), [(3, 257, 16), (35, 1100, 300)])
def test_sums_of_exponentials_are_what_losses_and_gradients_are_made_of(rows, vocab_size, depth, dtype):
    hidden, weight, targets = draw(rows, vocab_size, depth, dtype)
    logits = hidden.double() @ weight.double().T
    counts = targets >= 0
    exact_losses, exact = reference(logits[counts], targets[counts], vocab_size)
    own = triton_kernels.target_logits(hidden, weight, targets)
    torch.testing.assert_close(
        own.double(), logits.gather(1, targets.clamp(min=0)[:, None])[:, 0], rtol=1e-5, atol=1e-5
    )
    exponentials = (logits - own[:, None]).exp().float()
    exponentials[:, vocab_size:] = 0
    sums = torch.stack([tile.sum(1) for tile in exponentials.split(256, 1)])
    found = exponentials.to(dtype)
    losses, scales = triton_kernels.relative_losses_(found, sums, targets)
    assert losses[~counts].eq(0).all() and scales[~counts].eq(0).all()
    torch.testing.assert_close(losses[counts].double(), exact_losses, rtol=2e-6, atol=1e-5)
    error = (found.double() * scales[:, None])[counts] - exact
    assert error.norm() <= torch.finfo(dtype).eps / 2 * exact.norm() + 1e-5
    sums[0, 0] = float("nan")
    losses, scales = triton_kernels.relative_losses_(found, sums, targets)
    assert losses.isnan().tolist() == scales.isnan().tolist() == [True] + [False] * (rows - 1)


# A ragged tile of rows and of columns, one step, and more tiles of rows than are walked over at a time.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "vocab_size", "depth"), [(1, 50257, 768), (200, 50257, 64), (1000, 50257, 1600), (9000, 5000, 200)]
)
def test_hoppers_losses_are_nearer_to_fp64s_than_from_rounded_logits(rows, vocab_size, depth):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper alone")
    from kernels.cross_entropy import hopper

    hidden, weight, targets = draw(rows, vocab_size, depth, torch.bfloat16)
    counts = targets >= 0
    exact_losses, exact = torch.zeros(rows).to(DEVICE).double(), torch.zeros(rows, len(weight)).to(DEVICE).double()
    logits = hidden.double() @ weight.double().T
    if counts.any():
        exact_losses[counts], exact[counts] = reference(logits[counts], targets[counts], vocab_size)
    out = torch.full_like(exact, float("nan"), dtype=torch.bfloat16)
    losses, scales = hopper.losses(hidden, weight, targets, vocab_size, out)
    plain = logits.bfloat16()
    plain_losses = triton_kernels.cross_entropy_(plain, targets, vocab_size, True)
    assert (losses - exact_losses).norm() <= 0.5 * (plain_losses - exact_losses).norm() + 1e-5
    assert out[:, vocab_size:].eq(0).all() and losses[~counts].eq(0).all() and scales[~counts].eq(0).all()
    found = out.double() * scales[:, None]
    assert (found - exact).norm() <= 1.1 * (plain.double() - exact).norm() + torch.finfo(out.dtype).eps * exact.norm()
    assert torch.equal(hopper.losses(hidden, weight, targets, vocab_size, out)[0], losses)


@pytest.mark.gpu
def test_on_hopper_what_is_far_beyond_the_targets_logit_stays_finite_and_nan_is_told():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper alone")
    hidden, weight, targets = draw(1000, 50257, 768, torch.bfloat16)
    hidden[1], targets[1] = 0, 8
    hidden[1, 1], weight[7, 1] = 30, 100  # token 7 is 3000 nats more likely there
    hidden.requires_grad_()
    (gradient,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, 50257), hidden)
    wanted = (weight[7] - weight[8]).float() / (len(targets) - 1)
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient[1].float(), wanted, rtol=0.02, atol=1e-5)
    hidden.data[5, 3] = float("nan")
    assert linear_cross_entropy(hidden, weight, targets, 50257).isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_heads_gradients_by_hoppers_product_are_within_a_rounding_of_the_plain_ones(weight_dtype, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper alone")
    hidden, weight, targets = draw(10000, 50257, 256, torch.bfloat16)
    hidden, weight = hidden.requires_grad_(), weight.to(weight_dtype).requires_grad_()
    fused, ran = launch.products.fuses, []
    monkeypatch.setattr(launch.products, "fuses", lambda *of: ran.append(fused(*of)) or ran[-1])
    loss = linear_cross_entropy(hidden, weight, targets, 50257)
    found = torch.autograd.grad(loss, (hidden, weight))
    assert len(ran) == 3 and all(ran)
    monkeypatch.setattr(launch.products, "fuses", lambda *of: False)
    plain_loss = linear_cross_entropy(hidden, weight, targets, 50257)
    plain = torch.autograd.grad(plain_loss, (hidden, weight))
    counts = targets >= 0
    logits = (hidden.double() @ weight.to(hidden.dtype).double().T)[counts, :50257]
    exact_loss = F.cross_entropy(logits, targets[counts])
    exact = torch.autograd.grad(exact_loss, (hidden, weight))
    assert abs(loss - exact_loss) <= abs(plain_loss - exact_loss) + 1e-5
    for ours, theirs, wanted in zip(found, plain, exact, strict=True):
        assert relative_error(ours, wanted.double()) <= 1.1 * relative_error(theirs, wanted.double()) + 2**-9


@pytest.mark.parametrize("implementation", [definition, triton_kernels], ids=["definition", "Triton"])
@pytest.mark.parametrize("vocab_size", [63, 9000])
def test_a_negative_target_does_not_count(implementation, vocab_size):
    logits = torch.randn(3, 9024, device=DEVICE)[:, : -(-vocab_size // 64) * 64].contiguous()
    targets = torch.tensor([5, -100, 7], device=DEVICE)
    exact_losses, exact = reference(logits.double()[[0, 2]], targets[[0, 2]], vocab_size)
    losses = implementation.cross_entropy_(logits, targets, vocab_size, True)
    assert losses[1] == 0 and logits[1].eq(0).all()
    torch.testing.assert_close(losses[[0, 2]].double(), exact_losses, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(logits[[0, 2]].double(), exact, rtol=1e-5, atol=1e-6)


def test_the_mean_is_over_the_targets_that_count():
    hidden, weight = torch.randn(4, 16, device=DEVICE), torch.randn(64, 16, device=DEVICE, requires_grad=True)
    targets = torch.tensor([3, -100, 5, -1], device=DEVICE)
    some = linear_cross_entropy(hidden, weight, targets, 64)
    alone = linear_cross_entropy(hidden[[0, 2]], weight, targets[[0, 2]], 64)
    torch.testing.assert_close(some, alone)
    found, expected = (torch.autograd.grad(loss, weight)[0] for loss in (some, alone))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("implementation", [definition, triton_kernels], ids=["definition", "Triton"])
def test_without_gradient_the_logits_stay(implementation):
    logits, targets = torch.randn(4, 192, device=DEVICE), torch.tensor([0, 5, 130, 7], device=DEVICE)
    before = logits.clone()
    losses = implementation.cross_entropy_(logits, targets, 131, False)
    assert torch.equal(logits, before)
    torch.testing.assert_close(losses, reference(logits, targets, 131)[0])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 50, 200], ids=lambda n: f"{n}_tokens")
def test_loss_and_gradients_in_chunks_are_those_of_whole_logits(tokens, dtype, monkeypatch):
    """By 4, 4, 7 and 16 tokens. With the weight in fp32 its gradient is summed in fp32, whatever the products' are."""
    monkeypatch.setattr(op, "CHUNK", (4, 16))
    products, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: products.append(out.shape) or mm(a, b, out=out))
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 32, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(192, 32, device=DEVICE, requires_grad=True)
    targets = torch.randint(150, (tokens,), device=DEVICE)
    loss = linear_cross_entropy(hidden, weight, targets, 150)
    logits = [rows for rows, columns in products if columns == 192]
    assert sum(logits) == tokens and max(logits) == {1: 1, 16: 4, 50: 7, 200: 16}[tokens]
    found = torch.autograd.grad(3 * loss, (hidden, weight))
    assert [x.dtype for x in found] == [dtype, torch.float32]
    exact = F.cross_entropy((hidden.double() @ weight.to(dtype).double().T)[:, :150], targets)
    expected = torch.autograd.grad(3 * exact, (hidden, weight))
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5 if dtype == torch.float32 else 1e-2)
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, 150), loss)


def test_autocast_around_it_changes_nothing():
    """Autocast would round the fp32 sum of the weight's gradient to 16 bits, chunk after chunk."""
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


def test_a_second_derivative_is_refused():
    hidden, weight = torch.randn(8, 16, requires_grad=True), torch.randn(64, 16)
    loss = linear_cross_entropy(hidden, weight, torch.arange(8), 64)
    (gradient,) = torch.autograd.grad(loss * torch.ones((), requires_grad=True), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
