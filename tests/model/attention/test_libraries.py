"""Attention of other libraries: the check before training."""

import pytest
import torch

from errors import UserError
from kernels.naive.definition import standard_attention
from model.attention import check_attention
from model.attention.custom import Fa4Config, Library


def with_wrong_dq(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float) -> torch.Tensor:
    out = standard_attention(q.detach(), k, v, causal=causal, scale=scale)
    return out + 1e-3 * (q - q.detach())  # a right output, and dQ of another function


@pytest.mark.parametrize("groups", [1, 2])
def test_a_library_with_a_wrong_gradient_is_refused_before_training(monkeypatch, groups):
    """No exception and no output shows a wrong dQ, only a model that learns badly."""
    monkeypatch.setattr(Library, "runs_on_cpu", True)
    monkeypatch.setattr(Fa4Config, "package", "torch")
    sizes = {"head_dim": 16, "dropout_p": 0.0, "device": torch.device("cpu"), "context_length": 70, "groups": groups}
    monkeypatch.setattr(Fa4Config, "function", staticmethod(standard_attention))
    check_attention(Fa4Config(), dtype=torch.bfloat16, **sizes)
    monkeypatch.setattr(Fa4Config, "function", staticmethod(with_wrong_dq))
    with pytest.raises(
        UserError, match="attention=fa4 cannot run on cpu with head_dim 16.*its dQ is wrong.*; choose another attention"
    ):
        check_attention(Fa4Config(), dtype=torch.bfloat16, **sizes)
