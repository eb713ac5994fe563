"""Measures one cell in this process, which the runner starts for it: its rows go to stdout, one a line.

Standard input holds the cell and the configuration. Memory that is out, and what a measurement raises, become a row.
"""

import json
import sys
from contextlib import redirect_stdout
from importlib import import_module

import torch

from bench.common.timing import Cpu, Gpu, recorded
from bench.paper.config import PaperConfig


def main() -> None:
    given, rows = json.load(sys.stdin), sys.stdout
    cell, outcome = given["cell"], dict(given["cell"])
    table = import_module(f"bench.paper.{sys.argv[1]}")  # alone: the others take seconds to import
    gpu = Gpu() if torch.cuda.is_available() else Cpu()
    with redirect_stdout(sys.stderr), recorded([outcome], gpu):
        gpu.wake()
        for row in table.measure(cell, gpu, PaperConfig(**given["config"])):
            print(json.dumps({**cell, **row}), file=rows, flush=True)
    if "status" in outcome:
        print(json.dumps(outcome), file=rows)


if __name__ == "__main__":
    main()
