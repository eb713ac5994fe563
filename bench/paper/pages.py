"""The Markdown page and the pictures of a table, made from its results."""

from collections import Counter
from pathlib import Path

from bench.common.drawing import save
from bench.common.results import short_commit, write_text
from bench.paper.tables import load_table

CPU = "CPU, reference implementation"  # without a GPU, flash2 runs as the tiled algorithm in PyTorch


def publish(name: str, results: dict, folder: Path) -> None:
    """Write a table's page and its pictures to `folder`, beside its results."""
    write_text(folder / f"paper-{name}.md", page(name, results))
    pictures = getattr(load_table(name), "pictures", lambda rows, device: {})
    for ending, figure in pictures(results["rows"], device_of(results)).items():
        for suffix in ("png", "svg"):
            save(figure, folder / f"paper-{name}{ending}.{suffix}")


def page(name: str, results: dict) -> str:
    """Return a table's page: title, table, failures, and the environment of the measurement."""
    table, rows, where = load_table(name), results["rows"], results["environment"]
    body = table.markdown(rows) if where["gpu"] else with_device(table.markdown(rows))
    failures = dict.fromkeys(f"- {description(row)}" for row in rows if row["status"] == "failed")
    parts = [f"# {table.TITLE}", body]
    parts += ["Failed:\n\n" + "\n".join(failures)] if failures else []
    warning = "Smoke sizes, which say nothing about speed. " if results["size"] == "smoke" else ""
    versions = f"torch {where['torch']}, Triton {where['triton']}, {commits_of(results)}, begun {where['date']}"
    return "\n\n".join([*parts, f"{warning}Measured on {device_of(results)} ({versions})."]) + "\n"


def description(row: dict) -> str:
    """Return the keys of a cell, or of a failed row with its message, in words."""
    hidden = "status", "message", "commit"
    words = ", ".join(f"{key} {value}" for key, value in row.items() if value is not None and key not in hidden)
    return f"{words}: {row['message']}" if row.get("message") else words


def commits_of(results: dict) -> str:
    """Return the commits of the rows, with the number of rows of each if there are several."""
    own = results["environment"]["commit"]
    counts = Counter(short_commit(row.get("commit", own)) for row in results["rows"])
    if len(counts) == 1:
        return f"commit {min(counts)}"
    return "commits " + ", ".join(f"{commit} ({count} rows)" for commit, count in counts.items())


def device_of(results: dict) -> str:
    return results["environment"]["gpu"] or CPU


def with_device(body: str) -> str:
    """Return the Markdown of a table measured on a CPU, with the device in the first column of each row."""
    lines = body.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("|---") or line.startswith("|--:"):
            lines[number - 1], lines[number] = f"| device {lines[number - 1]}", f"|---{line}"
        elif line.startswith("|") and number and lines[number - 1].startswith("|"):
            lines[number] = f"| {CPU} {line}"
    return "\n".join(lines)
