"""FlashAttention (Dao et al., 2022), table 2: training GPT-2 small and medium at a context of 1k."""

from collections.abc import Iterator
from functools import partial
from itertools import product

from bench.common.formatting import cost_text, table, value_text, whole_speed
from bench.common.timing import Gpu
from bench.paper import perplexities, training_steps
from bench.paper.perplexities import OTHER_SEED, RECIPE, SEED, perplexity_cell, recipe_text
from bench.paper.settings import PaperSettings
from bench.paper.training_steps import BUDGET, GPUS, by_label, compared, days, label, speed_cell, speed_of

TITLE = "FlashAttention's table 2: training GPT-2 at a context of 1k"
SIZES = {"full": (1024, {"gpt2": 32, "gpt2-medium": 16}), "smoke": (16, {"gpt2-nano": 1})}
TRAINED = "gpt2", "gpt2-nano"  # the models with perplexities; gpt2-medium would take almost three times as long
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


def cells(settings: PaperSettings) -> list[dict]:
    """Return the speeds of both models; with tokens, also GPT-2 small's perplexities and `flash2` from another seed."""
    context, models = SIZES[settings.size]
    trainers = [("huggingface", "naive"), *(("ours", name) for name in NAMES if name != "huggingface")]
    every = product(models.items(), trainers)
    speeds = [speed_cell(*trainer, model, context, batch, settings) for (model, batch), trainer in every]
    if not settings.tokens:
        return speeds
    trained = [cell for cell in speeds if cell["trainer"] == "ours" and cell["model"] in TRAINED]
    others = [perplexity_cell(cell, settings, OTHER_SEED) for cell in trained if label(cell) == "flash2"]
    return speeds + [perplexity_cell(cell, settings) for cell in trained] + others


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    return (training_steps if cell["measured"] == "speed" else perplexities).measure(cell, gpu, settings)


def markdown(rows: list[dict]) -> str:
    """Return our numbers beside the paper's, with a line for each perplexity from another seed."""
    speeds, learned = by_label(rows), compared_perplexities(rows)
    lines = []
    for model, context in dict.fromkeys((model, context) for model, context, _ in speeds):
        base = speed_of(speeds.get((model, context, "huggingface")))
        for name, text in NAMES.items():
            row, ours = speeds.get((model, context, name)), name == "flash2"
            measured = [whole_speed(row, key, ours) for key in ("tokens_per_second", "tflops")]
            memory = value_text(row, "peak_gib", partial(cost_text, ours=ours, decimals=1))
            derived, theirs = compared(speed_of(row), base, ours, PAPER.get((model, name)))
            perplexity = value_text(learned.get((SEED, model, name)), "perplexity")
            lines.append([model, text, *measured, memory, *derived, perplexity, *theirs])
        for seed, name in sorted(
            (seed, name) for seed, of_model, name in learned if of_model == model and seed != SEED
        ):
            perplexity = value_text(learned[seed, model, name], "perplexity")
            lines.append([model, f"`{name}`, seed {seed}", *["-"] * 5, perplexity, *["-"] * 4])
    header = ["model", "attention", "tokens/s", "TFLOP/s", "GiB", "days", "x Hugging Face", "perplexity"]
    batches = dict.fromkeys(f"{row['batch_size']} ({row['model']})" for row in rows)
    return (
        f"{table([*header, 'paper', 'ppl', 'days', 'x'], lines, left=2)}\n\nbf16, micro-batches of "
        f"{', '.join(batches)}. Days: 400k steps of 512 x 1024 tokens on 8 such devices with "
        f"perfect scaling. Perplexity: {perplexity_note(learned, speeds)} Hugging Face's model runs eager attention "
        "and is not compiled; compare with `naive` for the gain of attention alone. The paper's columns: 8 A100, "
        "OpenWebText."
    )


def perplexity_note(learned: dict, speeds: dict) -> str:
    """Return how the perplexities came about, and what the paper's perplexity of GPT-2 small costs on this device."""
    run = next(iter(learned.values()), None)
    text = f"validation, on {recipe_text(run)}." if run else "validation, needs tokens=FOLDER."
    for (seed, model, name), other in learned.items():
        first = learned.get((SEED, model, name))
        if seed != SEED and first and first["status"] == other["status"] == "ok":
            apart = abs(first["perplexity"] - other["perplexity"])
            text += f" Seeds {SEED} and {seed} of `{name}` differ by {apart:.2f}."
    if run:
        text += " Each attention draws its own dropout masks."
        text += " Hugging Face's model has none, because its loop here saves no checkpoints and could not be resumed."
    if speed := speed_of(speeds.get(("gpt2", 1024, "flash2"))):
        cost = f"{BUDGET / 1e9:.0f} billion tokens, {cost_text(GPUS * days(speed), True)} days of one such device"
        text += f" The paper's 18.2 takes its 400k steps: {cost} with `flash2`."
    return text


def compared_perplexities(rows: list[dict]) -> dict[tuple[int, str, str], dict]:
    """Return the rows of perplexity by seed, model and label, of the newest row's recipe."""
    found = [row for row in rows if row["measured"] == "perplexity"]
    runs = [[row[key] for key in RECIPE] for row in found]
    return {(r["seed"], r["model"], label(r)): r for r, run in zip(found, runs, strict=True) if run == runs[-1]}
