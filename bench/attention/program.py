"""Attention kernels side by side on one GPU: python -m bench.attention --help.

The protocol of the FlashAttention-2 paper: 16k tokens in all, hidden size 2048, heads of 64 and 128, FLOPs as
trainer.flops counts them; then a few shapes of our own (bench.cells). In each cell every variant (bench.variants) is
first held to the fp64 reference (bench.accuracy), and only then timed, in turn with the others (bench.timing). Here are
the loop over the cells and the command line; bench.rows and bench.charts tell what came out.

`forward` runs with gradients wanted, and so saves what the backward pass needs; `backward` is torch.autograd.grad of a
graph that is kept; `both` is the two in one call. dout is laid out as the variant lays out its output.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bench.attention import charts
from bench.attention.accuracy import check, truth_of
from bench.attention.contenders import available, bind, draw
from bench.attention.rows import cell_line, empty_row, summary
from bench.attention.shapes import CELLS, DTYPES, HIDDEN, PASSES, TOKENS, Cell
from bench.common.command_line import output_file, positive
from bench.common.results import environment, has_columns, read_results, results_folder, write
from bench.common.timing import Gpu, alternate, recorded, start_series
from errors import UserError, refusing
from model.attention import Attention


def measure(
    cell: Cell, variants: dict[str, Attention], gpu: Gpu, rounds: int, seen: Tensor | None = None
) -> list[dict]:
    """The rows of one cell: every variant, every pass. `seen` tells which keys variants see that leave some out.

    All are measured in turn, and hold their memory meanwhile; what finds none beside the others is measured again by
    itself, and its row is `alone`.
    """
    rows = measure_together(cell, variants, gpu, rounds, seen)
    for variant in variants if len(variants) > 1 else ():
        crowded = {row["pass"]: row for row in rows if row["variant"] == variant and row["status"] == "oom"}
        if crowded:
            gpu.release()
            for row in measure_together(cell, {variant: variants[variant]}, gpu, rounds, seen):
                if row["pass"] in crowded:
                    crowded[row["pass"]].update(row, alone=True)
    return rows


def measure_together(
    cell: Cell, variants: dict[str, Attention], gpu: Gpu, rounds: int, seen: Tensor | None
) -> list[dict]:
    """The rows of variants that are in memory at the same time."""
    rows = {variant: {pass_: empty_row(cell, variant, pass_) for pass_ in PASSES} for variant in variants}
    contenders = []
    with recorded([row for of_variant in rows.values() for row in of_variant.values()], gpu):
        data = draw(cell, gpu.device)
        truth = truth_of(cell, data, seen)
        for variant, attend in variants.items():
            with recorded(rows[variant].values(), gpu):
                contender = bind(variant, attend, cell, data)
                contenders.append(contender)
                check(contender, cell, truth)
            gpu.release()
    for contender in contenders:
        for row in rows[contender.variant].values():
            row["error"] = contender.error
    for pass_ in PASSES:
        all_series = []
        for contender in contenders:
            row = rows[contender.variant][pass_]
            if row["status"] is None:
                with recorded([row], gpu):
                    all_series.append(start_series(row, contender, gpu, rounds))
        alternate(all_series, cell, gpu, rounds)
    torch.compiler.reset()
    return [row for of_variant in rows.values() for row in of_variant.values()]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.attention",
        description="Measures every attention this machine has, side by side on one GPU.",
        epilog="One shape: python -m bench.attention --batch 4 --heads 16 --seq-len 4096 --head-dim 128 --causal",
    )
    add = parser.add_argument
    add("--cells", help=f"only these, e.g. d64_causal,gpt2 or d128_full_4096 (all: {', '.join(c.name for c in CELLS)})")
    add("--variants", help="only these, e.g. sdpa_cudnn,flash2")
    add("--dtype", choices=DTYPES, default="bfloat16")
    shape = parser.add_argument_group("one shape of your own, instead of the cells")
    shape.add_argument("--seq-len", type=positive, metavar="T", help="asks for one shape")
    shape.add_argument("--batch", type=positive, metavar="B", help=f"by default what makes {TOKENS} tokens")
    shape.add_argument("--heads", type=positive, metavar="H", help=f"by default what makes a hidden size of {HIDDEN}")
    shape.add_argument("--kv-heads", type=positive, metavar="G", help="by default as many as heads")
    shape.add_argument("--head-dim", type=positive, metavar="D", help="64 by default")
    shape.add_argument("--causal", action="store_true")
    add("--rounds", type=positive, default=20, help="samples of each variant and pass (20)")
    add("--budget-seconds", type=float, default=3600, help="no cell is begun after so long (3600)")
    add("--gpu", help="folder under bench/results; by default made of the device's name")
    add(
        "--out",
        type=output_file,
        help="file to write; a part of the cells, or one shape, is written only if this is given",
    )
    add("--fa3-library", type=Path, help="FlashAttention-3 as a bare library, as in the xformers wheel (FA3_LIBRARY)")
    add("--draw", type=Path, metavar="JSON", help="measure nothing: draw the charts of a results file again")
    add("--explain", action="store_true", help="measure nothing: print what flash2 would launch for each shape")
    add("--arch", help="for --explain: an architecture such as sm_80; this machine's, or sm_90, by default")
    return parser.parse_args(argv)


def chosen_cells(arguments: argparse.Namespace) -> list[Cell]:
    """The cells that the command line asks for.

    Raises:
        UserError: an unknown cell, or a shape that is none.
    """
    if arguments.seq_len:
        return [own_cell(arguments)]
    if any((arguments.batch, arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.causal)):
        raise UserError("a shape of your own needs --seq-len; without one, choose among the cells with --cells")
    wanted = arguments.cells.split(",") if arguments.cells else [cell.name for cell in CELLS]
    for part in wanted:
        if not any(f"{cell.name}_".startswith(f"{part}_") for cell in CELLS):
            raise UserError(f"--cells {part} is unknown; choose among {', '.join(cell.name for cell in CELLS)}")
    cells = [cell for cell in CELLS if any(f"{cell.name}_".startswith(f"{part}_") for part in wanted)]
    return [replace(cell, dtype=arguments.dtype) for cell in cells]


def own_cell(arguments: argparse.Namespace) -> Cell:
    """The one shape of the command line."""
    if arguments.cells:
        raise UserError("--cells and a shape of your own exclude each other; leave one of the two out")
    length, head_dim = arguments.seq_len, arguments.head_dim or 64
    batch, heads = arguments.batch or max(TOKENS // length, 1), arguments.heads or max(HIDDEN // head_dim, 1)
    kv_heads = arguments.kv_heads or heads
    if heads % kv_heads:
        raise UserError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    return Cell("shape", batch, length, heads, head_dim, arguments.causal, kv_heads, dtype=arguments.dtype)


def chosen_variants(arguments: argparse.Namespace) -> dict[str, Attention]:
    """The variants that the command line asks for, of those there are."""
    variants = available(arguments.fa3_library)
    wanted = arguments.variants.split(",") if arguments.variants else list(variants)
    for name in wanted:
        if name not in variants:
            raise UserError(f"--variants {name}: this machine has {', '.join(variants)}")
    return {name: variants[name] for name in wanted}


def destination(arguments: argparse.Namespace) -> Path | None:
    """The results file: --out, or the GPU's own where the whole table is measured."""
    whole = not (arguments.cells or arguments.variants or arguments.seq_len) and arguments.dtype == "bfloat16"
    if arguments.out or not whole:
        return arguments.out
    return results_folder(arguments.gpu) / "attention.json"


