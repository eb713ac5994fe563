"""Update the tables of README.md, of docs/ and of the pages of bench.paper from bench/results.

A test fails if a table differs from the results.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean

from matplotlib.figure import Figure

from bench.attention import charts
from bench.attention.shapes import HIDDEN, PASSES, TOKENS
from bench.common.command_line import launch
from bench.common.drawing import WIDTH, save, styled
from bench.common.formatting import at_least, at_most, cost_text, length_text, speed_text, table
from bench.common.looks import LOOKS
from bench.common.results import ROOT, read_results, short_commit, write_text
from bench.paper.pages import page, publish
from bench.paper.tables import load_table
from bench.paper.tables.attention_speed import speed_lines
from errors import UserError

PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("results", "getting-started", "ladder", "fp8", "lra")),
)
RESULTS = ROOT / "bench" / "results" / "h200"
RESULTS_OF_CPU = RESULTS.with_name("cpu")
PAPER = "gpt2", "gpt2_context", "gpt3", "io", "memory"  # the tables of bench.paper in docs/results.md
FRONT = ("gpt2", 1024), ("gpt2", 8192), ("gpt3-1.3b", 8192), ("gpt3-2.7b", 8192)  # the rows of the README
TRAINERS = {"ours": "ours", "nanogpt": "nanoGPT", "huggingface": "Hugging Face"}
CARDS = 24, 32, 40, 80  # GiB of a GPU
USABLE = 0.9  # share of a GPU's memory; the driver, CUDA and fragments take the rest
RIVALS = {
    "flash2": "flash2",
    "sdpa_flash": "FlashAttention-2",
    "sdpa_cudnn": "cuDNN",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
}


@dataclass
class ReadmeSettings:
    """What to update."""

    pictures: bool = False
    """Also draw all pictures of bench/results again."""


def run(settings: ReadmeSettings) -> None:
    """Update the tables and, if wanted, the pictures."""
    for file in RESULTS.parent.glob("*/paper-*.json"):  # of every GPU
        name, results = file.stem.removeprefix("paper-"), read_results(file)
        write_text(file.with_suffix(".md"), page(name, results))
        if settings.pictures:
            publish(name, results, file.parent)
    if settings.pictures:
        attention = read_results(RESULTS / "attention.json")
        charts.draw(attention["rows"], RESULTS / "attention.json", attention["environment"])
        save(speed_picture(attention), RESULTS / "attention-speed.svg")
        save(parity_picture(RESULTS), RESULTS / "parity.svg")
    for path in PAGES:
        write_text(path, fill(path.read_text()))


def fill(text: str, results: Path = RESULTS) -> str:
    """Return a page with the tables between its marks, <!-- NAME --> and <!-- /NAME -->, replaced."""

    def made(mark: re.Match) -> str:
        name = mark[1]
        if name not in TABLE_OF:
            raise UserError(f"<!-- {name} --> names no table; choose one of {', '.join(TABLE_OF)}")
        return f"<!-- {name} -->\n{TABLE_OF[name](results)}\n<!-- /{name} -->"

    return re.sub(r"<!-- ([\w-]+) -->\n(?:.*?\n)??<!-- /\1 -->", made, text, flags=re.DOTALL)


def paper_table(name: str, results: Path) -> str:
    """Return a page of bench.paper without its title."""
    _, _, without_title = page(name, read_results(results / f"paper-{name}.json")).partition("\n\n")
    return without_title.strip()


def measured(name: str, results: Path) -> Path | None:
    """Return the file of a table of bench.paper in `results`, or else in another GPU's folder beside it."""
    files = sorted(results.parent.glob(f"*/paper-{name}.json"), key=lambda path: (path.parent != results, path))
    return files[0] if files else None


def table_of_any_gpu(name: str, results: Path, picture: str = "") -> str:
    """Return a page of bench.paper without its title, from the GPU that measured it, with its picture if it has one.

    Without results, return a sentence with the command that measures them.
    """
    file = measured(name, results)
    if not file:
        return f"Not measured yet. `python -m bench.paper table={name}` measures this table on your GPU."
    parts = [f"![{picture}](../bench/results/{file.parent.name}/paper-{name}.svg)"] if picture else []
    return "\n\n".join([*parts, paper_table(name, file.parent)])


