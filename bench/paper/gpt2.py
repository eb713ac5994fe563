"""FlashAttention (Dao et al., 2022), table 2: training GPT-2 small and medium at a context of 1k."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from functools import partial

from matplotlib.figure import Figure

from bench.common.timing import Gpu
from bench.paper import learning, training
from bench.paper.config import PaperConfig
from bench.paper.text import cost_text, figure_of, speed_text, table, whole_speed
from bench.paper.training import by_label, days, speed_of

TITLE = "FlashAttention's table 2: training GPT-2 at a context of 1k"
SIZES = {"full": (1024, {"gpt2": 32, "gpt2-medium": 16}), "smoke": (16, {"gpt2-nano": 1})}
NAMES = {
    "huggingface": "Hugging Face, eager",
    "fused_softmax": "`fused_softmax`, Megatron-LM's",
    "naive": "`naive`",
    "sdpa": "`sdpa`",
    "flash1": "`flash1`",
    "flash2": "`flash2`",
}
# Implementation, perplexity on OpenWebText, days on 8 A100, speedup.
PAPER = {
    ("gpt2", "huggingface"): ("Huggingface", 18.2, 9.5, 1.0),
    ("gpt2", "fused_softmax"): ("Megatron-LM", 18.2, 4.7, 2.0),
    ("gpt2", "flash1"): ("FlashAttention", 18.2, 2.7, 3.5),
    ("gpt2-medium", "huggingface"): ("Huggingface", 14.2, 21.0, 1.0),
    ("gpt2-medium", "fused_softmax"): ("Megatron-LM", 14.3, 11.5, 1.8),
    ("gpt2-medium", "flash1"): ("FlashAttention", 14.3, 6.9, 3.0),
}


def cells(config: PaperConfig) -> list[dict]:
    """Speeds of both models; with tokens, their perplexities too, and those of `naive` from other seeds."""
    context, models = SIZES[config.size]
    trainers = [("huggingface", "naive"), *(("ours", name) for name in NAMES if name != "huggingface")]
    speeds = [
        training.cell_of(*trainer, model, context, batch, config)
        for model, batch in models.items()
        for trainer in trainers
    ]
    if not config.tokens:
        return speeds
    plain = [cell for cell in speeds if training.label(cell) == "naive"]
    others = [learning.cell_of(cell, config, seed) for cell in plain for seed in learning.OTHER_SEEDS]
    return speeds + [learning.cell_of(cell, config) for cell in speeds] + others


def measure(cell: dict, gpu: Gpu, config: PaperConfig) -> Iterator[dict]:
    """A row of speed, or of perplexity."""
    return {"speed": training, "perplexity": learning}[cell["measured"]].measure(cell, gpu, config)


def markdown(rows: list[dict]) -> str:
    """Ours beside the paper's columns."""
    speeds, lines = by_label(rows), []
    perplexities = perplexities_of(rows)
    for model, context in dict.fromkeys((model, context) for model, context, _ in speeds):
        for name, text in NAMES.items():
            row, peer = speeds.get((model, context, name)), speeds.get((model, context, "huggingface"))
            speed, base = speed_of(row), speed_of(peer)
            learned, ours = perplexities.get((learning.SEED, model, name)), name == "flash2"
            lines.append(
                [
                    model,
                    text,
                    whole_speed(row, "tokens_per_second", ours),
                    whole_speed(row, "tflops", ours),
                    figure_of(row, "peak_gib", partial(cost_text, ours=ours, decimals=1)),
                    cost_text(days(speed), ours) if speed else "-",
                    speed_text(speed / base, ours) if speed and base else "-",
                    *([figure_of(learned, "perplexity")] if perplexities else []),
                    *paper_columns(model, name),
                ]
            )
    measured = ["model", "attention", "tokens/s", "TFLOP/s", "GiB", "days", "x Hugging Face"]
    header = [*measured, *(["perplexity"] if perplexities else []), "paper's", "ppl", "days", "x"]
    return f"{table(header, lines, left=2)}\n\n{notes(rows, perplexities)}"


def perplexities_of(rows: list[dict]) -> dict[tuple[int, str, str], dict]:
    """The rows of perplexity by seed, model and label: of the tokens and steps that most are of; others do not compare.

    Where as many are of several, the newest count.
    """
    found = [row for row in rows if row["measured"] == "perplexity" and "seed" in row]
    counts = Counter((row["tokens"], row["steps"]) for row in reversed(found))
    if not counts:
        return {}
    ((run, _),) = counts.most_common(1)
    found = [row for row in found if (row["tokens"], row["steps"]) == run]
    return {(row["seed"], row["model"], training.label(row)): row for row in found}


