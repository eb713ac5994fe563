"""Kernels of others: a user's function, named on the command line as module:function, and kernels of other libraries.

Each library is imported at its first call: torch's flex_attention takes seconds, and the others may be missing.
"""

import functools
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from omegaconf import MISSING
from torch import Tensor

from errors import UserError, described
from kernels.naive.definition import standard_attention
from model.attention.protocol import Attention, AttentionConfig

FAR = 0.1  # of a result's norm. bench.attention allows 0.005, but other libraries may round more.
NOISE = 0.02  # Runs of a kernel may differ by this share of the largest output. It is more than two roundings in bf16.


class Custom(Attention):
    """A function (q, k, v, *, causal, scale) -> out.

    The function gets dropout_p and cu_seqlens only if they are asked for. Autocast is off inside, so that training
    computes what `python -m bench.attention` checks. The graph breaks there if torch.compile cannot trace the function.
    """

    fullgraph = False
    refusals = (Exception,)
    remedy = "fix the function or choose another attention"

    def __init__(self, name: str, function: Callable[..., Tensor]):
        self.name, self.function = name, function
        required = {"causal", "scale"}
        if problem := _misfit(function, required):
            raise UserError(
                f"{name} cannot be called as (q, k, v, causal=..., scale=...) ({problem}); define it as "
                "(q, k, v, *, causal, scale)"
            )
        self.keywords = frozenset(word for word in Attention.keywords if not _misfit(function, required | {word}))

    def __call__(self, q, k, v, *, causal, scale, dropout_p=0.0, cu_seqlens=None) -> Tensor:
        options = {"causal": causal, "scale": scale}
        if dropout_p:
            options["dropout_p"] = dropout_p
        if cu_seqlens is not None:
            options["cu_seqlens"] = cu_seqlens
        if missing := sorted(options.keys() - self.keywords):
            raise ValueError(f"{self.name} has no parameter {missing[0]}; add it or use attention=flash2")
        with torch.autocast(q.device.type, enabled=False):
            return self.function(q, k, v, **options)

    def check_results(self, q: Tensor, k: Tensor, v: Tensor, **options) -> None:
        """Raise a ValueError if outputs of earlier queries change with the last key and value, or are not finite.

        The last key is the query before it, then its negative: a function that sees this key gives it most of the
        weight, then almost none. Both values have the same elements, so a function that quantises finds the same scale.
        """
        if q.shape[1] < 2:
            return
        sizes = q.shape[2], k.shape[2], v.shape[2]
        key, value = q[:, -2:-1, :: sizes[0] // sizes[1]], v[:, -1:]
        outputs = []
        with torch.random.fork_rng([q.device] if q.is_cuda else []):
            for last_k, last_v in ((key, value), (-key, value.roll(1, -1))):
                torch.manual_seed(0)  # a function may draw random numbers, the same ones both times
                parts = q, torch.cat((k[:, :-1], last_k), 1), torch.cat((v[:, :-1], last_v), 1)
                out = self(*torch.cat(parts, 2).split(sizes, 2), **options)
                outputs.append(out[:, :-1].detach().float())
        before, after = outputs
        if not (before.isfinite().all() and after.isfinite().all()):
            raise ValueError("the output is not finite for random q, k and v")
        if (after - before).abs().max() > NOISE * before.abs().max():
            raise ValueError("the last key and value change the outputs of earlier queries; mask them if causal=True")

    def explain(self, error: Exception) -> str:
        """Name the exception, its message and the last line of the function's file in the traceback."""
        file = getattr(getattr(self.function, "__code__", None), "co_filename", None)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        place = f" in line {lines[-1]} of {os.path.basename(file)}" if lines else ""
        return described(error) + place


class Library(Custom):
    """A function of another library. All of these need a GPU: FlexAttention has no backward pass on a CPU."""

    runs_on_cpu = False
    remedy = Attention.remedy

    def check_results(self, q: Tensor, k: Tensor, v: Tensor, **options) -> None:
        """Raise a ValueError if the output or a gradient is far from the definition's.

        On Hopper, FlashAttention-4 4.0.0b36 computes a wrong dQ for heads of 80, and no error says so.
        """
        if q.shape[1] < 2:  # dQ and dK are zero
            return
        options["scale"] = q.shape[-1] ** -0.5
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
        out, expected = self(*leaves, **options), standard_attention(*exact, **options)
        dout = torch.ones_like(out)
        dout[..., ::2] = -1
        found = out, *torch.autograd.grad(out, leaves, dout)
        wanted = expected, *torch.autograd.grad(expected, exact, dout.float())
        for name, ours, theirs in zip(("output", "dQ", "dK", "dV"), found, wanted, strict=True):
            if not (ours.float() - theirs).norm() <= FAR * theirs.norm():  # also if it is NaN
                raise ValueError(f"its {name} is wrong, far from the definition's")


def _misfit(function: Callable, keywords: set[str]) -> str | None:
    """Return why a function does not accept q, k, v and these keywords; None if it does, or if Python cannot tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Python knows no signatures of some compiled functions
        return None
    try:
        signature.bind(None, None, None, **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return None


def load_function(name: str, key: str = "function") -> Callable[..., Tensor]:
    """Import module:function from PYTHONPATH or the current folder. `key` is the setting that messages name."""
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        raise UserError(f"{key}={name} is not module:function; write for example {key}=my_module:my_attention")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a file of the user does not hide a module of this repository
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # A script without a `__main__` guard may call sys.exit.
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{key}={name} names module {error.name}, which Python does not find; run from its folder or add that "
                "folder to PYTHONPATH"
            ) from error
        raise UserError(f"{key}={name} cannot be imported ({described(error)}); fix the module") from error
    if not hasattr(module, function_name):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        remedy = f"choose among {', '.join(own)}" if own else f"define it in {module.__file__}"
        raise UserError(f"{key}={name} names {function_name}, which module {module_name} does not have; {remedy}")
    function = getattr(module, function_name)
    if not callable(function):
        raise UserError(f"{key}={name} is a {type(function).__name__}, not a function; name a function")
    return function


@dataclass
class CustomConfig(AttentionConfig):
    """A function of the user's own: see docs/your-own-kernel.md."""

    name: str = "custom"
    function: str = MISSING
    """module:function, found on PYTHONPATH or in the current folder."""

    @property
    def detail(self) -> str:
        return self.function

    def build(self) -> Attention:
        return Custom(f"attention.function={self.function}", load_function(self.function, "attention.function"))


@functools.cache
def _compiled_flex(dynamic: bool) -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    # Without fullgraph, dynamo would fall back to eager at its limit of recompilations.
    return torch.compile(flex_attention, fullgraph=True, dynamic=dynamic)


@functools.cache
def _causal_blocks(seq_q: int, seq_k: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i + seq_k - seq_q >= j, None, None, seq_q, seq_k, device=device)


def flex(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Return FlexAttention, compiled once per shape. Its block mask is made once per length."""
    blocks = _causal_blocks(q.shape[1], k.shape[1], q.device) if causal else None
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend = _compiled_flex(dynamic=q.shape[2] == 1)  # in sampling, keys grow by one per token
    return attend(q, k, v, block_mask=blocks, scale=scale, enable_gqa=grouped).transpose(1, 2)


def fa2(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout_p: float = 0.0) -> Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, dropout_p=dropout_p, softmax_scale=scale, causal=causal)


def fa3(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    from flash_attn_interface import flash_attn_func

    return _first(flash_attn_func(q, k, v, softmax_scale=scale, causal=causal))


def fa4(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    from flash_attn.cute import flash_attn_func

    return _first(flash_attn_func(q, k, v, softmax_scale=scale, causal=causal))


def _first(result: Tensor | tuple) -> Tensor:
    """Return the output alone. Some versions return the logsumexp too."""
    return result[0] if isinstance(result, tuple) else result


def is_installed(package: str) -> bool:
    """Return whether Python finds a package, without importing it (its parent package is imported)."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return False
    # FlashAttention-4 alone leaves a folder flash_attn without FlashAttention-2. A folder without code has no origin.
    return spec is not None and spec.origin is not None


@dataclass
class LibraryConfig(AttentionConfig):
    """Base of the variants that need a package which this repository does not install."""

    function: ClassVar[Callable[..., Tensor]]
    package: ClassVar[str]
    pip: ClassVar[str]

    def build(self) -> Attention:
        if not is_installed(self.package):
            if not torch.cuda.is_available():  # The package would not help.
                raise UserError(f"attention={self.name} does not run on a CPU; use attention=flash2")
            raise UserError(f"attention={self.name} needs the package {self.package}; run {self.pip}")
        return Library(f"attention={self.name}", self.function)


@dataclass
class FlexConfig(AttentionConfig):
    """torch's FlexAttention, compiled by itself, on a GPU."""

    name: str = "flex"

    def build(self) -> Attention:
        # torch.compile would trace the cached mask into every layer. The decorator is applied here, because importing
        # it takes two seconds.
        return Library("attention=flex", torch.compiler.disable(flex))


@dataclass
class Fa2Config(LibraryConfig):
    """FlashAttention-2 from its authors."""

    name: str = "fa2"
    function, package, pip = staticmethod(fa2), "flash_attn", "pip install flash-attn --no-build-isolation"


@dataclass
class Fa3Config(LibraryConfig):
    """FlashAttention-3 from its authors, for Hopper."""

    name: str = "fa3"
    function, package = staticmethod(fa3), "flash_attn_interface"
    pip = 'pip install --no-build-isolation "git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper"'


@dataclass
class Fa4Config(LibraryConfig):
    """FlashAttention-4 from its authors, for Hopper and Blackwell."""

    name: str = "fa4"
    function, package, pip = staticmethod(fa4), "flash_attn.cute", "pip install flash-attn-4"