def ladder_table(results: Path) -> str:
    """Return the speeds of the ladder with their charts, from `results` or another GPU's folder beside it.

    Without results, return a sentence with the command that measures them.
    """
    path = measured("ladder", results)
    if not path:
        return "Not measured yet. `python -m bench.paper table=ladder` measures the ladder on your GPU."
    file, ladder = read_results(path), load_table("ladder")
    parts = [ladder.overview(file["rows"])]
    for pass_ in ladder.STEPS:
        chart = f"../bench/results/{path.parent.name}/paper-ladder-{pass_}.svg"
        parts.append(f"![TFLOP/s of each step of the {pass_} pass]({chart})")
    page = f"[All times and resources](../bench/results/{path.parent.name}/paper-ladder.md)."
    return "\n\n".join([*parts, f"{caption(file)} {page}"])


def caption(file: dict) -> str:
    """Return the environment of a results file and the commits of its rows in one line."""
    where = file["environment"]
    commits = dict.fromkeys(short_commit(row.get("commit", where["commit"])) for row in file.get("rows", [{}]))
    return f"{machine(where)}, commit {', '.join(commits)}."


def machine(where: dict) -> str:
    """Return the device and the versions of an environment."""
    return f"One {where['gpu'] or where['cpu'] + ' CPU'}, torch {where['torch']}, Triton {where['triton']}"


def card(where: dict) -> str:
    """Return the short name of an environment's GPU, for example H100."""
    return re.sub(r"NVIDIA | .*", "", where["gpu"])


def parity_table(results: Path) -> str:
    """Return the attention variants side by side, from one run of bench.parity."""
    file = read_results(results / "parity.json")
    rows = {row["variant"]: row for row in file["rows"]}
    naive, steps = rows["naive"]["tokens_per_second"], rows["naive"]["steps"]
    lines = []
    for name, row in rows.items():
        speed, ours = row["tokens_per_second"], name == "flash2"
        speeds = speed_text(speed, ours, 0), speed_text(speed / naive, ours), speed_text(row["tflops"], ours, 0)
        mfu, memory = f"{speed_text(100 * row['mfu'], ours, 1)}%", f"{cost_text(row['peak_gib'], ours, 1)} GiB"
        lines.append([f"`{name}`", *speeds, mfu, memory, f"{row['val_loss']:.4f}"])
    header = ["attention", "tokens/s", "x naive", "TFLOP/s", "MFU", "peak memory", "validation loss"]
    return f"{table(header, lines)}\n\n{steps} steps. {caption(file)}"


def attention_table(results: Path) -> str:
    """Return TFLOP/s of forward / backward for the causal cells of bench.attention."""
    file = read_results(results / "attention.json")
    lines = speed_lines([row for row in file["rows"] if row["causal"] and row["status"] == "ok"], RIVALS, PASSES[:2])
    lines = [line[1:] for line in lines]  # without the mask
    header = ["head size", "sequence", "batch x heads", *RIVALS.values()]
    cudnn = file["environment"].get("cudnn")  # rows of before 2026-11-28 lack the version
    note = f" cuDNN {cudnn}." if cudnn else ""
    return f"{table(header, lines, left=0)}\n\n{caption(file)}{note}"


