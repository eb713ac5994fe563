"""Tables and pictures of the README, made from bench/results: python -m bench.report --readme [--check]."""

import itertools
import math
import re
from functools import partial
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from bench.attention import charts
from bench.attention.rows import geometric_mean, speedups
from bench.common.results import ROOT, read_results
from bench.paper.text import at_least, cost_text, speed_text, told_alone, whole_speed
from errors import UserError

matplotlib.use("svg")  # draws without a screen
README = ROOT / "README.md"
PAPER = "gpt2", "gpt2_context", "gpt3", "io", "memory"  # tables of bench.paper
RESULTS = ROOT / "bench" / "results"
TRAINERS = {"ours": "ours", "nanogpt": "nanoGPT", "huggingface": "Hugging Face"}
COLOURS = {"naive": "#888888", "sdpa": "#1f77b4", "flash2": "#d62728"}


def parity_table(results: Path) -> str:
    """The attention variants side by side, from one run of bench.parity."""
    file = read_results(results / "h200" / "parity.json")
    rows, where = {row["variant"]: row for row in file["rows"]}, file["environment"]
    naive = rows["naive"]["tokens_per_second"]
    steps = rows["naive"]["steps"]
    lines = [
        "| attention | tokens/s | x naive | TFLOP/s | MFU | peak memory | validation loss |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in rows.items():
        speed, ours = row["tokens_per_second"], name == "flash2"
        lines.append(
            f"| `{name}` | {speed_text(speed, ours, 0)} | {speed_text(speed / naive, ours)} "
            f"| {speed_text(row['tflops'], ours, 0)} | {speed_text(100 * row['mfu'], ours, 1)}% "
            f"| {cost_text(row['peak_gib'], ours, 1)} GiB | {row['val_loss']:.4f} |"
        )
    lines += [
        "",
        f"GPT-2 124M, context 1024, {steps} steps of 32 x 1024 tokens of Wikipedia from one seed, bf16, compiled; "
        f"one {where['gpu']} (torch {where['torch'].partition('+')[0]}, Triton {where['triton']}, commit "
        f"{where['commit'][:12]}, {where['date']}).",
    ]
    return "\n".join(lines)


def parity_picture(results: Path, picture: Path) -> None:
    """Loss curves, which should coincide, over tokens and over time, which should not."""
    rows = read_results(results / "h200" / "parity.json")["rows"]
    figure, (by_tokens, by_time) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for row in rows:
        steps, losses = zip(*row["loss_curve"], strict=True)
        colour = COLOURS[row["variant"]]
        by_tokens.plot([s * row["tokens"] / row["steps"] / 1e6 for s in steps], losses, color=colour, lw=1)
        by_time.plot([s * row["step_ms"] / 1e3 for s in steps], losses, color=colour, lw=1, label=row["variant"])
    by_tokens.set(xlabel="million tokens", ylabel="training loss (nats)")
    by_time.set(xlabel="seconds of training")
    by_time.legend(frameon=False)
    for axes in (by_tokens, by_time):
        axes.spines[["top", "right"]].set_visible(False)
    charts.save(figure, picture, rows)
    plt.close(figure)


def attention_table(results: Path) -> str:
    """TFLOP/s of forward / backward for the causal cells of one run of bench.attention, and cells kept of an older."""
    file = read_results(results / "h200" / "attention.json")
    rows, where = file["rows"], file["environment"]
    columns = {"flash2": "flash2", "sdpa_flash": "FlashAttention-2", "sdpa_cudnn": "cuDNN", "fa3": "FlashAttention-3"}
    speeds: dict[tuple, dict] = {}
    for row in rows:
        if row["causal"] and row["status"] == "ok":
            shape = row["head_dim"], row["seq_len"], row["batch"], row["heads"]
            speed = whole_speed(row, "tflops", row["variant"] == "flash2")
            speeds.setdefault(shape, {})[row["variant"], row["pass"]] = speed
    lines = [
        f"| head size | sequence | batch x heads | {' | '.join(columns.values())} |",
        f"|--:|--:|--:|{'--:|' * len(columns)}",
    ]
    for (head_dim, seq_len, batch, heads), cells in sorted(speeds.items()):
        both = (f"{cells.get((v, 'forward'), '-')} / {cells.get((v, 'backward'), '-')}" for v in columns)
        lines.append(f"| {head_dim} | {seq_len:,} | {batch} x {heads} | {' | '.join(both)} |")
    versions = f"torch {where['torch']}, Triton {where['triton']}, commit {where['commit'][:12]}"
    kept = {row["seq_len"]: row["commit"] for row in rows if "commit" in row}
    older = "".join(f"; of {seq_len:,} tokens commit {commit[:12]}" for seq_len, commit in kept.items())
    return "\n".join([*lines, "", f"One {where['gpu']} ({versions}{older}).{told_alone(rows)} {means(rows, columns)}"])


def means(rows: list[dict], names: dict[str, str]) -> str:
    """flash2's speed over each rival's with and without a mask, both passes together: over the lengths of a panel."""
    found = []
    for variant in ("sdpa_cudnn", "fa3"):
        ratios = []
        for panel in charts.PANELS:
            speeds = speedups([row for row in rows if charts.panel_of(row) == panel], variant, "both")
            mask = "causal" if panel.causal else "no mask"
            ratios.append(f"{speed_text(geometric_mean(speeds), True)} (head {panel.head_dim}, {mask})")
        found.append(f"{', '.join(ratios)} times {names[variant]}'s")
    lengths = [row["seq_len"] for row in rows if charts.panel_of(row)]
    return (
        f"Both passes together, geometric means over {min(lengths):,} to {max(lengths):,} tokens, flash2's speed is "
        f"{' and '.join(found)}."
    )


def documents_table(results: Path) -> str:
    """Speed of training with documents apart beside without, from one run of bench.parity."""
    file = read_results(results / "h200" / "document_mask.json")
    by_variant = {row["variant"]: row for row in file["rows"]}
    lines = [
        "| attention | tokens/s | with `data.document_mask=true` | validation loss of those |",
        "|---|--:|--:|--:|",
    ]
    for name in ("naive", "sdpa", "flash2"):
        plain, masked = by_variant[name], by_variant[f"{name}:data.document_mask=true"]
        speeds = (speed_text(row["tokens_per_second"], name == "flash2", 0) for row in (plain, masked))
        lines.append(f"| `{name}` | {' | '.join(speeds)} | {masked['val_loss']:.4f} |")
    steps, where = by_variant["flash2"]["steps"], file["environment"]
    how = f"The same model and micro-batches, {steps} steps; one {where['gpu']} at commit {where['commit'][:12]}."
    return "\n".join([*lines, "", how])


def is_peer(other: dict, row: dict, trainer: str) -> bool:
    """Whether a row is what another of its run is compared with: the floor, or nanoGPT's model as that trainer runs it
    best; a micro-batch that was only tried counts too, where it was the faster one."""
    same = all(other[key] == row[key] for key in ("model", "context_length", "commit"))
    as_it_runs = trainer == "floor" or (other["attention"], other["compiled"]) == ("sdpa", True)
    return same and other["status"] == "ok" and other["trainer"] == trainer and as_it_runs


def training_table(results: Path) -> str:
    """Each trainer at its best micro-batch, beside nanoGPT's in the same run and the floor, from bench.training."""
    file = read_results(results / "h200" / "training.json")
    rows, where, commits = file["rows"], file["environment"], {}
    lines = [
        "| model, context | trainer, attention | micro-batch | tokens/s | x nanoGPT | of the floor | peak memory |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    best = [row for row in rows if row["best"] and row["status"] == "ok"]
    for row in sorted(best, key=lambda row: (row["model"], row["context_length"])):
        of_cell = {
            name: max((other["tokens_per_second"] for other in rows if is_peer(other, row, name)), default=None)
            for name in ("nanogpt", "floor")
        }
        how = trainer_of(row)
        forgotten = row.get("activation_checkpointing", "none")
        how += "" if forgotten == "none" else f", {forgotten} checkpointing"
        speed, ours = row["tokens_per_second"], row["trainer"] == "ours"
        ratios = (speed_text(speed / peer, ours) if peer else "-" for peer in of_cell.values())
        lines.append(
            f"| {row['model']}, {row['context_length']:,} | {how} | {row['batch_size']} | {speed_text(speed, ours, 0)} "
            f"| {' | '.join(ratios)} "
            f"| {cost_text(row['peak_gib'], ours, 1)} GiB |"
        )
        commits.setdefault(row["commit"][:12], {})[cell_of(row)] = None
    measured = "; ".join(f"{', '.join(cells)} at commit {commit}" for commit, cells in commits.items())
    lines += ["", f"One {where['gpu']} (torch {where['torch']}, Triton {where['triton']}): {measured}."]
    early = dict.fromkeys(cell_of(row) for row in best if "peak_of" not in row)
    if early:
        lines[-1] += f" Memory is the second step's, but that of the first step tried in {', '.join(early)}."
    told = dict.fromkeys(f" What {cell_of(row)} tells is {row['message']}." for row in best if row["message"])
    lines[-1] += "".join(told)
    return "\n".join([*lines, "", f"{tried(rows)} {sampled(best)} {first_steps(file)}".strip()])


def trainer_of(row: dict) -> str:
    return f"{TRAINERS[row['trainer']]}, {row['attention']}" + ("" if row["compiled"] else ", not compiled")


def cell_of(row: dict) -> str:
    return f"{row['model']} {row['context_length']:,}"


def tried(rows: list[dict]) -> str:
    """The micro-batches among which the best were chosen, and which of them there was no memory for."""
    batches = {}
    for row in sorted(rows, key=lambda row: (row["model"], row["context_length"], row["batch_size"])):
        if row["trainer"] != "floor":
            batches.setdefault(cell_of(row), {})[str(row["batch_size"])] = None
    texts = (f"{cell}: {', '.join(sizes)}" for cell, sizes in batches.items())
    lost = [f"{trainer_of(row)}, {cell_of(row)} by {row['batch_size']}" for row in rows if row["status"] == "oom"]
    return f"Micro-batches tried: {'; '.join(texts)}. Out of memory: {'; '.join(lost) or 'none'}."


def sampled(rows: list[dict]) -> str:
    """How many samples the medians are of, and how far apart those of a trainer are."""
    taken = [row for row in rows if row.get("samples")]
    if not taken:
        return ""
    cells = {}
    for row in sorted(taken, key=lambda row: (len(row["samples"]), row["model"], row["context_length"])):
        cells.setdefault(len(row["samples"]), {})[cell_of(row)] = None
    counts = "; ".join(f"{count} of {', '.join(names)}" for count, names in cells.items())
    apart = max(max(row["samples"]) / min(row["samples"]) - 1 for row in taken)
    return f"Speeds are medians of samples taken in turn: {counts}; a trainer's are at most {apart:.1%} apart."


def first_steps(file: dict) -> str:
    """gpt2's first step, where bench.training --first-step measured it."""
    if "first_step_s" not in file:
        return ""
    cold, warm, commit = (file["first_step_s"][key] for key in ("cold", "warm", "commit"))
    cold, warm = (math.ceil(10 * seconds) / 10 for seconds in (cold, warm))
    return (
        f"With an empty compile cache gpt2's first step takes {cold} s, with the one that it leaves {warm} s "
        f"(`--first-step`, commit {commit[:12]})."
    )


def sparsity_table(results: Path) -> str:
    """How much faster flash2 is with some of the blocks only, from `bench.features --only sparsity`."""
    file = read_results(results / "h200" / "sparsity.json")
    where, speeds = file["environment"], {}
    for row in file["sparsity"]:
        cells = speeds.setdefault(row["pattern"], {"kept": row["kept"], "seq_len": row["seq_len"]})
        cells[row["head_dim"], row["pass"]] = f"{at_least(row['speed'])} ({row['ms']:.2f})"
    lines = [
        "| blocks | kept | 1 / kept | head 64: forward, x (ms) | both passes | head 128: forward | both passes |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for pattern, cells in speeds.items():
        times = " | ".join(cells[head_dim, pass_] for head_dim in (64, 128) for pass_ in ("forward", "both"))
        lines.append(f"| {pattern} | {cells['kept']:.1%} | {1 / cells['kept']:.2f} | {times} |")
    measured = f"{where['gpu']} (torch {where['torch']}, Triton {where['triton']}, commit {where['commit'][:12]})"
    compared = f"Causal, {cells['seq_len']:,} tokens, lists beside that of all blocks, windows beside that of all keys"
    return "\n".join([*lines, "", f"{compared}; one {measured}. {linear_times(file['sparsity'])}"])


def linear_times(rows: list[dict]) -> str:
    """The milliseconds as a + b x kept, by least squares of the relative errors, and how far the rows are from that.

    And the butterfly's, beside what a list drawn at random would take.
    """
    groups = {"lists drawn at random": ("all blocks", "1 in"), "windows": ("window",)}
    texts, worst, of_butterfly = [], 0.0, []
    for name, patterns in groups.items():
        fits = []
        for head_dim, pass_ in itertools.product((64, 128), ("forward", "both")):
            column = [row for row in rows if (row["head_dim"], row["pass"]) == (head_dim, pass_)]
            chosen = [row for row in column if row["pattern"].startswith(patterns)]
            kept, ms = (np.array([row[key] for row in chosen]) for key in ("kept", "ms"))
            a, b = np.linalg.lstsq(np.stack([1 / ms, kept / ms], 1), np.ones_like(ms), rcond=None)[0]
            worst = max(worst, *abs((a + b * kept) / ms - 1))
            fits.append(f"{a:.2f} + {b:.2f} kept")
            if "1 in" in patterns:
                row = next(row for row in column if row["pattern"] == "butterfly")
                of_butterfly.append(f"{math.ceil(100 * row['ms'] / (a + b * row['kept'])) / 100:.2f}")
        texts.append(f"{', '.join(fits)} ({name})")
    by = "Milliseconds by the share kept, column by column, by least squares of the relative errors"
    beside = f"The butterfly takes {', '.join(of_butterfly)} times what such a list of its size would"
    return f"{by}: {'; '.join(texts)}; no row is further from that than {math.ceil(100 * worst)} %. {beside}."


def paper_table(results: Path, name: str) -> str:
    """A table of bench.paper, as that wrote it, without its headline."""
    return (results / "h200" / f"paper-{name}.md").read_text().partition("\n\n")[2].strip()


def fill(text: str, results: Path = RESULTS) -> str:
    """The README with every generated part made anew."""
    made = {
        "parity": parity_table,
        "attention": attention_table,
        "documents": documents_table,
        "training": training_table,
        "sparsity": sparsity_table,
    } | {f"paper-{name}": partial(paper_table, name=name) for name in PAPER}
    for name, make in made.items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, _, rest = text.partition(start)
        _, mark, after = rest.partition(end.lstrip())
        if not mark:
            raise UserError(f"README.md lacks the marks <!-- {name} --> and <!-- /{name} -->; put them back")
        text = before + start + make(results) + end + after
    return text


def draw(results: Path = RESULTS) -> None:
    """Draws every picture of the results anew, and with them the pages of the papers' tables."""
    from bench.paper.runner import TABLES, publish, read_table  # takes seconds

    folder = results / "h200"
    parity_picture(results, folder / "parity.svg")
    attention = read_results(folder / "attention.json")
    charts.draw(attention["rows"], folder / "attention.json", attention["environment"])
    for name in TABLES:
        publish(name, read_table(folder / f"paper-{name}.json"), folder)


def stale_files(results: Path = RESULTS) -> list[str]:
    """The pictures and pages that are not of the rows that the results file beside them has, and pictures of the README
    that are not there."""
    from bench.paper.runner import TABLES, page, read_table  # takes seconds

    folder = results / "h200"
    named = re.findall(r"!\[.*\]\(bench/results/(h200/[\w.-]+)\)", README.read_text())
    stale = [Path(name).name for name in named if not (results / name).is_file()]
    for picture in sorted([*folder.glob("*.svg"), *folder.glob("*.png")]):
        files = [file for file in folder.glob("*.json") if picture.stem.startswith(file.stem)]
        source = max(files, key=lambda file: len(file.stem))
        if charts.digest(read_results(source)["rows"]).encode() not in picture.read_bytes():
            stale.append(picture.name)
    pages = {name: folder / f"paper-{name}.json" for name in TABLES}
    return stale + [
        f"{file.stem}.md"
        for name, file in pages.items()
        if page(name, read_table(file)) != file.with_suffix(".md").read_text()
    ]


def rewrite(check: bool) -> None:
    """Brings the README and the pictures up to date with bench/results; only looks, if it is a `check`.

    Raises:
        UserError: the README, a picture or a page differs from bench/results, if checked; or these cannot be read.
    """
    old = README.read_text()
    if not check:
        draw()
        README.write_text(fill(old))
    elif stale := [*(["README.md"] if fill(old) != old else []), *stale_files()]:
        raise UserError(f"bench/results has other figures than {', '.join(stale)}; run python -m bench.report --readme")
