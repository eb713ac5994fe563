"""The settings of python -m bench.paper."""

from dataclasses import dataclass
from pathlib import Path

from bench.common.command_line import check_choice, check_positive
from bench.paper.tables import TABLES
from errors import UserError


@dataclass
class PaperSettings:
    """The tables to measure, their size, and the folder of the results."""

    table: str = "all"
    """gpt2, gpt2_context, gpt3, kernels, memory, io, blocks or scaling; or all, one after another."""
    size: str = "full"
    """full, or smoke: tiny models and shapes that run on any machine in under a minute per table, to test the code."""
    gpu: str | None = None
    """Folder under bench/results; null uses the device's name. A smoke run writes to outputs/paper-smoke."""
    resume: bool = True
    """Measure only the cells that the results lack; false renames the old results to *.json.old and measures all."""
    any_commit: bool = False
    """Add missing cells to results of another commit; the page then names both commits."""
    timeout_s: int = 600
    """Time limit of a cell in seconds."""
    tokens: str | None = None
    """Folder of GPT-2 tokens from data.prepare; table gpt2 then also trains on them and compares perplexities."""
    steps: int = 300
    """Optimizer steps of each of these training runs."""

    def __post_init__(self):
        check_choice("table", self.table, [*TABLES, "all"])
        check_choice("size", self.size, ["full", "smoke"])
        check_positive(self, "steps")
        check_positive(self, "timeout_s", most=1_000_000)
        if self.size == "smoke" and self.gpu:
            raise UserError(f"gpu={self.gpu} names a folder for size=full; leave gpu out with size=smoke")
        if self.tokens and not (file := Path(self.tokens) / "train.bin").is_file():
            raise UserError(f"tokens={self.tokens} is unusable: {file} does not exist; name another folder")