def attention_means_table(results: Path) -> str:
    """Return the geometric means over the lengths of flash2's speed over its rivals', forward, backward."""
    ms: dict[tuple, dict] = {}
    for row in read_results(results / "attention.json")["rows"]:
        if (row["batch"] * row["seq_len"], row["heads"] * row["head_dim"], row["status"]) == (TOKENS, HIDDEN, "ok"):
            group = row["head_dim"], row["causal"], row["pass"]
            ms.setdefault(group, {}).setdefault(row["variant"], {})[row["seq_len"]] = row["ms"]
    lines, (_, *rivals) = [], RIVALS
    for head_dim, causal in sorted({group[:2] for group in ms}):
        of_passes = [ms[head_dim, causal, pass_] for pass_ in PASSES[:2]]
        ratios = [[[of[name][n] / of["flash2"][n] for n in of["flash2"]] for of in of_passes] for name in rivals]
        cells = (", ".join(at_least(geometric_mean(of_pass), 3) for of_pass in of_rival) for of_rival in ratios)
        lines.append([f"{head_dim}, {'causal' if causal else 'none'}", *cells])
    return table(["head size, mask", *(RIVALS[name] for name in rivals)], lines)


def documents_table(results: Path) -> str:
    """Return the speed of training with and without document masks, from one run of bench.parity."""
    file = read_results(results / "document_mask.json")
    by_variant = {row["variant"]: row for row in file["rows"]}
    lines = []
    for name in ("naive", "sdpa", "flash2"):
        plain, masked = by_variant[name], by_variant[f"{name}:data.document_mask=true"]
        speeds = (speed_text(row["tokens_per_second"], name == "flash2", 0) for row in (plain, masked))
        lines.append([f"`{name}`", *speeds, f"{masked['val_loss']:.4f}"])
    header = ["attention", "tokens/s", "with `data.document_mask=true`", "its validation loss"]
    return f"{table(header, lines)}\n\n{by_variant['flash2']['steps']} steps. {caption(file)}"


def optimizers_table(name: str, results: Path = RESULTS_OF_CPU) -> str:
    """Return the validation loss against tokens for each optimizer and rate, from one run of bench.parity."""
    file, lines = read_results(results / f"{name}.json"), []
    for row in file["rows"]:
        losses = [f"{loss:.4f}" for _, loss in row["val_curve"]]
        lines.append([f"`{row['variant'].partition(':')[2]}`", *losses])
    header = [f"{step * row['tokens'] // row['steps']:,} tokens" for step, _ in row["val_curve"]]
    return f"{table(['settings', *header], lines)}\n\n{caption(file)}"


def is_ours_in_bf16(row: dict) -> bool:
    """Return whether the row is our compiled step with flash2 in bf16, and was measured."""
    kind = row["trainer"], row["attention"], row["compiled"], row.get("precision", "bf16"), row["status"]
    return kind == ("ours", "flash2", True, "bf16", "ok")


def is_peer(other: dict, row: dict, trainer: str) -> bool:
    """Return whether `other` is in the run of `row`, and is the floor or a micro-batch of nanoGPT at its fastest."""
    same = all(other[key] == row[key] for key in ("model", "context_length", "commit"))
    kind = other["attention"], other["compiled"], other.get("precision", "bf16")
    fastest = trainer == "floor" or kind == ("sdpa", True, "bf16")
    return same and other["status"] == "ok" and other["trainer"] == trainer and fastest


def ratio(row: dict, rows: list[dict], trainer: str) -> str:
    """Return the speed of `row` over the fastest of that trainer in the same run."""
    peers = [other["tokens_per_second"] for other in rows if is_peer(other, row, trainer)]
    return speed_text(row["tokens_per_second"] / max(peers), row["trainer"] == "ours") if peers else "-"


def front_table(results: Path) -> str:
    """Return our training step with flash2, beside nanoGPT and Hugging Face in the same run of bench.training."""
    file, lines = read_results(results / "training.json"), []
    for model, context in FRONT:
        cell = {"model": model, "context_length": context, "best": True}
        [row] = [row for row in file["rows"] if is_ours_in_bf16(row) and cell.items() <= row.items()]
        ratios = (ratio(row, file["rows"], trainer) for trainer in ("nanogpt", "huggingface"))
        cells = at_least(row["tokens_per_second"], 0), *ratios, f"{at_most(row['peak_gib'], 1)} GiB"
        lines.append([f"`{model}`, {length_text(context)}", *cells])
    header = ["model, context", "tokens/s", "x nanoGPT", "x Hugging Face", "peak memory"]
    return f"{table(header, lines)}\n\n{machine(file['environment'])}, bf16."


