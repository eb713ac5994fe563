"""How the benchmarks print results."""

from rich.console import Console
from rich.table import Table


def print_rows(title: str, rows: list[dict], columns: dict[str, str]) -> None:
    """Print rows as a table. `columns` are headings with formats of a row, such as "{ms:.1f}". None becomes a dash.

    Columns with a number format are aligned to the right.
    """
    table = Table(title=title)
    for heading, form in columns.items():
        table.add_column(heading, justify="right" if ":" in form else "left")
    for row in rows:
        table.add_row(*(_formatted(row, form) for form in columns.values()))
    Console(width=120).print(table)


def _formatted(row: dict, form: str) -> str:
    try:
        return form.format_map(row)
    except TypeError:  # None does not have a number format.
        return "-"
