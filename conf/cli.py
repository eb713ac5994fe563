"""The command line: composes a configuration with Hydra and turns every mistake in it into one sentence."""

import difflib
import errno
import importlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from conf import schema
from errors import (
    UserError,
    after_imports,
    first_line,
    interrupted,
    is_of_gpu_memory,
    is_of_memory,
    refuse,
    two_sentences,
)
from trainer.distributed.world import failed_in_all, is_of_submitit, started

PATIENCE_S = 3  # in which torchrun ends the other processes when one has ended

PLACES = "outputs go where hydra.run.dir=... says, tokens where data.dir=..., checkpoints where checkpoint.dir=..."
ELSEWHERE = f"make room, or write elsewhere: {PLACES}"
PERMISSIONS = f"see to its permissions, or name another: {PLACES}"
ANOTHER = f"name another: {PLACES}"
HOW = (
    "settings are written key=value, lists 'key=[a,b]', and a value with blanks, commas, = or brackets 'key=\"value\"'"
)
# What the user can mend, and how.
REFUSALS_OF_THE_DISK = {
    errno.ENOSPC: ELSEWHERE,
    errno.EDQUOT: ELSEWHERE,
    errno.EROFS: ELSEWHERE,
    errno.EACCES: PERMISSIONS,
    errno.EPERM: PERMISSIONS,
    errno.ENOTDIR: ANOTHER,
    errno.EEXIST: ANOTHER,
    errno.ENAMETOOLONG: ANOTHER,
    errno.EISDIR: ANOTHER,
    errno.EIO: "the disk fails; " + ANOTHER,
    errno.ESTALE: "the disk fails; " + ANOTHER,
    errno.ENOTCONN: "the disk fails; " + ANOTHER,
}


def launch(
    run: Callable[[Any], None], config_name: str, literal: str | None = None, short: dict[str, str] | None = None
) -> None:
    """Calls `run` with the typed configuration that conf/<config_name>.yaml and the command line give.

    A UserError, and whatever Hydra refuses, ends the program with one sentence on stderr and status 2. The value of the
    key `literal` is taken from the command line as it stands, free text being no business of Hydra's grammar. `short`
    are names that stand for longer ones. A job of a sweep that fails does not keep the others from running, unless one
    of several processes failed in it alone.
    """
    after_imports()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises what it would otherwise print at length
    schema.register()
    texts = [argument for argument in sys.argv[1:] if literal and argument.startswith(f"{literal}=")]
    arguments = [_full_name(argument, short or {}) for argument in sys.argv[1:] if argument not in texts]
    multirun = "-m", "--multirun"  # which Hydra wants first
    sys.argv[1:] = sorted(arguments, key=lambda argument: argument not in multirun)
    program, failed = _Program(run), []  # failed: jobs of a sweep
    composed = False

    @hydra.main(version_base="1.3", config_path=str(Path(__file__).parent), config_name=config_name)
    def job(config: DictConfig) -> None:
        nonlocal composed
        composed = True
        try:
            typed = to_typed(config)
            for text in texts:
                setattr(typed, literal, text.partition("=")[2])
            program(typed)
            if started()[0]:  # the outputs are in the first process's folder
                _remove_if_empty(output_dir())
        except Exception as error:
            _tell_of_job(error)
            failed.append(output_dir().name)

    try:
        job()
    except KeyboardInterrupt:
        interrupted()
    except Exception as error:
        sentence, is_of_slurm = sentence_of(error), type(error).__module__.startswith("submitit")
        if sentence is None and (composed or isinstance(error, OSError) or is_of_slurm):
            raise
        _refuse(sentence or explain(error))  # of what it cannot compose Hydra lets a ValueError through, and others
    if failed:
        _refuse(f"of the sweep these jobs failed, as told above: {', '.join(failed)}")


def _tell_of_job(error: Exception) -> None:
    """Tells why a job of a sweep failed, and returns if the others are to run.

    What is refused ends the program here, or Hydra would print the overrides before the sentence. In a sweep nothing is
    raised, as Hydra would skip what comes after the jobs; but in the process of Slurm's that has one of them.
    """
    sentence, of_slurm = sentence_of(error), is_of_submitit()
    if sentence is None and (of_slurm or not is_sweep()):
        raise error
    if sentence is not None:
        _remove_if_empty(output_dir())
        if not is_sweep():
            _refuse(sentence)
        if of_slurm:  # the sweep is in another process, which learns it so
            raise UserError(f"{sentence} (job {job_name()})") from error
    name = job_name()
    told = f"{sentence} (job {name})" if sentence else f"the job {name} broke off:\n{traceback.format_exc()}"
    print(f"error: {told}", file=sys.stderr)
    if not failed_in_all(error, HydraConfig.get().job.num):  # others are in another, and would mistake this one
        _refuse(f"the sweep ends: not all processes failed in the job {name}, as this one did")


def sentence_of(error: Exception) -> str | None:
    """What the user is told of an error that is the user's to mend; None of any other."""
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return explain(error)
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in REFUSALS_OF_THE_DISK:
        return f"{error.filename or 'the disk'}: {error.strerror}; {REFUSALS_OF_THE_DISK[error.errno]}"
    if is_of_memory(error):
        where = "the GPU" if is_of_gpu_memory(error) else "this machine"
        less = "choose a smaller model, or another device; in training, lower train.batch_size or model.context_length"
        return f"{where} has not the memory ({two_sentences(error)}); {less}"
    return None


