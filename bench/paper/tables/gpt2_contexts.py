"""FlashAttention (Dao et al., 2022), table 4: GPT-2 small with longer contexts."""

from bench.common.formatting import table, whole_speed
from bench.paper import training_steps
from bench.paper.settings import PaperSettings
from bench.paper.training_steps import by_label, compared, speed_cell, speed_of

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
measure = training_steps.measure


def cells(settings: PaperSettings) -> list[dict]:
    """Return fused_softmax at the shortest context, and flash2 at each, with the same number of tokens per step."""
    model, tokens, contexts = SIZES[settings.size]
    shapes = [(BASE, contexts[0]), *(("flash2", context) for context in contexts)]
    return [speed_cell("ours", name, model, context, tokens // context, settings) for name, context in shapes]


def markdown(rows: list[dict]) -> str:
    speeds, lines = by_label(rows), []
    shortest = min((context for _, context, _ in speeds), default=1)
    for (model, context, name), row in sorted(speeds.items(), key=lambda item: (item[0][2] != BASE, item[0][1])):
        ours, paper = name == "flash2", PAPER.get((name, context // shortest)) if model == "gpt2" else None
        derived, theirs = compared(speed_of(row), speed_of(speeds.get((model, shortest, BASE))), ours, paper)
        measured = [whole_speed(row, key, ours) for key in ("tokens_per_second", "tflops")]
        lines.append([f"`{name}`", f"{context:,}", *measured, *derived, *theirs])
    header = ["attention", "context", "tokens/s", "TFLOP/s", "days", f"x {BASE}", "paper", "ppl", "days", "x"]
    return (
        f"{table(header, lines)}\n\nbf16, the same number of tokens per step at each context. Days: 400k steps of "
        "512 x 1024 tokens on 8 such devices with perfect scaling. The paper's columns: the first FlashAttention, "
        "8 A100, OpenWebText."
    )
