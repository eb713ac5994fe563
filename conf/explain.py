"""The sentence to print, problem and remedy, for each error that a user can fix."""

import difflib
import errno
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from inspect import formatannotation
from pathlib import Path
from typing import get_args

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigTypeError, MissingMandatoryValue, OmegaConfBaseException, ValidationError

from conf.arguments import setting_meant
from errors import UserError, as_text, first_line, is_out_of_gpu_memory, is_out_of_memory, two_sentences, values_in
from model.attention import unknown_setting as unknown_attention_setting

PLACES = "outputs go to hydra.run.dir=..., tokens to data.dir=..., checkpoints to checkpoint.dir=..."
SYNTAX = "write settings as key=value, and lists as 'key=[a,b]'"
GROUP = "{key} is a group; set its keys, {key}.KEY=..."
DELETED = "deletes a setting that has to exist; leave it out, or give the setting another value"
SENTENCES = (
    (
        r"Could not override '(.+?)'\. No match",
        r"\1 is not a setting of this program; leave it out, or see --help for the settings",
    ),
    (
        r"Error resolving interpolation '\$\{(\w+)\}', possible",
        r"\1 is a list or has no choice; give one name, \1=NAME (see --help)",
    ),
    (r"Interpolation key '(.+?)' not found", r"${\1} names no setting; give a value, or the name of a setting"),
    (r"Sweep parameters '(.+?)' requires --multirun", r"\1 has several values; add -m to run one job per value"),
    (r"Error merging override (~.+)", rf"\1 {DELETED}"),
    (r"Could not delete from config\. The value of '(.+?)' is .* and not (.*)\.$", rf"~\1=\2 {DELETED}"),
    (
        r"Could not delete from config\. '(.+?)' does not exist",
        r"~\1 deletes a setting that is null or does not exist; leave it out",
    ),
    (
        r"Could not delete '(.+?)=(.+?)'\. No match",
        r"~\1=\2 deletes a choice that was not made; leave it out, or give one choice, \1=NAME",
    ),
    (
        "Config group override must be|argument of type 'int' is not",
        "a group of settings is null, a number or a list; give each group the name of a choice, such as "
        "attention=flash2",
    ),
)
"""Patterns of the lines of Hydra's errors, and the sentences to print for them."""
FAILING_DISK = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO  # A failed write names no file.


def sentence_of(error: Exception) -> str | None:
    """Return what to print for an error that the user can fix, or None for any other error."""
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return explain(error)
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and (error.filename or error.errno in FAILING_DISK):
        path, remedy = error.filename or "the disk", "make room, or " if error.errno in FAILING_DISK else ""
        return f"{path} cannot be used ({error.strerror}); {remedy}choose another place: {PLACES}"
    if is_out_of_memory(error):
        device = "GPU memory" if is_out_of_gpu_memory(error) else "memory"
        return (
            f"out of {device} ({two_sentences(error)}); choose a smaller model or another device; in training, lower "
            "train.batch_size or model.context_length"
        )
    return None


