"""Measure one cell of a table in this process, which bench.paper.runner starts: python -m bench.paper.worker TABLE.

Standard input holds the cell and the settings as JSON. The rows go to standard output, one per line. Running out of
memory, or an exception of the measurement, becomes a row.
"""

import json
import sys
from contextlib import redirect_stdout

import torch

from bench.common.timing import Cpu, Gpu, recorded
from bench.paper.settings import PaperSettings
from bench.paper.tables import load_table


def main() -> None:
    given, rows = json.load(sys.stdin), sys.stdout
    cell, outcome = given["cell"], dict(given["cell"])
    table = load_table(sys.argv[1])
    gpu = Gpu() if torch.cuda.is_available() else Cpu()
    with redirect_stdout(sys.stderr), recorded([outcome], gpu):
        gpu.wake()
        for row in table.measure(cell, gpu, PaperSettings(**given["settings"])):
            print(json.dumps({**cell, **row}), file=rows, flush=True)
    if "status" in outcome:
        print(json.dumps(outcome), file=rows)


if __name__ == "__main__":
    main()
