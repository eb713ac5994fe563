"""A short description of a report: the settings that differ between its runs, and the settings that all share."""

from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

from bench.report.runs import TrainingRun

MODELS = Path(__file__).parents[2] / "conf" / "model"
SHAPE = "model.n_layer", "model.n_head", "model.n_embd"
NAMED = "attention", "model", "context", "data"
MOST_SETTINGS = 3  # in a headline
MOST_VALUES = 6  # of a setting


def variant_of(run: TrainingRun) -> str | None:
    """Return the attention variant of a run, or the function of attention=custom. None if its settings are unknown."""
    return run.settings.get("attention.function") or run.settings.get("attention.name")


def facts(run: TrainingRun) -> dict[str, str]:
    """Return attention, model, context and data, then the other settings except the groups wandb and checkpoint."""
    rest = {key: value for key, value in run.settings.items() if not key.startswith(("wandb.", "checkpoint."))}
    if not rest:
        return {}
    for key in ("attention.name", "attention.function"):
        rest.pop(key, None)
    shape = tuple(rest.pop(key, "?") for key in SHAPE)
    context = rest.pop("model.context_length", "?")
    named = variant_of(run), model_named(shape), f"{int(context):,}" if context.isdecimal() else context
    return dict(zip(NAMED, (*map(str, named), rest.pop("data.name", "?")), strict=True)) | rest


@cache
def known_models() -> dict[tuple[str, ...], str]:
    """Return the names of conf/model by layers, heads and width."""
    models = {path.stem: OmegaConf.load(path) for path in sorted(MODELS.glob("*.yaml"))}
    return {tuple(str(model[key.removeprefix("model.")]) for key in SHAPE): name for name, model in models.items()}


def model_named(shape: tuple[str, ...]) -> str:
    layers, heads, width = shape
    return known_models().get(shape, f"layers {layers}, heads {heads}, width {width}")


def differing(runs: list[TrainingRun]) -> dict[str, list[str]]:
    """Return the distinct values of the facts that differ among the runs that have them, in the order of the runs."""
    of_runs = [facts(run) for run in runs]
    keys = dict.fromkeys(key for of_run in of_runs for key in of_run)
    values = {key: list(dict.fromkeys(of_run[key] for of_run in of_runs if key in of_run)) for key in keys}
    apart = {key: of_key for key, of_key in values.items() if len(of_key) > 1}
    return {key: of_key for key, of_key in apart.items() if not (key.startswith("data.") and "data" in apart)}


def headline(runs: list[TrainingRun]) -> str:
    """Return the settings that differ with their values, for example `attention: naive, flash2`, or an empty text."""
    apart = differing(runs)
    parts = [f"{key}: {some(values)}" for key, values in list(apart.items())[:MOST_SETTINGS]]
    more = len(apart) - len(parts)
    return " · ".join([*parts, *([f"{more} more setting{'s' * (more > 1)}"] if more else [])])


def some(values: list[str]) -> str:
    """Return the first values, and how many there are if some are left out."""
    shown = ", ".join(values[:MOST_VALUES])
    return shown if len(values) <= MOST_VALUES else f"{shown}, ... ({len(values)} values)"


def shared(runs: list[TrainingRun]) -> str:
    """Return attention, model, context and data that all runs share, for example `model gpt2 · context 1,024`."""
    apart = differing(runs)
    first = next(filter(None, map(facts, runs)), {})
    return " · ".join(f"{key} {first[key]}" for key in NAMED if key in first and key not in apart)


def apart_text(run: TrainingRun, runs: list[TrainingRun]) -> str:
    """Return the facts of a run that differ from others and that its name does not already hold."""
    own = facts(run)
    texts = (f"{key} {own[key]}" for key in differing(runs) if key in own and own[key] not in run.name)
    return ", ".join(texts)
