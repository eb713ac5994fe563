"""Find mistakes in a command line before Hydra parses it."""

from collections.abc import Collection, Sequence

from errors import values_in

FLAGS = (
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"),
    *("-h", "-c", "-p", "-r", "-m", "-i", "-sc", "-cp", "-cn", "-cd", "-er"),
)
"""The options of Hydra."""
PATHS = (
    *("hydra.run.dir", "hydra.sweep.dir", "data.dir", "checkpoint.dir", "checkpoint.resume", "model.pretrained"),
    *("checkpoint", "record", "to"),
)
"""The settings of all programs that name files and folders."""
SETTINGS = {
    "batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.grad_accumulation",
    "block_size": "model.context_length",
    "n_layer": "model.n_layer",
    "n_head": "model.n_head",
    "n_embd": "model.n_embd",
    "dropout": "model.dropout",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",  # not a name of nanoGPT's, but of many others
    "max_iters": "train.max_steps",
    "weight_decay": "optimizer.weight_decay",
    "beta1": "optimizer.beta1",
    "beta2": "optimizer.beta2",
    "grad_clip": "optimizer.grad_clip",
    "warmup_iters": "optimizer.warmup_steps",
    "lr_decay_iters": "optimizer.decay_steps",
    "min_lr": "optimizer.min_lr",
    "eval_interval": "train.eval_interval",
    "log_interval": "train.log_interval",
    "out_dir": "hydra.run.dir",
    "wandb_project": "wandb.project",
    "wandb_run_name": "wandb.name",
    "device": "device",
    "compile": "train.compile",
}
"""The settings of train.py by nanoGPT's names, if both take the same values."""
OTHER_VALUES = {
    "decay_lr": "optimizer.min_lr",
    "eval_iters": "train.eval_tokens",
    "always_save_checkpoint": "checkpoint.interval",
    "init_from": "model.pretrained",
    "dataset": "data",
    "wandb_log": "wandb.mode",
    "dtype": "precision",
}
"""The settings of train.py by nanoGPT's names, if the values differ."""


def slip_in(arguments: Sequence[str], is_training: bool) -> str | None:
    """Return the sentence for the first mistake in a command line, or None. `is_training` is true for train.py."""
    options = (_unknown_option(argument, is_training) for argument in arguments if argument.startswith("-"))
    return next(filter(None, options), None) or _empty_path(arguments) or _unused_folder(arguments)


def _unknown_option(argument: str, is_training: bool) -> str | None:
    """Return the sentence for an option that Hydra does not have, or that is shortened.

    Jobs of a sweep get the options of the sweep except --multirun. With --multi, each job would start the sweep again.
    """
    option, _, value = argument.partition("=")
    if option in (*FLAGS, "--"):
        return None
    remedy, name = "write settings as key=value, without dashes (see --help)", option.lstrip("-").replace("-", "_")
    if is_training and name in SETTINGS:
        remedy = f"write {SETTINGS[name]}={value or '...'}"
    elif is_training and name in OTHER_VALUES:
        remedy = f"write {OTHER_VALUES[name]}=... (docs/from-nanogpt.md has the values)"
    return f"{argument} is not an option; {remedy}"


def setting_meant(key: str, known: Collection[str]) -> str | None:
    """Return the setting of train.py that a user of nanoGPT means by an unknown key, or None.

    `known` are the keys of its group. Only train.py has these groups.
    """
    *groups, name = key.split(".")
    is_training = not {"model", "optimizer", "train"}.isdisjoint(groups or known)
    return (SETTINGS | OTHER_VALUES).get(name) if is_training else None


def _empty_path(arguments: Sequence[str]) -> str | None:
    """Return the sentence for a path without a name, such as an unset variable of the shell.

    Hydra, or Python's pathlib, would take the current folder.
    """
    for argument in arguments:
        key, equals, path = argument.lstrip("+").partition("=")
        if key in PATHS and equals and not path.strip(" '\""):
            return f"{argument} is empty; give a path, or leave {key} out"
    return None


def _unused_folder(arguments: Sequence[str]) -> str | None:
    """Return the sentence for an output folder that this start would ignore.

    A job of the process launcher has hydra.run.dir from the launcher, and hydra.sweep.dir from the user.
    """
    given = values_in(arguments)
    if not given.keys().isdisjoint(("--cfg", "-c", "--info", "-i", "--help", "-h")):
        return None  # The program only prints.
    is_sweep = not given.keys().isdisjoint(("-m", "--multirun")) or given.get("hydra.mode") == "MULTIRUN"
    used, ignored = ("hydra.sweep.dir", "hydra.run.dir") if is_sweep else ("hydra.run.dir", "hydra.sweep.dir")
    if used in given or ignored not in given:
        return None
    folder = given[ignored]
    if is_sweep:
        return f"{ignored}={folder} is for a single run; with -m, set {used}={folder}"
    return f"{ignored}={folder} needs -m; for a single run, set {used}={folder}"
