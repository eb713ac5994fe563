"""FlashAttention-2 (Dao, 2023), table 1: training GPT-3 1.3B and 2.7B at contexts of 2k and 8k."""

from matplotlib.figure import Figure

from bench.attention.charts import LOOKS
from bench.paper import training
from bench.paper.config import PaperConfig
from bench.paper.text import length_text, table, whole_speed
from bench.paper.training import by_label

TITLE = "FlashAttention-2's table 1: training GPT-3 models"
ATTENTIONS = "naive", "fused_softmax", "flash1", "sdpa", "flash2"
# Model, context, micro-batch: about the largest that the first two attentions have 141 GB for; at 8k they hold one.
SIZES = {
    "full": (("gpt3-1.3b", 2048, 8), ("gpt3-1.3b", 8192, 1), ("gpt3-2.7b", 2048, 4), ("gpt3-2.7b", 8192, 1)),
    "smoke": (("gpt2-nano", 16, 1),),
}
# TFLOP/s on each of 8 A100: without FlashAttention, with it, with FlashAttention-2.
PAPER = {
    ("gpt3-1.3b", 2048): (142, 189, 196),
    ("gpt3-1.3b", 8192): (72, 170, 220),
    ("gpt3-2.7b", 2048): (149, 189, 205),
    ("gpt3-2.7b", 8192): (80, 175, 225),
}
measure = training.measure


def cells(config: PaperConfig) -> list[dict]:
    """Every model and context with every attention."""
    return [training.cell_of("ours", name, *shape, config) for shape in SIZES[config.size] for name in ATTENTIONS]


def markdown(rows: list[dict]) -> str:
    """TFLOP/s, ours beside the paper's columns."""
    speeds = by_label(rows)
    lines = []
    for model, context in dict.fromkeys((model, context) for model, context, _ in speeds):
        ours = [whole_speed(speeds.get((model, context, name)), "tflops", name == "flash2") for name in ATTENTIONS]
        theirs = map(str, PAPER.get((model, context), "---"))
        lines.append([model, length_text(context), *ours, *theirs])
    paper = "paper: without", "FlashAttention", "FlashAttention-2"
    batches = dict.fromkeys(f"{r['batch_size']} ({r['model']}, {length_text(r['context_length'])})" for r in rows)
    return (
        f"{table(['model', 'context', *(f'`{name}`' for name in ATTENTIONS), *paper], lines)}\n\n"
        f"TFLOP/s of one device by the papers' count, 6 N + 12 L d T a token; bf16, micro-batches of "
        f"{', '.join(batches)}, the same for all attentions, no activations computed twice. `flash1` has a program for "
        "each head of each sequence, so that one sequence leaves most of the GPU idle. The paper's columns are of 8 "
        "A100, per GPU."
    )


def pictures(rows: list[dict], where: str) -> dict[str, Figure]:
    """Bars by model and context."""
    speeds = by_label(rows)
    shapes = list(dict.fromkeys((model, context) for model, context, _ in speeds))
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes, width = figure.subplots(), 0.8 / len(ATTENTIONS)
    for i, name in enumerate(ATTENTIONS):
        shown = [speeds.get((*shape, name)) for shape in shapes]
        heights = [row["tflops"] if row and row["status"] == "ok" else 0 for row in shown]
        places = [j + (i - (len(ATTENTIONS) - 1) / 2) * width for j in range(len(shapes))]
        bars = axes.bar(places, heights, width, label=name, color=LOOKS.get(name, (name, "#1f77b4"))[1])
        axes.bar_label(bars, [whole_speed(row, "tflops", name == "flash2") for row in shown], fontsize=7, padding=2)
    axes.set_xticks(range(len(shapes)), [f"{model}, {length_text(context)}" for model, context in shapes])
    axes.set(ylabel="TFLOP/s", title=f"Training, {where}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(ATTENTIONS), loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return {"": figure}
