"""Consoles whose output a test can read."""

import io

from rich.console import Console


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=80)


def terminal() -> Console:
    return Console(file=io.StringIO(), width=200, force_terminal=True, force_interactive=True, color_system=None)


def printed(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()