def measure_all(
    cells: list[Cell], variants: dict[str, Attention], gpu: Gpu, rounds: int, budget: float, out: Path | None
) -> list[dict]:
    """Measures and prints cell after cell; what is there is written after each, so that an interruption loses none."""
    gpu.wake()
    rows, told, where, started = [], set(), environment(), time.monotonic()
    print(f"{where['gpu']}, torch {where['torch']}, Triton {where['triton']}, {cells[0].dtype}")
    print("TFLOP/s of forward/backward/both, and after the bar flash2's speed over its rivals'")
    for number, cell in enumerate(cells):
        if time.monotonic() - started > budget:
            print(f"--budget-seconds {budget:.0f} are spent; skipped: {', '.join(c.name for c in cells[number:])}")
            break
        rows += (new := measure(cell, variants, gpu, rounds))
        print(cell_line(cell, new), flush=True)
        for failure in {(row["variant"], row["message"]): None for row in new if row["message"]}:
            if failure not in told:
                print("  {}: {:.150}".format(*failure))
        told |= {(row["variant"], row["message"]) for row in new}
        if out:
            write(out, {"environment": where, "rows": rows})
    print(f"{time.monotonic() - started:.0f} seconds" + (f"; written to {out}" if out else ""))
    return rows


def explain(cells: list[Cell], arch: str | None) -> None:
    """Prints what flash2 would launch for each shape."""
    from kernels.flash2 import launch  # needs Triton

    if arch is None:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "sm_90"
    for cell in cells:
        print(f"{cell.name:17} {launch.explain(cell.head_dim, DTYPES[cell.dtype], cell.causal, cell.seq_len, arch)}")


def run(arguments: argparse.Namespace) -> None:
    """What the command line asks for.

    Raises:
        UserError: it cannot be done.
    """
    if arguments.draw:
        if not arguments.draw.is_file():
            raise UserError(f"--draw {arguments.draw} does not exist; measure first, or name another results file")
        results = read_results(arguments.draw)
        if not has_columns(results, {"variant", "pass", "tflops"}):
            raise UserError(f"--draw {arguments.draw} is of another benchmark; name a results file of bench.attention")
        charts.draw(results["rows"], arguments.draw, results["environment"])
        return print(summary(results["rows"]))
    cells = chosen_cells(arguments)
    if arguments.explain:
        return explain(cells, arguments.arch)
    if not torch.cuda.is_available():
        raise UserError("bench.attention measures GPUs and finds none; without one, --explain and --draw work")
    variants, out = chosen_variants(arguments), destination(arguments)
    rows = measure_all(cells, variants, Gpu(), arguments.rounds, arguments.budget_seconds, out)
    if out:
        charts.draw(rows, out, environment())
    print(summary(rows))


def main() -> None:
    with refusing():
        run(parse())
