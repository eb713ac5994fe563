"""The command line that all benchmarks share: Hydra's key=value, without a YAML file or a help text of its own."""

import ast
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TypeVar

import omegaconf
from hydra.core.config_store import ConfigStore

import errors
from conf import cli
from errors import UserError

Settings = TypeVar("Settings")
WIDTH = 110  # columns of the help text
INDENT = 18 * " "


def launch(run: Callable[[Settings], None], settings: type[Settings]) -> None:
    """Call `run` with the dataclass `settings`, filled from the command line.

    `--help` prints the docstring of run's module, then each field with its default and its docstring.
    """
    spec = sys.modules["__main__"].__spec__
    module = spec.name if spec and spec.name.startswith("bench.") else run.__module__
    program = module.removesuffix(".__main__")
    name = program.replace(".", "_")
    text = help_text(program, inspect.getmodule(run).__doc__ or "", settings)
    hydra = {
        "job": {"name": program},
        "output_subdir": None,
        "run": {"dir": "."},
        "help": {"app_name": program, "template": text.replace("$", "$$")},  # Hydra would substitute $NAME
    }
    for key, _, value in (argument.partition("=") for argument in sys.argv[1:]):
        is_list = any(field.name == key and "list[" in str(field.type) for field in fields(settings))
        if is_list and not value.startswith("[") and value != "null":
            errors.refuse(f"{key}={value} is not a list; write '{key}=[{value}]'")
    quiet = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
    store = ConfigStore.instance()
    store.store(name=f"{name}_schema", node=settings)
    store.store(name=name, node={"defaults": [f"{name}_schema", "_self_", *quiet], "hydra": hydra})
    cli.launch(run, name)


def help_text(program: str, about: str, settings: type) -> str:
    """Return the text of `--help`."""
    documented, lines = field_docs(settings), []
    for field in fields(settings):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        required = default in (MISSING, omegaconf.MISSING)
        explained = f"{documented.get(field.name, '')} ({'required' if required else _as_written(default)})"
        lines += textwrap.wrap(explained, WIDTH, initial_indent=f"  {field.name:15} ", subsequent_indent=INDENT)
    head = [about.strip(), "", f"Usage: python -m {program} [key=value ...]", "", "Settings and their defaults:"]
    return "\n".join([*head, *lines])


def field_docs(settings: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, in one line."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    docs = {}
    for node, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
            docs[node.target.id] = " ".join(ast.literal_eval(following.value).split())
    return docs


def _as_written(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_as_written, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def check_output_file(
    key: str, path: str | Path | None, kind: str = "a results file", example: str = "rows.json"
) -> None:
    """Refuse a file that cannot be written, before anything is measured. None is accepted.

    Also refuse a file without the ending of `example`, which may be a file of another kind that the user would lose.
    """
    if path is None:
        return
    if Path(path).is_dir():
        raise UserError(f"{key}={path} is a folder; name a file in the folder")
    folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(f"{key}={path} cannot be written ({folder} is not a writable folder); name another file")
    if Path(path).suffix != (ending := Path(example).suffix):
        raise UserError(f"{key}={path} does not end in {ending}; name {kind}, for example {key}={example}")


def check_positive(settings: object, *keys: str, most: float = 2**31) -> None:
    """Refuse a number, or a list with a number, that is not positive or is above `most`. None is accepted."""
    for key in keys:
        value = getattr(settings, key)
        for number in _items(key, value):
            if not number > 0:  # also true of NaN
                raise UserError(f"{key}={_as_written(value)} is not positive; give a number above 0")
            if number > most:
                raise UserError(f"{key}={_as_written(value)} is too large; give at most {most}")


def check_choice(key: str, value: object, choices: Collection) -> None:
    """Refuse a value, or a list with a value, that is not one of `choices`. None is accepted."""
    for name in _items(key, value):
        errors.check_choice(key, name, choices)


def _items(key: str, value: object) -> list:
    if value == []:
        raise UserError(f"{key}=[] is empty; give at least one value")
    return value if isinstance(value, list) else [] if value is None else [value]
