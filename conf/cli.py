"""The command line: compose a configuration with Hydra, and print one sentence for every mistake in it."""

import json
import os
import re
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf

from conf import schema
from conf.arguments import slip_in
from conf.explain import explain, sentence_of, unknown_setting
from errors import UserError, as_text, guard_output, refuse, values_in
from hydra_plugins import process_launcher
from trainer.distributed.world import started, started_by_submitit

ROOT = Path(__file__).parents[1]
HOME = re.compile(r"""(^|[=,\[]["']?)~(?=/|$|["',\]])""")  # in a value, and in the grammar of an override
TORCHRUN_GRACE_S = 3  # torchrun needs less to end the other processes when one has ended.


def launch(run: Callable[[Any], None], config_name: str, literal: str | None = None, typed: bool = True) -> None:
    """Call `run` with the typed configuration from conf/<config_name>.yaml and the command line.

    A UserError, or an error of Hydra's, ends the program with one sentence on stderr and status 2. `literal` is the key
    of a free text, which needs no quotes for Hydra. With -m, each job is a new process.
    With typed=False, `run` gets the composed configuration, and calls `to_typed` when all settings are known.
    """
    guard_output()
    if "--version" in sys.argv:
        return _print_version()
    if slip := slip_in(sys.argv[1:], is_training=config_name == "config"):
        _refuse(slip)
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Otherwise Hydra prints errors itself, and at length.
    schema.register()
    process_launcher.register()
    arguments = [_quoted(x) if literal and x.startswith(f"{literal}=") else _with_home(x) for x in sys.argv[1:]]
    sys.argv[1:] = sorted(arguments, key=lambda argument: argument not in ("-m", "--multirun"))  # Hydra wants -m first.
    composed = False

    @hydra.main(version_base="1.3", config_path=str(Path(__file__).parent), config_name=config_name)
    def job(config: DictConfig) -> None:
        nonlocal composed
        composed = True
        guard_output()  # again in a process of submitit
        try:
            processes = HydraConfig.get().launcher.get("nproc_per_node", 1)
            if processes > 1 and not _is_job_of_sweep():
                start = f"start a single run with torchrun --nproc_per_node={processes}"
                raise UserError(f"hydra.launcher.nproc_per_node={processes} needs -m; {start}")
            with suppress(UserError):  # the run refuses a wrong rank
                if started()[0] and not is_output_dir_given():
                    _remove_if_empty(output_dir())  # only the first process writes, and its folder has another name
            _check_values(config, literal)
            run(OmegaConf.to_object(config) if typed else config)
        except Exception as error:
            sentence = sentence_of(error)
            if sentence is None or started_by_submitit():  # The process of the sweep gets the error from submitit.
                raise
            _refuse(sentence)
        finally:
            _remove_if_empty(output_dir())  # Only the first process of a run writes files.

    try:
        job()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # the status that shells use for Ctrl-C
    except Exception as error:
        sentence, is_of_slurm = sentence_of(error), type(error).__module__.startswith("submitit")
        if sentence is None and (composed or isinstance(error, OSError) or is_of_slurm):
            raise
        _refuse(sentence or explain(error))  # Hydra raises ValueError and others for some overrides.
    if process_launcher.failed_jobs:
        refuse(f"jobs of the sweep failed ({', '.join(process_launcher.failed_jobs)}); see their errors above")


def _print_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print(project["name"], project["version"])


def _quoted(argument: str) -> str:
    """Return key=text as an override whose value is exactly `text`, without OmegaConf's expansion of ${...}.

    The prefix ++ marks it as quoted, so that a job of a sweep does not quote it again.
    """
    key, _, text = argument.partition("=")
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return f"++{key}={as_text(escaped)}"


def _with_home(text: str) -> str:
    """Return `text` with each ~ at the start of a path expanded. `text` is a value or an argument key=value."""
    return HOME.sub(lambda match: match[1] + os.path.expanduser("~"), text)