def training_table(results: Path) -> str:
    """Return each trainer at its best micro-batch, beside nanoGPT and the floor of the same run of bench.training."""
    file = read_results(results / "training.json")
    best = [row for row in file["rows"] if row["best"] and row["status"] == "ok"]
    lines = []
    for row in sorted(best, key=lambda row: (row["model"], row["context_length"])):
        speed, ours = row["tokens_per_second"], row["trainer"] == "ours"
        name, memory = f"{row['model']}, {row['context_length']:,}", f"{cost_text(row['peak_gib'], ours, 1)} GiB"
        speeds = speed_text(speed, ours, 0), *(ratio(row, file["rows"], trainer) for trainer in ("nanogpt", "floor"))
        lines.append([name, trainer_text(row), str(row["batch_size"]), *speeds, memory, row["commit"][:7]])
    header = ["model, context", "trainer, attention", "micro-batch", "tokens/s", "x nanoGPT", "of the floor"]
    return f"{table([*header, 'peak memory', 'commit'], lines, left=2)}\n\n{machine(file['environment'])}."


def trainer_text(row: dict) -> str:
    """Return a trainer with its attention, and how it differs from a compiled step without checkpointing."""
    checkpointing = row.get("activation_checkpointing", "none")
    eager = "" if row["compiled"] else ", not compiled"
    recomputed = "" if checkpointing == "none" else f", {checkpointing} checkpointing"
    precision = row.get("precision", "bf16")
    fp8 = {"bf16": "", "fp8": ", FP8"}.get(precision, f", torchao's FP8 ({precision})")
    return f"{TRAINERS[row['trainer']]}, {row['attention']}{fp8}{eager}{recomputed}"


def fp8_cells(results: Path) -> Iterator[tuple[dict, dict, list[dict]]]:
    """Yield each of our steps in FP8, from any GPU, with its results file and the other best rows of the same run."""
    for path in sorted(results.parent.glob("*/*training.json")):
        file = read_results(path)
        best = [row for row in file["rows"] if row["best"] and row["status"] == "ok"]
        for row in best:
            if row["trainer"] == "ours" and row.get("precision") == "fp8":
                cell = {key: row[key] for key in ("model", "context_length", "commit")}
                yield file, row, [other for other in best if cell.items() <= other.items() and other is not row]


def fp8_table(results: Path) -> str:
    """Return our step in FP8 beside bf16 and the floor of bf16 in the same run of bench.training, from any GPU."""
    lines, captions = [], {}
    for file, row, others in fp8_cells(results):
        captions[caption(file)] = None
        [bf16] = filter(is_ours_in_bf16, others)
        what = card(file["environment"]), f"`{row['model']}`, {length_text(row['context_length'])}"
        batches = f"{bf16['batch_size']}, {row['batch_size']}"
        speeds = (at_least(x["tokens_per_second"], 0) for x in (bf16, row))
        gain = at_least(row["tokens_per_second"] / bf16["tokens_per_second"], 3)
        memory = (f"{at_most(x['peak_gib'], 1)} GiB" for x in (bf16, row))
        lines.append([*what, batches, *speeds, gain, ratio(row, file["rows"], "floor"), *memory])
    if not lines:
        return "Not measured yet."
    header = ["GPU", "model, context", "micro-batches", "bf16, tokens/s", "FP8, tokens/s", "FP8 / bf16"]
    header += ["FP8 / floor of bf16", "peak memory, bf16", "FP8"]
    return f"{table(header, lines, left=2)}\n\n{' '.join(captions)}"


