import math

import pytest
import torch
import torch.nn.functional as F

from model.gpt2 import cross_entropy


def table_of(*logits: float, padding: float) -> torch.Tensor:
    """Return a head of width 1, padded to 64 rows, which gives these logits for the hidden state 1."""
    return torch.tensor([*logits] + [padding] * (64 - len(logits)))[:, None]


@pytest.mark.parametrize("padding", [-1e4, 0.0, 1e4])
def test_the_padding_takes_no_part_by_hand(padding):
    """exp(logits) is 1, 2 and 5, with sum 8. So targets 2 and 0 cost ln(8/5) and ln(8)."""
    weight = table_of(0.0, math.log(2), math.log(5), padding=padding)
    loss = cross_entropy(torch.ones(1, 2, 1), weight, torch.tensor([[2, 0]]), vocab_size=3)
    assert loss.item() == pytest.approx((math.log(8 / 5) + math.log(8)) / 2, rel=1e-6)


def test_an_even_table_costs_the_logarithm_of_the_true_vocabulary():
    loss = cross_entropy(torch.randn(2, 3, 8), torch.zeros(128, 8), torch.zeros(2, 3, dtype=torch.long), vocab_size=100)
    assert loss.item() == pytest.approx(math.log(100), rel=1e-6)


@pytest.mark.parametrize("vocab_size", [100, 128], ids=["with 28 rows of padding", "without padding"])
def test_loss_and_gradients_are_those_of_the_unpadded_table(vocab_size):
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 7, 16, requires_grad=True), torch.randn(128, 16, requires_grad=True)
    targets = torch.randint(vocab_size, (3, 7))
    loss = cross_entropy(hidden, weight, targets, vocab_size)
    found = torch.autograd.grad(loss, (hidden, weight))
    unpadded = weight[:vocab_size].detach().requires_grad_()
    likelihood = F.log_softmax(hidden @ unpadded.T, dim=-1).gather(-1, targets[..., None])
    expected = torch.autograd.grad(-likelihood.mean(), (hidden, unpadded))
    torch.testing.assert_close(loss, -likelihood.mean())
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1][:vocab_size], expected[1])
    assert torch.all(found[1][vocab_size:] == 0)


def test_16_bit_logits_are_summed_in_fp32():
    """bf16 cannot hold a sum of 50,257 equal terms to 1 in 10,000."""
    hidden, weight = torch.ones(1, 4, 8, dtype=torch.bfloat16), torch.zeros(50_304, 8, dtype=torch.bfloat16)
    loss = cross_entropy(hidden, weight, torch.tensor([[0, 1, 50_000, 50_256]]), vocab_size=50_257)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(50_257), rel=1e-6)