def explain(error: Exception) -> str:
    """Return one sentence for what Hydra or OmegaConf refused."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error)
    # Hydra raises some of its errors while it handles the cause, without "from".
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    key = str(cause.full_key or cause.key) if isinstance(cause, OmegaConfBaseException) else ""
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} has no value; give {key}=..."
    if isinstance(cause, ValidationError) and cause.key is None:
        return "a group of settings has a list or another place; give each group one choice, such as attention=flash2"
    if isinstance(cause, ValidationError):
        return _wrong_type(key, cause)
    if isinstance(cause, ConfigTypeError) and str(cause).startswith("Cannot merge DictConfig with ListConfig"):
        return GROUP.format(key=key)
    if key and isinstance(cause, (AttributeError, KeyError)):
        parent = cause.parent_node
        if isinstance(parent, DictConfig) and key.startswith("attention.") and "name" in parent:
            return unknown_attention_setting(parent.name, str(cause.key))
        if key == "experiment" and (recipe := _experiment_without_header()):
            file = f"experiment/{recipe}.yaml"
            return f"experiment={recipe} has no header; make `# @package _global_` the first line of {file}"
        known = OmegaConf.to_container(parent) if isinstance(parent, DictConfig) else {}
        known.pop("hydra", None)
        groups = [group for group, settings in known.items() if isinstance(settings, dict) and key in settings]
        return unknown_setting(key, [str(name) for name in known], [f"{group}.{key}" for group in groups])
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return f"{error.override} has no value; give {error.override}=..."
        reason = _one_line(error)
        if reason.startswith("Lexer"):
            reason = "a character of the value needs quotes"
        return f"{error.override} cannot be read ({reason}); {SYNTAX}{_or_as_text(error.override)}"
    line = _one_line(error)
    if 'not detect "srun"' in line:
        return f"{line.removesuffix('?')}; start this command on a Slurm cluster, or without hydra/launcher=slurm"
    for pattern, sentence in SENTENCES:
        if found := re.match(pattern, line):
            return found.expand(sentence)
    if line.startswith("Ambiguous value"):
        key, _, values = line[line.index("'") + 1 : line.rindex("'")].partition("=")
        remedy = "add -m to run one job per value"
        if not (Path(__file__).parent / key).is_dir():  # a group takes neither a list nor a text
            remedy += f", or write a list as '{key}=[{values}]'{_or_as_text(f'{key}={values}')}"
        return f"{key}={values} is ambiguous; {remedy}"
    return f"{line}; {SYNTAX}"


def _experiment_without_header() -> str | None:
    """Return the experiment that the command line chooses. None if it sets experiment.KEY too: that is the error."""
    given = values_in(sys.argv[1:])
    return None if any(key.startswith("experiment.") for key in given) else given.get("experiment", "").strip("[]")


def _wrong_type(key: str, error: ValidationError) -> str:
    """Return the sentence for a value that the dataclass of its key cannot hold. The dataclass names the type."""
    known = {field.name: field.type for field in fields(error.object_type)} if is_dataclass(error.object_type) else {}
    kind = known.get(error.key) or next(iter(get_args(error.ref_type)), str)  # of the items of a list
    if is_dataclass(kind):
        return GROUP.format(key=key)
    value = "null" if error.value is None else error.value
    return f"{key}={value} has the wrong type; give a value of type {formatannotation(kind)}"


def _or_as_text(override: str) -> str:
    """Return how to write the value of key=value as a text, quoted for Hydra and for the shell."""
    key, equals, text = override.partition("=")
    return f", or as a text: {shlex.quote(f'{key}={as_text(text)}')}" if equals else ""


def unknown_setting(key: str, known: list[str], meant: Sequence[str] = ()) -> str:
    """Return the sentence for an unknown key.

    `known` are the keys of its group. `meant` are keys of other groups that have the same name.
    """
    group, _, name = key.rpartition(".")
    if setting := setting_meant(key, known):
        meant = [setting]
    suggestion = f" (did you mean {' or '.join(meant)}?)" if meant else _suggestion(name, known)
    among = f"choose among the keys of {group}:" if group else "choose among"
    return f"{key} is not a setting{suggestion}; {among} {', '.join(known)}"


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = error.missing_cfg_file.rpartition("/")
    if choice.startswith("submitit"):
        return f'{group} needs hydra-submitit-launcher; run pip install -e ".[slurm]"'
    # Hydra names no options if the choice is in a list, such as attention=[a,b].
    options = sorted(error.options or (path.stem for path in (Path(__file__).parent / group).glob("*.yaml")))
    given = f"{group or '--config-name'}={choice}"
    return f"{given} is unknown{_suggestion(choice, options)}; choose one of {', '.join(options)}"


def _suggestion(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _one_line(error: Exception) -> str:
    return " ".join(first_line(error).split())