def fp8_peers_table(results: Path) -> str:
    """Return our step in FP8 beside nanoGPT, in bf16 and in torchao's FP8, in the same run of bench.training."""
    lines, captions = [], {}
    for file, row, others in fp8_cells(results):
        peers = [other for other in others if other["trainer"] == "nanogpt"]
        captions |= {f"{machine(file['environment'])}.": None} if peers else {}
        for other in [row, *filter(is_ours_in_bf16, others), *peers] if peers else []:
            what = f"`{row['model']}`, {length_text(row['context_length'])}", trainer_text(other)
            ours = other["trainer"] == "ours"
            times = "1" if other is row else at_least(row["tokens_per_second"] / other["tokens_per_second"], 2)
            speed, memory = speed_text(other["tokens_per_second"], ours, 0), cost_text(other["peak_gib"], ours, 1)
            lines.append([*what, str(other["batch_size"]), speed, times, f"{memory} GiB"])
    header = ["model, context", "trainer, attention", "micro-batch", "tokens/s", "our FP8, times", "peak memory"]
    return f"{table(header, lines, left=2)}\n\n{' '.join(captions)}" if lines else "Not measured yet."


def fits_table(results: Path) -> str:
    """Return the largest micro-batches of our step with flash2 that fit GPUs with less memory than the measured one.

    They lie on the line through the least and the most measured micro-batch. A model and context with only one
    measured micro-batch is in the table if that is one sequence: "1+" says that a larger one may fit.
    """
    file, peaks = read_results(results / "training.json"), {}
    for row in file["rows"]:
        if is_ours_in_bf16(row):
            kind = row["model"], row["context_length"], row["activation_checkpointing"]
            measured = peaks.setdefault(kind, {})
            measured[row["batch_size"]] = max(row["peak_gib"], measured.get(row["batch_size"], 0))
    lines = []
    for (model, context, checkpointing), measured in sorted(peaks.items()):
        if len(measured) > 1 or 1 in measured:
            sizes = [largest_that_fits(measured, USABLE * card) for card in CARDS]
            more = "+" if len(measured) == 1 else ""
            cells = (f"{size}{more}" if size else "-" for size in sizes)
            lines.append([f"`{model}`, {length_text(context)}", checkpointing, *cells])
    header = ["model, context", "activation checkpointing", *(f"{card} GB" for card in CARDS)]
    return table(header, lines, left=2)


def largest_that_fits(peaks: dict[int, float], gib: float) -> int:
    """Return the largest micro-batch whose peak is at most `gib`, or 0. `peaks` are measured, by micro-batch."""
    (least, low), (most, high) = min(peaks.items()), max(peaks.items())
    if least == most:
        return least if low <= gib else 0
    return max(0, math.floor(least + (gib - low) * (most - least) / (high - low)))


def sparsity_table(results: Path) -> str:
    """Return the speedup of flash2 with some of the blocks, from bench.features."""
    file, speeds = read_results(results / "features.json"), {}
    for row in file["sparsity"]:
        cells = speeds.setdefault(row["pattern"], {"kept": row["kept"]})
        cells[row["head_dim"], row["pass"]] = f"{at_least(row['speed'])} ({at_most(row['ms'])})"
    columns = [(head_dim, pass_) for head_dim in (64, 128) for pass_ in ("forward", "both")]
    lines = [
        [name, f"{cells['kept']:.1%}", f"{1 / cells['kept']:.2f}", *(cells[column] for column in columns)]
        for name, cells in speeds.items()
    ]
    header = ["blocks", "kept", "1 / kept", "head 64: forward, x (ms)", "both passes", "head 128: forward"]
    return f"{table([*header, 'both passes'], lines)}\n\n{caption(file)}"


def key_heads_table(results: Path) -> str:
    """Return memory and speed by the number of key heads, from bench.features on any GPU."""
    lines, captions = [], []
    for path in sorted(results.parent.glob("*/features.json")):
        file = read_results(path)
        captions.append(caption(file))
        gpu = card(file["environment"])
        for row in file["key_heads"]:
            what = gpu, f"{row['model']}, {length_text(row['context_length'])}", str(row["n_kv_head"])
            sizes = f"{row['parameters'] / 1e6:.1f} M", f"{at_most(row['cache_mib'], 0)} MiB"
            speed, memory = at_least(row["tokens_per_second"], 0), f"{at_most(row['peak_gib'], 1)} GiB"
            lines.append([*what, *sizes, str(row["batch_size"]), memory, speed])
    header = [
        "GPU",
        "model, context",
        "key heads",
        "parameters",
        "cache of a sequence",
        "micro-batch",
        "peak memory",
        "tokens/s",
    ]
    return f"{table(header, lines, left=2)}\n\n{' '.join(captions)}".strip()


