"""The settings of a resumed run: the checkpoint gives them, and the command line overrides them."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import MISSING, DictConfig, OmegaConf

from conf.cli import given_overrides, is_output_dir_given, output_dir, to_typed
from conf.schema import Config
from data.config import DataConfig
from errors import UserError
from model.attention import VARIANTS, AttentionConfig, CustomConfig, restore_attention
from trainer.checkpoint.config import CheckpointConfig
from trainer.checkpoint.files import State
from trainer.checkpoint.load import load_resumed, of_this_version
from trainer.config import AUTO
from trainer.precision import Compute

CHOSEN = ("device", "precision.name")  # by auto
PLACES = ("checkpoint.resume", "checkpoint.dir")  # The place of a run is not part of its recipe.


def run_settings(composed: DictConfig) -> tuple[Config, State | None]:
    """Return the settings of a run, and the checkpoint that it continues, or None for a new run.

    `composed` comes from the command line alone. Its values are not compared with each other before they are merged
    with the checkpoint's: optimizer.min_lr may be above the default of optimizer.lr, but not above the run's.
    """
    place = CheckpointConfig(dir=composed.checkpoint.dir, resume=composed.checkpoint.resume)
    resumed = load_resumed(place, output_dir(), is_output_dir_given())
    return to_typed(_merged(composed, resumed) if resumed else composed), resumed


def _merged(composed: DictConfig, state: State) -> DictConfig:
    """Return the settings of a checkpoint, overridden by the settings on the command line.

    A group choice such as model=gpt2 gives all settings of its group. The choice of the run's own optimizer gives none:
    its defaults depend on the model, and the command line may not name the run's model.
    """
    source = state["path"]
    overrides = given_overrides()
    choices = {*HydraConfig.get().runtime.choices, "experiment"}  # a list, experiment=[a,b], is not among Hydra's
    groups = [x for x in overrides if _group_of(x) in choices and x.value() is not None]
    keys = [key for x in groups for key in _keys_of_choice(_group_of(x), x.value())]
    with of_this_version(state):
        stored = state["config"]
        if "${" in json.dumps(stored):
            raise ValueError("its settings refer to others")
        attention = composed.attention if "attention" in keys else _attention_of(stored["attention"], source)
        before = OmegaConf.merge(OmegaConf.structured(Config), stored | {"attention": attention})
    if composed.optimizer.name == before.optimizer.name:
        keys = [key for key in keys if key != "optimizer"]
    merged = before.copy()
    for key in keys:
        OmegaConf.update(merged, key, OmegaConf.select(composed, key, throw_on_missing=True), merge=False)
    for override in overrides:
        if override not in groups and not override.is_delete():
            OmegaConf.update(merged, override.key_or_group, override.value())
    merged.checkpoint.resume, merged.checkpoint.dir = composed.checkpoint.resume, composed.checkpoint.dir
    if merged.train.batch_size == AUTO:
        merged.train.batch_size = before.train.batch_size  # the number that the run began with
    _check_merged(merged, before, state)
    return merged


def _check_merged(merged: DictConfig, before: DictConfig, state: State) -> None:
    """Refuse changes of the settings `before` that the checkpoint cannot follow."""
    source = state["path"]
    if (name := merged.optimizer.name) != (own := before.optimizer.name):
        raise UserError(
            f"optimizer={name} cannot continue checkpoint.resume={source}, which holds the moments of "
            f"optimizer={own}; set optimizer={own}, or start a new run with model.pretrained={source}"
        )
    if (weights := merged.model.pretrained) not in (None, before.model.pretrained):
        raise UserError(
            f"model.pretrained={weights} has no effect on a resumed run; leave it out, or start a new run in another "
            "folder"
        )
    if state["step"] > merged.train.max_steps:
        raise UserError(
            f"checkpoint.resume={source} is at step {state['step']}, past train.max_steps={merged.train.max_steps}; "
            "raise train.max_steps, or resume from an earlier checkpoint"
        )


def _attention_of(stored: dict, source: str) -> AttentionConfig:
    if stored["name"] == CustomConfig.name:
        raise UserError(
            f"checkpoint.resume={source} was trained with attention=custom, and a checkpoint must not name code to "
            f"import; give attention=custom attention.function={stored['function']} again"
        )
    return restore_attention(stored, None)


def _group_of(override: Override) -> str:
    """Return the group of a choice with the package that it is placed in, such as optimizer/of@optimizer."""
    return f"{override.key_or_group}@{override.package}" if override.package else override.key_or_group


def _keys_of_choice(group: str, choice: str | list[str]) -> Iterator[str]:
    """Yield the keys that a choice sets: its group, or the keys in the files of experiments. Hydra's own set none."""
    if group == "experiment":
        for name in choice if isinstance(choice, list) else [choice]:
            yield from _keys_of_experiment(name)
    elif not group.startswith("hydra/"):
        path, _, package = group.partition("@")
        yield package or path.partition("/")[0]


def _keys_of_experiment(name: str) -> Iterator[str]:
    """Yield the keys that an experiment sets, itself and by the experiments and groups in its defaults."""
    places = (Path(source.path) for source in HydraConfig.get().runtime.config_sources if source.schema == "file")
    file = next(file for place in places if (file := place / "experiment" / f"{name}.yaml").is_file())
    content = OmegaConf.to_container(OmegaConf.load(file))
    content.pop("hydra", None)
    for default in content.pop("defaults", []):
        if isinstance(default, dict):
            ((group, choice),) = default.items()
            yield from _keys_of_choice(group.removeprefix("override ").strip("/"), choice)
        elif default != "_self_":
            yield from _keys_of_experiment(default.removeprefix("/experiment/"))
    yield from flat(content)


def recorded(config: Config, compute: Compute) -> dict:
    """Return the settings that a checkpoint keeps, with the device and the precision that auto chose.

    Otherwise, a resumed run could train on a CPU in fp32 without a word if its new machine has no working GPU.
    """
    return asdict(config) | {"device": compute.device.type, "precision": {"name": compute.precision}}


def changed_settings(before: dict, after: dict) -> dict[str, list]:
    """Return the settings that differ between two runs, [before, after] by key. The places of a run do not count.

    A setting that `before` lacks, because an older version or another attention wrote it, had its default. Older
    versions do not say what auto chose.
    """
    before, after = _defaults(after["attention"]["name"]) | flat(before), flat(after)
    changed = {key: [before.get(key), x] for key, x in after.items() if before.get(key) != x and key not in PLACES}
    return {key: change for key, change in changed.items() if not (key in CHOSEN and change[0] == AUTO)}


def _defaults(attention: str) -> dict[str, object]:
    """Return the defaults of the settings of a run with this attention, by their dotted keys."""
    groups = {"attention": OmegaConf.structured(VARIANTS[attention]), "data": OmegaConf.structured(DataConfig)}
    settings = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(Config), groups))
    return {key: value for key, value in flat(settings).items() if value != MISSING}


def flat(settings: dict, prefix: str = "") -> dict[str, object]:
    """Return the values of nested settings by their dotted keys, such as train.batch_size."""
    values = {}
    for key, value in settings.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values
