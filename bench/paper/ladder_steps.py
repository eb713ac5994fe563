"""The steps of kernels/ladder as calls without arguments, beside other attentions."""

from collections.abc import Callable
from types import ModuleType

import triton

from bench.attention.contenders import Inputs, bind
from bench.attention.shapes import AttentionShape
from bench.common.looks import LOOKS
from bench.paper.attentions import attention_named
from errors import UserError
from kernels import ladder
from kernels.common.launching import triton_version
from kernels.flash2 import dispatch
from kernels.flash2.options import Options

STEPS = {"forward": ladder.FORWARD, "backward": ladder.BACKWARD}


def step_named(name: str) -> ModuleType:
    """Import a step. A Triton without Gluon raises a UserError."""
    if triton_version() < (3, 6):
        raise UserError(f"triton={triton.__version__} is too old for kernels/ladder; install Triton 3.6 or later")
    return ladder.load(name)


def title_of(name: str) -> str:
    """Return a step's number and name, such as 03 fused, or another kernel's label."""
    return LOOKS[name].label if name in LOOKS else name.removeprefix("step_").replace("_", " ")


def call_of(name: str, pass_: str, shape: AttentionShape, inputs: Inputs) -> Callable[[], object]:
    """Return a pass of a step or of another attention, without arguments."""
    if name not in STEPS.get(pass_, ()):
        return bind(name, attention_named(name), shape, inputs).call(pass_)
    step, (q, k, v, dout) = step_named(name), inputs[:4]
    if pass_ == "forward":
        return lambda: step.forward(q, k, v, shape.causal)
    out, logsumexp = dispatch.forward(q, k, v, *Options(causal=shape.causal, scale=shape.head_dim**-0.5))
    return lambda: step.backward(dout, q, k, v, out, logsumexp, shape.causal)
