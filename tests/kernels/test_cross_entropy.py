"""Cross-entropy over a linear head against fp64, beside torch's own in the same dtype; where there is no GPU the Triton
kernel runs in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

import kernels.cross_entropy.op as op
from kernels.cross_entropy import definition, linear_cross_entropy, triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def reference(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and the gradient of their sum by autograd, in the dtype of the logits."""
    logits = logits.detach().requires_grad_()
    losses = F.cross_entropy(logits[:, :vocab_size], targets, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


@pytest.mark.parametrize("implementation", [definition, triton_kernel], ids=["definition", "Triton"])
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


@pytest.mark.parametrize("implementation", [definition, triton_kernel], ids=["definition", "Triton"])
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


@pytest.mark.parametrize("implementation", [definition, triton_kernel], ids=["definition", "Triton"])
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