def scaling_table(results: Path) -> str:
    """Return the speed on several GPUs relative to one, from the runs of bench.scaling beside `results`."""
    lines, captions = [], []
    for path in sorted(results.parent.glob(f"{results.name}x*/scaling.json")):
        file = read_results(path)
        captions.append(caption(file).replace("One", f"{path.parent.name}:", 1))
        for row in file["rows"]:
            what = f"{row['model']}, {length_text(row['context_length'])}", row["parallel"]
            linear = "-" if row["linear"] is None else f"{at_least(100 * row['linear'], 1)}%"
            numbers = str(row["batch_size"]), at_least(row["tokens_per_second"], 0), linear
            lines.append([path.parent.name, *what, str(row["gpus"]), *numbers, f"{at_most(row['peak_gib'], 1)} GiB"])
    header = ["machine", "model, context", "parallel", "GPUs", "micro-batch", "tokens/s", "of linear", "memory per GPU"]
    return f"{table(header, lines, left=3)}\n\n{' '.join(captions)}"


TABLE_OF = {
    "results": front_table,
    "parity": parity_table,
    "attention": attention_table,
    "attention-means": attention_means_table,
    "documents": documents_table,
    "training": training_table,
    "optimizers": lambda _: optimizers_table("optimizers"),
    "optimizer-rates": lambda _: optimizers_table("optimizer-rates"),
    "fits": fits_table,
    "sparsity": sparsity_table,
    "key-heads": key_heads_table,
    "fp8": fp8_table,
    "fp8-peers": fp8_peers_table,
    "scaling": scaling_table,
    "ladder": ladder_table,
    "bert": partial(table_of_any_gpu, "bert"),
    "lra": partial(table_of_any_gpu, "lra"),
    "approximate": partial(table_of_any_gpu, "approximate", picture="Time and memory of attentions by length"),
    **{f"paper-{name}": partial(paper_table, name) for name in PAPER},
}


def speed_picture(attention: dict) -> Figure:
    """Draw the causal speed of standard attention, flash2 and its rivals, forward and backward, for the README."""
    names = "naive", *RIVALS
    rows = [row for row in attention["rows"] if row["variant"] in names and row["pass"] == "both" and row["causal"]]
    where = attention["environment"]["gpu"]
    return charts.figure_of([row for row in rows if charts.panel_of(row)], f"Causal attention, both passes, {where}")


@styled
def parity_picture(results: Path) -> Figure:
    """Draw the losses over tokens and over time. The curves nearly coincide: each lies on a thicker one before it."""
    rows = read_results(results / "parity.json")["rows"]
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    by_tokens, by_time = figure.subplots(1, 2, sharey=True)
    for row, width in zip(rows, (7, 4, 2), strict=True):
        steps, losses = zip(*row["loss_curve"], strict=True)
        ours, end = row["variant"] == "flash2", row["steps"] * row["step_ms"] / 1e3
        label = f"{row['variant']}: {cost_text(end, ours, 1)} s, {cost_text(row['peak_gib'], ours, 1)} GiB"
        look = {"color": LOOKS[row["variant"]].colour, "lw": width, "label": label}
        by_tokens.plot([s * row["tokens"] / row["steps"] / 1e6 for s in steps], losses, **look)
        by_time.plot([s * row["step_ms"] / 1e3 for s in steps], losses, **look)
    by_tokens.set(xlabel="million tokens", ylabel="training loss (nats)", title="loss over tokens")
    by_time.set(xlabel="seconds of training", title="loss over time")
    by_time.legend(fontsize=12)
    for axes in (by_tokens, by_time):
        axes.grid()
    return figure


if __name__ == "__main__":
    launch(run, ReadmeSettings)