def to_typed(config: DictConfig, literal: str | None = None) -> Any:
    """Return `config` as its dataclass, with ~ expanded in all texts except the setting `literal`."""
    _check_values(config, literal)
    return OmegaConf.to_object(config)


def _check_values(node: DictConfig, literal: str | None, prefix: str = "") -> None:
    """Refuse values that the dataclass of `node` cannot hold, and expand ~ in all texts except `literal`."""
    known = {field.name: field.type for field in fields(OmegaConf.get_type(node))}
    for key in node:
        if key not in known:
            raise UserError(unknown_setting(f"{prefix}{key}", list(known)))
        if OmegaConf.is_missing(node, key):
            continue
        value = node[key]
        if is_dataclass(known[key]):
            kind = OmegaConf.get_type(node, key)  # OmegaConf does not check the type of interpolations.
            if not (isinstance(kind, type) and issubclass(kind, known[key])):
                raise UserError(f"{prefix}{key} is a group; set its keys, {prefix}{key}.KEY=...")
            _check_values(value, literal, f"{prefix}{key}.")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UserError(f"{prefix}{key}={value} does not fit into 64 bits; give a number nearer to 0")
        elif isinstance(value, str) and f"{prefix}{key}" != literal:
            node[key] = _with_home(value)
        elif isinstance(value, ListConfig):
            node[key] = [_with_home(x) if isinstance(x, str) else x for x in value]


def _is_job_of_sweep() -> bool:
    return not OmegaConf.is_missing(HydraConfig.get().job, "num")


def output_dir() -> Path:
    """Return the folder of this run's outputs."""
    return Path(HydraConfig.get().runtime.output_dir)


def is_output_dir_given() -> bool:
    """Return whether the command line names the output folder. Otherwise each start has a new one."""
    key = "hydra.sweep.dir" if _is_job_of_sweep() else "hydra.run.dir"
    return key in values_in(HydraConfig.get().overrides.hydra)


def given_overrides() -> list[Override]:
    """Return the settings and the choices on the command line, without the settings of Hydra itself."""
    return OverridesParser.create().parse_overrides(HydraConfig.get().overrides.task)


def given_keys(group: str) -> set[str]:
    """Return the keys of a group that the command line sets: group.KEY=... or group={KEY:...}. A choice adds none."""
    keys = set()
    for override in given_overrides():
        value = override.value()
        if override.key_or_group == group and isinstance(value, dict):  # model={n_layer:3}
            keys |= {str(key) for key in value}
        elif override.key_or_group.startswith(f"{group}."):
            keys.add(override.key_or_group.removeprefix(f"{group}."))
    return keys


def sweep_name() -> str | None:
    """Return the name of the sweep's folder, or None if this run is not a job of a sweep."""
    if not _is_job_of_sweep():
        return None
    subdir = Path(HydraConfig.get().sweep.subdir)
    return output_dir().parents[len(subdir.parts) - 1].name


def wandb_labels(config: schema.Config, precision: str) -> dict:
    """Return the default group and tags in wandb. Users compare variants by them."""
    model = HydraConfig.get().runtime.choices["model"]  # such as gpt2
    return {"group": sweep_name(), "tags": [config.attention.name, model, config.data.name, precision]}


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # The folder has files, or another process has removed it, or it is a mount point.
        if folder != Path.cwd():
            folder.rmdir()


def _refuse(sentence: str) -> NoReturn:
    """Print the sentence and exit, once for all processes that torchrun started.

    torchrun adds a report of the failed processes. Only the first one is in the report, with the sentence.
    """
    rank, size = 0, 1
    with suppress(UserError):  # The sentence may be about the variables that give the rank.
        rank, size = started()
    if rank:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # torchrun ends this process if the first one fails
        time.sleep(TORCHRUN_GRACE_S)
        sentence += f" (process {rank} of {size})"
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": sentence, "extraInfo": {"timestamp": int(time.time())}}
        Path(report).write_text(json.dumps({"message": message}))
    refuse(sentence)
