"""FlashAttention (Dao et al., 2022), table 4: GPT-2 small with longer contexts."""

from matplotlib.figure import Figure

from bench.paper import training
from bench.paper.config import PaperConfig
from bench.paper.text import cost_text, label_lengths, speed_text, table, whole_speed
from bench.paper.training import by_label, days, speed_of

TITLE = "FlashAttention's table 4: GPT-2 small with longer contexts"
SIZES = {"full": ("gpt2", 32 * 1024, (1024, 2048, 4096)), "smoke": ("gpt2-nano", 32, (8, 16, 32))}
BASE = "fused_softmax"
# By attention and by context over the shortest: context, perplexity on OpenWebText, days on 8 A100, speedup.
PAPER = {
    (BASE, 1): ("Megatron-LM 1k", 18.2, 4.7, 1.0),
    ("flash2", 1): ("FlashAttention 1k", 18.2, 2.7, 1.7),
    ("flash2", 2): ("FlashAttention 2k", 17.6, 3.0, 1.6),
    ("flash2", 4): ("FlashAttention 4k", 17.5, 3.6, 1.3),
}
measure = training.measure


def cells(config: PaperConfig) -> list[dict]:
    """fused_softmax at the shortest context, and flash2 at all: as many tokens a step."""
    model, tokens, contexts = SIZES[config.size]
    shapes = [(BASE, contexts[0]), *(("flash2", context) for context in contexts)]
    return [training.cell_of("ours", name, model, context, tokens // context, config) for name, context in shapes]


def markdown(rows: list[dict]) -> str:
    """Ours beside the paper's columns."""
    speeds, lines = by_label(rows), []
    shortest = min((context for _, context, _ in speeds), default=1)
    for (model, context, name), row in sorted(speeds.items(), key=lambda item: (item[0][2] != BASE, item[0][1])):
        speed, base = speed_of(row), speed_of(speeds.get((model, shortest, BASE)))
        theirs, ours = PAPER.get((name, context // shortest)) if model == "gpt2" else None, name == "flash2"
        lines.append(
            [
                f"`{name}`",
                f"{context:,}",
                whole_speed(row, "tokens_per_second", ours),
                whole_speed(row, "tflops", ours),
                cost_text(days(speed), ours) if speed else "-",
                speed_text(speed / base, ours) if speed and base else "-",
                *([theirs[0], *(f"{x:.1f}" for x in theirs[1:])] if theirs else ["-"] * 4),
            ]
        )
    header = ["attention", "context", "tokens/s", "TFLOP/s", "days", f"x {BASE}", "paper's", "ppl", "days", "x"]
    return (
        f"{table(header, lines)}\n\nbf16, as many tokens a step at every context. Days are those of the paper's "
        "budget, 400k steps of 512 x 1024 tokens, on 8 such devices, each as fast as the one that was measured: "
        "perfect scaling is assumed. The paper's columns are of 8 A100 and OpenWebText, and of FlashAttention, the "
        "first: `flash2` stands beside it. What a longer context does for perplexity takes long training to show, and "
        "was not measured."
    )


def pictures(rows: list[dict], where: str) -> dict[str, Figure]:
    """Tokens a second against context."""
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, colour in ((BASE, "#e377c2"), ("flash2", "#d62728")):
        points = [(r["context_length"], speed_of(r)) for r in rows if r["attention"] == name and speed_of(r)]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), "o-", color=colour, label=name, clip_on=False)
    label_lengths(axes, rows, "context_length")
    axes.set(xlabel="context", ylabel="tokens/s", title=f"GPT-2 small, {where}")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return {"": figure}