def paper_columns(model: str, name: str) -> list[str]:
    """The paper's own figures, where it has them."""
    theirs = PAPER.get((model, name))
    return [theirs[0], *(f"{x:.1f}" for x in theirs[1:])] if theirs else ["-"] * 4


def notes(rows: list[dict], perplexities: dict[tuple[int, str, str], dict]) -> str:
    """What the columns mean."""
    batches = dict.fromkeys(f"{row['batch_size']} ({row['model']})" for row in rows)
    text = (
        f"bf16, micro-batches of {', '.join(batches)}. Days are those of the paper's budget, 400k steps of 512 x 1024 "
        "tokens, on 8 such devices, each as fast as the one that was measured: perfect scaling is assumed. TFLOP/s "
        "count 6 N + 12 L d T a token. Hugging Face's model is run as it comes, with eager attention and not compiled, "
        "all others in this trainer's compiled step, whose loss and optimizer are faster too: what attention alone "
        "buys is its ratio to `naive`. The paper's columns are of 8 A100 and OpenWebText. "
    )
    if any(row["measured"] == "speed" and row["status"] == "ok" and "peak_of" not in row for row in rows):
        text += "GiB are those of the first step, which has no moments of AdamW's yet, 8 bytes a parameter. "
    shown = [row for row in perplexities.values() if row["seed"] == learning.SEED]
    if not shown:
        return text + "Perplexities were not measured: they need tokens=FOLDER."
    run, runs, apart, farther = shown[0], [], [], []
    for model in dict.fromkeys(row["model"] for row in shown):
        of_model = [row for row in shown if row["model"] == model]
        runs.append(f"{of_model[0]['batch_size']} x {run['context_length']} tokens ({model})")
        seeds = [row for (_, *which), row in perplexities.items() if which == [model, "naive"]]
        of_attentions, of_seeds = deviation(of_model), deviation(seeds)
        texts = [f"{nats:.4f}".replace("nan", "-") for nats in (of_attentions, of_seeds)]
        apart.append(f"{texts[0]} ({model}; of {len(seeds)} seeds of `naive` {texts[1]})")
        if of_attentions > of_seeds:
            farther.append(model)
    text += (
        f"Perplexity is that of the validation tokens of `{run['tokens']}` after {run['steps']} steps of "
        f"{', '.join(runs)}, all of a model from the same weights. Their losses have a standard deviation, in nats, of "
        f"{', '.join(apart)}: training amplifies the rounding by which attentions differ. Another seed is other "
        "weights and another order of the tokens."
    )
    if farther:
        text += f" Those of {', '.join(farther)} differ more than the seeds: so short a run does not show them alike."
    return text


def deviation(rows: list[dict]) -> float:
    """The standard deviation of the losses, the perplexities' logarithms; NaN for fewer than two.

    Not how far the lowest is from the highest, which grows with their number.
    """
    found = [math.log(row["perplexity"]) for row in rows if row["status"] == "ok"]
    return statistics.stdev(found) if len(found) > 1 else math.nan


def pictures(rows: list[dict], where: str) -> dict[str, Figure]:
    """Speed over Hugging Face's, and the paper's."""
    speeds = by_label(rows)
    models = list(dict.fromkeys((model, context) for model, context, _ in speeds))
    figure = Figure(figsize=(4.5 * len(models), 3.6), layout="constrained")
    grid = figure.subplots(1, max(len(models), 1), squeeze=False)[0]
    for axes, (model, context) in zip(grid, models, strict=True):
        shown = [speeds.get((model, context, name)) for name in NAMES]
        base = speed_of(shown[0])
        ratios = [(speed_of(row) or 0) / base if base else 0 for row in shown]
        texts = [
            speed_text(ratio, name == "flash2") if ratio else figure_of(row, "tokens_per_second")
            for name, ratio, row in zip(NAMES, ratios, shown, strict=True)
        ]
        bars = axes.bar(range(len(NAMES)), ratios, color="#d62728", label=where)
        axes.bar_label(bars, texts, padding=2)
        theirs = [(i, PAPER[model, name][3]) for i, name in enumerate(NAMES) if (model, name) in PAPER]
        if theirs:
            axes.plot(*zip(*theirs, strict=True), "D", color="black", label="FlashAttention's table 2, 8 A100")
        axes.set_xticks(range(len(NAMES)), NAMES, rotation=30, ha="right")
        axes.set(title=f"{model}, context {context}", ylabel="speed over Hugging Face's")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left")
        axes.margins(y=0.25)
    return {"": figure}
