"""What `python -m bench.paper` reads."""

from dataclasses import dataclass
from pathlib import Path

from errors import UserError

SIZES = "full", "smoke"


@dataclass
class PaperConfig:
    """Which tables, how large, and where to."""

    table: str = "all"
    """gpt2, gpt2_context, gpt3, kernels, memory, io, blocks or scaling; all for one after another."""
    size: str = "full"
    """full, or smoke: tiny models and shapes that run anywhere in under a minute a table, and say nothing of speed."""
    gpu: str | None = None
    """Folder under bench/results; null makes it of the device's name. A smoke run writes to outputs/paper-smoke."""
    resume: bool = True
    """Cells that the results hold are not measured again; false sets those results aside, as *.json.old, and measures
    all anew."""
    any_commit: bool = False
    """Whether cells that are missing may be added to results of another commit; then the page names both."""
    timeout_s: int = 600
    """Seconds that a cell may take."""
    tokens: str | None = None
    """Folder of GPT-2 tokens, as data.prepare makes it: table gpt2 then trains on them and compares perplexities."""
    steps: int = 300
    """Optimizer steps of each of those runs."""
    fa3_library: str | None = None
    """FlashAttention-3 as a bare library, as in the xformers wheel, for table kernels."""

    def __post_init__(self):
        if self.size not in SIZES:
            raise UserError(f"size={self.size} is unknown; choose one of {', '.join(SIZES)}")
        if self.size == "smoke" and self.gpu:
            raise UserError(f"gpu={self.gpu} is where size=full writes to; leave it out with size=smoke")
        for key in ("timeout_s", "steps"):
            if getattr(self, key) < 1:
                raise UserError(f"{key}={getattr(self, key)} must be at least 1")
        for key, file in (("tokens", "train.bin"), ("fa3_library", "")):
            if (given := getattr(self, key)) and not (Path(given) / file).is_file():
                raise UserError(f"{key}: {Path(given) / file} does not exist; name another, or leave {key} out")
