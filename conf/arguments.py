"""Mistakes that the words of a command line show, before Hydra reads them."""

from collections.abc import Sequence


def slip_in(arguments: Sequence[str]) -> str | None:
    """Return the sentence for the first slip in a command line, or None."""
    return _unused_folder(arguments)


def _unused_folder(arguments: Sequence[str]) -> str | None:
    """Return the sentence for an output folder that this start would ignore.

    A job of the process launcher has hydra.run.dir from the launcher, and hydra.sweep.dir from the user.
    """
    given = dict(argument.lstrip("+").partition("=")[::2] for argument in arguments)
    is_sweep = not given.keys().isdisjoint(("-m", "--multirun")) or given.get("hydra.mode") == "MULTIRUN"
    used, ignored = ("hydra.sweep.dir", "hydra.run.dir") if is_sweep else ("hydra.run.dir", "hydra.sweep.dir")
    if used in given or ignored not in given:
        return None
    folder = given[ignored]
    if is_sweep:
        return f"{ignored}={folder} is for a single run; with -m, set {used}={folder}"
    return f"{ignored}={folder} needs -m; for a single run, set {used}={folder}"
