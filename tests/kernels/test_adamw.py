"""AdamW's kernel against torch.optim.AdamW in fp64. Without a GPU it runs in the interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kernels.adamw.triton_kernels import CHUNK, adamw_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STATE = {"exp_avg": 1e-7, "exp_avg_sq": 1e-12}  # absolute errors, for gradients around 1 that cancel, and for squares
SIZES = st.lists(st.sampled_from([0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]), min_size=1, max_size=4)


def made(size: int, offset: int) -> Tensor:
    """Return `size` random numbers that start `offset` elements after a multiple of 16 bytes."""
    return torch.randn(size + offset).to(DEVICE)[offset:]


@given(
    sizes=SIZES,
    offset=st.sampled_from([0, 0, 1]),
    betas=st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.5, 0.5), (0.0, 0.95), (0.0, 0.0)]),
    decay=st.sampled_from([0.0, 0.1]),
    scale=st.sampled_from([1.0, 8.0]),
    steps=st.lists(st.booleans(), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_steps_match_torch_in_fp64(sizes, offset, betas, decay, scale, steps, seed):
    """`steps` says which gradients are finite. The others must not change anything.

    beta2 is at least beta1. Otherwise a small second moment would amplify rounding errors.
    """
    torch.manual_seed(seed)
    weights = [made(size, offset) for size in sizes]
    theirs = [nn.Parameter(x.double()) for x in weights]
    moments = [[torch.zeros_like(x) for x in weights] for _ in range(2)]
    counts = [torch.zeros((), device=DEVICE) for _ in weights]
    config = {"lr": 0.01, "eps": 1e-8, "weight_decay": decay}
    exact = torch.optim.AdamW(theirs, betas=betas, **config)
    for finite in steps:
        gradients = [made(size, offset) for size in sizes]
        if finite:
            for parameter, gradient in zip(theirs, gradients, strict=True):
                parameter.grad = gradient.double() / scale
            exact.step()
        numbers = torch.tensor(scale, device=DEVICE), torch.tensor(float(not finite), device=DEVICE)
        gradients = gradients if finite else [x.fill_(float("nan")) for x in gradients]
        adamw_(weights, gradients, *moments, counts, *numbers, beta1=betas[0], beta2=betas[1], **config)
    assert [count.item() for count in counts] == [sum(steps)] * len(weights)
    for i, parameter in enumerate(theirs):
        torch.testing.assert_close(weights[i].double(), parameter.detach(), rtol=1e-6, atol=3e-7)
        if any(steps):
            for moment, (key, atol) in zip(moments, STATE.items(), strict=True):
                torch.testing.assert_close(moment[i].double(), exact.state[parameter][key], rtol=1e-6, atol=atol)


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.999, 0.99999])
def test_early_steps_are_unbiased_for_beta_near_one(beta):
    """After equal gradients g the unbiased moments are g and g^2, so each step is lr for any beta."""
    weight, count = torch.zeros(1, device=DEVICE), torch.zeros((), device=DEVICE)
    gradient, first, second = torch.full_like(weight, 0.5), torch.zeros_like(weight), torch.zeros_like(weight)
    one, config = torch.ones((), device=DEVICE), {"lr": 1.0, "eps": 1e-30, "weight_decay": 0.0}
    for step in range(1, 4):
        tensors = [weight], [gradient], [first], [second], [count]
        adamw_(*tensors, one, one - 1, beta1=beta, beta2=beta, **config)
        assert weight.item() == pytest.approx(-step, rel=2e-5 if beta < 0.9999 else 2e-3)


def test_unsupported_tensors_are_refused():
    x, one = [torch.zeros(4, 4, device=DEVICE)], torch.ones((), device=DEVICE)
    config = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
    for bad in (x[0].double(), x[0][:, :2]):
        with pytest.raises(ValueError, match="contiguous fp32"):
            adamw_(x, [bad], x, x, [one], one, one, **config)
