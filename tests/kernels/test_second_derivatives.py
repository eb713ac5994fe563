"""No operator has a second derivative: each refuses to give one, and ordinary gradients do not notice."""

from functools import partial

import pytest
import torch
from torch.autograd import functional
from torch.utils.checkpoint import checkpoint

from kernels.cross_entropy import linear_cross_entropy
from kernels.flash1 import flash1
from kernels.flash2 import flash2, flash2_packed
from kernels.fused_softmax import fused_softmax
from kernels.gelu import gelu_mlp
from kernels.layer_norm import normalise
from kernels.linear import linear
from kernels.naive.definition import standard_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def attention(kernel, **options):
    return (1, 9, 2, 16), lambda x: kernel(x, x.detach(), x.detach() + 1, causal=True, scale=0.25, **options)


def dense(function, *shapes: tuple):
    """Return the shape of an input, and the function of this input with fixed parameters of these shapes."""
    parameters = [torch.full(shape, 0.1).cumsum(0).sin() for shape in shapes]
    return (6, 16), lambda x: function(x, *(parameter.to(x.device) for parameter in parameters))


def loss_of_head(x, weight):
    return linear_cross_entropy(x, weight, torch.arange(6, device=x.device), 64)


OPERATORS = {
    "naive": attention(standard_attention),
    "naive with dropout": attention(standard_attention, dropout_p=0.3),
    "fused_softmax": attention(fused_softmax),
    "flash1": attention(flash1),
    "flash2": attention(flash2),
    "flash2 with logsumexp": attention(lambda *x, **options: flash2(*x, **options, return_lse=True)[1]),
    "flash2_packed": ((1, 9, 3, 2, 16), lambda x: flash2_packed(x, causal=True)),
    "linear": dense(linear, (24, 16), (24,)),
    "gelu_mlp": dense(gelu_mlp, (24, 16), (24,), (16, 24), (16,)),
    "normalise": dense(lambda x, *affine: normalise(x, *affine, 1e-5)[1], (16,), (16,)),
    "linear_cross_entropy": dense(loss_of_head, (64, 16)),
}


@pytest.fixture(params=OPERATORS)
def operator(request):
    """Return the shape of an operator's input, and the operator as a function of this input."""
    return OPERATORS[request.param]


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_derivative_is_refused(operator, device):
    shape, function = operator
    x, direction = torch.randn(2, *shape, device=device)
    x.requires_grad_()

    def loss(x):
        return function(x).sin().sum() + x.square().sum()

    # The gradient that arrives does not require grad
    with pytest.raises(RuntimeError, match="create_graph=True: .* has no second derivative; use "):
        (gradient,) = torch.autograd.grad(function(x).sum() + x.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    for second in (functional.hvp, functional.vhp):
        with pytest.raises(RuntimeError, match="has no second derivative"):
            second(loss, x, direction)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        functional.hessian(loss, x)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x.detach())


@pytest.mark.parametrize("device", DEVICES)
def test_checkpointing_does_not_change_the_gradient(operator, device):
    shape, function = operator
    x = torch.randn(shape, device=device)

    def gradient_of(function, **options):
        torch.manual_seed(0)
        inner = x.clone().requires_grad_()
        function(inner * 1, **options).square().sum().backward()
        return inner.grad

    expected = gradient_of(function)
    assert expected.norm() > 0
    for reentrant in (True, False):
        found = gradient_of(partial(checkpoint, function), use_reentrant=reentrant)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_torchs_compiler_refuses_too(device):
    """It traces the backward pass without a graph of its own; see test_compiles_without_graph_breaks."""
    shape, function = OPERATORS["flash2"]
    x = torch.randn(shape, device=device, requires_grad=True)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        (gradient,) = torch.autograd.grad(compiled(x).sum() + x.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
