"""The classifier of bench.lra: padding, packing and pairs."""

import pytest
import torch

from bench.lra.attentions import UNPADDED
from bench.lra.encoder import Classifier, packing_of
from tests.bench.lra.definitions import config_of

LENGTHS = torch.tensor([24, 1, 13], dtype=torch.int32)


@pytest.fixture
def tokens() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(1, 16, (3, 24)) * (torch.arange(24) < LENGTHS[:, None])


def alone(model: Classifier, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of each sequence without its padding."""
    return torch.cat([model(row[None, :n]) for row, n in zip(tokens, LENGTHS.tolist(), strict=True)])


def test_pooling_leaves_out_the_padding(tokens):
    """If attention sees one token only, a padded sequence has the logits of the sequence alone."""
    model = Classifier(config_of(32), "naive").double()
    for block in model.blocks:
        block.attention = lambda q, k, v: q * k + v
    torch.testing.assert_close(model(tokens, LENGTHS), alone(model, tokens))
    assert not torch.allclose(model(tokens)[1:], alone(model, tokens)[1:])


def test_other_attentions_see_the_padding(tokens):
    model = Classifier(config_of(32), "naive").double()
    assert not torch.allclose(model(tokens, LENGTHS)[1:], alone(model, tokens)[1:], atol=1e-6)


def test_flash2_unpadded_runs_each_sequence_as_if_alone(tokens):
    """Logits and the gradients of all weights, with the packing and without."""
    model = Classifier(config_of(32), UNPADDED).double()
    plain = Classifier(config_of(32), "flash2").double()
    plain.load_state_dict(model.state_dict())
    packing = packing_of(LENGTHS, 24)
    assert packing.index.tolist() == [*range(24), 24, *range(48, 61)] and packing.cu_seqlens.tolist() == [0, 24, 25, 38]
    expected = alone(plain, tokens)
    torch.testing.assert_close(model(tokens, LENGTHS, packing), expected)
    torch.testing.assert_close(model(tokens), plain(tokens))
    found = model(tokens, LENGTHS)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for (key, weight), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, msg=lambda text, key=key: f"{key}: {text}")


def test_two_documents_in_a_row_are_a_pair(tokens):
    """The order inside a pair matters, and pairs do not see each other."""
    model = Classifier(config_of(32, pairs=True), "flash2").double()
    a, b, c = tokens
    logits = model(torch.stack([a, b, c, a]))
    torch.testing.assert_close(model(torch.stack([c, a, a, b])), logits.flip(0))
    assert not torch.isclose(model(torch.stack([b, a, c, a]))[0], logits[0]).any()
    model.head = torch.nn.Identity()
    first, second, product, difference = model(torch.stack([a, b])).chunk(4, 1)
    torch.testing.assert_close(product, first * second)
    torch.testing.assert_close(difference, first - second)
