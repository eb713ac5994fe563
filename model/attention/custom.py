"""A kernel of the user's own, named on the command line as module:function."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from omegaconf import MISSING
from torch import Tensor

from errors import UserError, described
from model.attention.protocol import Attention, AttentionConfig

REQUIRED = "causal", "scale"


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
        self.keywords = accepted_keywords(function)
        for keyword in REQUIRED:
            if keyword not in self.keywords:
                raise UserError(f"{name} has no parameter {keyword}; define it as (q, k, v, *, causal, scale)")

    def __call__(self, q, k, v, *, causal, scale, dropout_p=0.0, cu_seqlens=None) -> Tensor:
        options = {"causal": causal, "scale": scale}
        if dropout_p:
            options["dropout_p"] = dropout_p
        if cu_seqlens is not None:
            options["cu_seqlens"] = cu_seqlens
        for keyword in options:
            if keyword not in self.keywords:
                raise ValueError(f"{self.name} has no parameter {keyword}; add it or use attention=flash2")
        with torch.autocast(q.device.type, enabled=False):
            return self.function(q, k, v, **options)

    def explain(self, error: Exception) -> str:
        """Name the exception, its message and the last line of the function's file in the traceback."""
        file = getattr(getattr(self.function, "__code__", None), "co_filename", None)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        place = f" in line {lines[-1]} of {os.path.basename(file)}" if lines else ""
        return described(error) + place


def accepted_keywords(function: Callable) -> frozenset[str]:
    """Return which options of the protocol a function accepts; all of them if Python knows no signature of it."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return Attention.keywords
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return Attention.keywords
    return Attention.keywords & parameters.keys()


def load_function(name: str, key: str = "function") -> Callable[..., Tensor]:
    """Import the function that `name`, module:function, names.

    Modules are found on PYTHONPATH or in the current folder. `key` is the setting that messages name.
    """
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        raise UserError(f"{key}={name} is not module:function; write for example {key}=my_module:my_attention")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a file of the user does not hide a module of this repository
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{key}={name}: Python finds no module {error.name}; run from its folder or add it to PYTHONPATH"
            ) from error
        raise UserError(f"{key}={name}: importing {module_name} fails ({described(error)}); fix the module") from error
    if not hasattr(module, function_name):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        known = f"{module_name} has {', '.join(own)}" if own else f"define it in {module.__file__}"
        raise UserError(f"{key}={name}: module {module_name} has no {function_name}; {known}")
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
    names_code = True

    def build(self) -> Attention:
        return Custom(f"attention.function={self.function}", load_function(self.function, "attention.function"))
