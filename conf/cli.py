"""The command line: composes a configuration with Hydra and turns every mistake in it into one sentence."""

import difflib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException, ValidationError

from conf import schema
from errors import UserError


def launch(run: Callable[[Any], None], config_name: str) -> None:
    """Calls `run` with the typed configuration that conf/<config_name>.yaml and the command line give.

    A UserError, and whatever Hydra refuses, ends the program with one sentence on stderr and status 2.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises what it would otherwise print at length
    schema.register()

    @hydra.main(version_base="1.3", config_path=str(Path(__file__).parent), config_name=config_name)
    def job(config: DictConfig) -> None:
        try:
            run(OmegaConf.to_object(config))
        except UserError:
            _remove_if_empty(output_dir())
            raise

    try:
        job()
    except UserError as error:
        _refuse(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        _refuse(explain(error))


def output_dir() -> Path:
    """The folder of this run's outputs."""
    return Path(HydraConfig.get().runtime.output_dir)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _refuse(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def explain(error: Exception) -> str:
    """What Hydra or OmegaConf refused, in one sentence with the remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, MissingMandatoryValue):
        return f"{_full_key(cause)} has no value; give it as {_full_key(cause)}=..."
    if isinstance(cause, ValidationError):
        return f"{_full_key(cause)}: {_first_line(cause)}; python train.py --cfg job shows the values it can take"
    if isinstance(cause, ConfigKeyError) or "is not in struct" in str(error):
        return _unknown_key(cause)
    return f"{_first_line(error)}; python train.py --help shows how settings are written"


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = error.missing_cfg_file.rpartition("/")
    options = sorted(error.options or [])
    return f"{group}={choice} is unknown{_suggestion(choice, options)}; choose one of {', '.join(options)}"


def _unknown_key(error: OmegaConfBaseException) -> str:
    key, parent = _full_key(error), error.parent_node
    known = [str(name) for name in parent] if isinstance(parent, DictConfig) else []
    place = key.rpartition(".")[0]
    return (
        f"{key} is no setting{_suggestion(key.rpartition('.')[2], known)}; "
        f"{place or 'the configuration'} has {', '.join(known)}"
    )


def _suggestion(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _full_key(error: OmegaConfBaseException) -> str:
    return str(error.full_key or error.key)


def _first_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error).strip().splitlines()[0])