class _Program:
    """What a script runs. Slurm's processes, in which the script is not __main__, get it by its names."""

    def __init__(self, run: Callable[[Any], None]):
        self.run = run

    def __call__(self, config: Any) -> None:
        self.run(config)

    def __reduce__(self) -> tuple:
        return _import_program, (Path(self.run.__code__.co_filename).stem, self.run.__name__)


def _import_program(module: str, name: str) -> _Program:
    return _Program(getattr(importlib.import_module(module), name))


def _full_name(argument: str, short: dict[str, str]) -> str:
    key, equals, value = argument.partition("=")
    return f"{short.get(key, key)}{equals}{value}" if equals else argument


def to_typed(config: DictConfig) -> Any:
    """The dataclass that `config` is typed by.

    Raises:
        UserError: a key that the dataclass lacks was added with `+`, a number is too long, or a value is refused.
    """
    _refuse_unusable(config)
    return OmegaConf.to_object(config)


def _refuse_unusable(node: DictConfig, prefix: str = "") -> None:
    known = {field.name: field.type for field in fields(OmegaConf.get_type(node))}
    for key in node:
        if key not in known:
            raise UserError(_no_setting(f"{prefix}{key}", list(known)))
        if OmegaConf.is_missing(node, key):
            continue
        if is_dataclass(known[key]):
            if OmegaConf.get_type(node, key) is not known[key]:  # an interpolation, which OmegaConf lets through
                raise UserError(f"{prefix}{key} has settings of its own, {prefix}{key}.KEY=...; give those")
            _refuse_unusable(node[key], f"{prefix}{key}.")
        elif isinstance(node[key], int) and not -(2**63) <= node[key] < 2**63:
            raise UserError(f"{prefix}{key}={node[key]} does not fit into 64 bits; give another number")


def is_sweep() -> bool:
    """Whether this is a job of python train.py -m."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def job_name() -> str:
    """The folder of this job of a sweep, and its settings as the command line has them."""
    return f"{output_dir().name}: {' '.join(HydraConfig.get().overrides.task)}"


def output_dir() -> Path:
    """The folder of this run's outputs."""
    return Path(HydraConfig.get().runtime.output_dir)


def is_output_dir_given() -> bool:
    """Whether the command line names that folder, which else is a new one at every start."""
    key = "hydra.sweep.dir" if is_sweep() else "hydra.run.dir"
    return any(override.lstrip("+").startswith(f"{key}=") for override in HydraConfig.get().overrides.hydra)


def sweep_name() -> str | None:
    """The name of the folder of this run's sweep; None for a run on its own."""
    return Path(HydraConfig.get().sweep.dir).resolve().name if is_sweep() else None


def chosen(group: str) -> str:
    """Which of the YAML files of a configuration group this run took, such as gpt2 of `model`."""
    return HydraConfig.get().runtime.choices[group]


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not empty, or another process was first, or it is a mount point
        if folder != Path.cwd():
            folder.rmdir()


def _refuse(sentence: str) -> None:
    """Ends the program; where several processes refuse the same, the first is left to say so for all."""
    rank, size = started()
    if rank:
        time.sleep(PATIENCE_S)
        sentence += f" (process {rank} of {size})"
    refuse(sentence)


def explain(error: Exception) -> str:
    """What Hydra or OmegaConf refused, in one sentence with the remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, MissingMandatoryValue):
        return f"{_full_key(cause)} has no value; give it as {_full_key(cause)}=..."
    if isinstance(cause, ValidationError):
        return f"{_full_key(cause)}: {_first_line(cause)}; see conf/schema.py and the dataclasses it names"
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        parent, key = cause.parent_node, _full_key(cause)
        known = OmegaConf.to_container(parent) if isinstance(parent, DictConfig) else {}
        known.pop("hydra", None)
        groups = [group for group, settings in known.items() if isinstance(settings, dict) and key in settings]
        return _no_setting(key, [str(name) for name in known], [f"{group}.{key}" for group in groups])
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {_first_line(error)}; {HOW}"
    if 'not detect "srun"' in str(error):  # submitit's, away from a cluster
        return f"{_first_line(error).removesuffix('?')}; start it where Slurm is, or without hydra/launcher=slurm"
    if (first := _first_line(error)).startswith("Ambiguous value"):  # one for a sweep
        return f"{first}; add -m to run one after another, or write a list as 'key=[a,b]'"
    return f"{first}; {HOW}"


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = error.missing_cfg_file.rpartition("/")
    if choice.startswith("submitit"):
        return f'{group} needs hydra-submitit-launcher; run pip install -e ".[slurm]"'
    options = sorted(error.options or [])
    return f"{group}={choice} is unknown{_suggestion(choice, options)}; choose one of {', '.join(options)}"


def _no_setting(key: str, known: list[str], meant: Sequence[str] = ()) -> str:
    """`known` is what there is in its place, `meant` where there is one of that name."""
    place, _, name = key.rpartition(".")
    suggestion = f" (did you mean {' or '.join(meant)}?)" if meant else _suggestion(name, known)
    return f"{key} is no setting{suggestion}; {place or 'the configuration'} has {', '.join(known)}"


def _suggestion(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _full_key(error: OmegaConfBaseException) -> str:
    return str(error.full_key or error.key)


def _first_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", first_line(error))
