"""The settings of python -m bench.paper."""

import os
from dataclasses import dataclass

from bench.common.command_line import check_choice, check_positive
from bench.paper.tables import TABLES
from errors import UserError


@dataclass
class PaperSettings:
    """The tables to measure and their size."""

    table: str = "all"
    """gpt2, gpt2_context, gpt3, bert, kernels, memory, io, blocks, scaling, fusion, hierarchy, softmax, ladder, lra or
    approximate; or all."""
    size: str = "full"
    """full, or smoke: tiny sizes for any machine, which test the code and are written to outputs/paper-smoke."""
    resume: bool = True
    """Measure only the cells that the results lack; false renames the old results to *.json.old and measures all."""
    any_commit: bool = False
    """Add missing cells to results of another commit; the page then names both commits."""
    timeout_s: int = 600
    """Time limit of a cell in seconds."""
    tokens: str | None = None
    """Folder of GPT-2 tokens from data.prepare; table gpt2 then also trains on them and compares perplexities. A run
    that reaches timeout_s is saved, and the same command continues it."""
    steps: int = 1000
    """Optimizer steps of each of these training runs, of 128 x 1024 tokens."""

    @property
    def same_command(self) -> str:
        """Return the words for a call of this program that continues."""
        return "the same command" if self.resume else "the same command without resume=false"

    def __post_init__(self):
        check_choice("table", self.table, [*TABLES, "all"])
        check_choice("size", self.size, ["full", "smoke"])
        check_positive(self, "steps", "timeout_s", most=1_000_000)
        if self.tokens and self.table not in ("gpt2", "all"):
            raise UserError(f"tokens={self.tokens} has no effect with table={self.table}; leave tokens out")
        if self.steps != PaperSettings.steps and not self.tokens:
            raise UserError(f"steps={self.steps} has no effect without tokens; add tokens=FOLDER, or leave steps out")
        if self.tokens:
            if not os.path.isfile(f"{self.tokens}/train.bin"):
                raise UserError(f"tokens={self.tokens} has no train.bin; name a folder of tokens from data.prepare")
            self.tokens = os.path.abspath(self.tokens)  # a cell's process runs in another directory
