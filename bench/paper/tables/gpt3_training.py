"""FlashAttention-2 (Dao, 2023), table 1: training GPT-3 1.3B and 2.7B at contexts of 2k and 8k."""

from bench.common.formatting import length_text, table, whole_speed
from bench.paper import training_steps
from bench.paper.settings import PaperSettings
from bench.paper.training_steps import by_label, speed_cell

TITLE = "FlashAttention-2's table 1: training GPT-3 models"
ATTENTIONS = "naive", "fused_softmax", "flash1", "sdpa", "flash2"
# Model, context, micro-batch: about the largest that fits 141 GB with the first two attentions; at 8k it is 1.
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
measure = training_steps.measure


def cells(settings: PaperSettings) -> list[dict]:
    return [speed_cell("ours", name, *shape, settings) for shape in SIZES[settings.size] for name in ATTENTIONS]


def markdown(rows: list[dict]) -> str:
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
        f"TFLOP/s per device by the papers' count, 6 N + 12 L d T FLOPs per token; bf16, micro-batches of "
        f"{', '.join(batches)}, no activation checkpointing. The paper's columns: 8 A100."
    )
