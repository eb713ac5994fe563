"""The bar charts of the FlashAttention-2 paper (its figures 4 to 6) from the rows of bench.attention."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.attention.shapes import HIDDEN, TOKENS
from bench.common.formatting import length_text, whole_speed

TITLES = {
    "forward": "Attention forward speed",
    "backward": "Attention backward speed",
    "both": "Attention forward + backward speed",
}
LOOKS = {
    "naive": ("PyTorch, naive", "#9e9e9e"),
    "pytorch": ("PyTorch, 16 bits", "#5f5f5f"),
    "fused_softmax": ("fused softmax", "#e377c2"),
    "sdpa_efficient": ("SDPA memory-efficient (xformers)", "#c5b0d5"),
    "sdpa_flash": ("SDPA FlashAttention-2", "#1f77b4"),
    "fa2": ("FlashAttention-2", "#17becf"),
    "flex": ("FlexAttention", "#2ca02c"),
    "sdpa_cudnn": ("SDPA cuDNN", "#ff9f40"),
    "fa3": ("FlashAttention-3", "#8c564b"),
    "flash1": ("flash1 (ours)", "#9467bd"),
    "triton": ("flash2, plain Triton (ours)", "#ff9896"),
    "flash2": ("flash2 (ours)", "#d62728"),
    "block_sparse": ("block_sparse (ours)", "#aec7e8"),
    "local": ("local (ours)", "#bcbd22"),
}


PANELS = [(64, False), (128, False), (64, True), (128, True)]  # head size and mask


def panel_of(row: dict) -> tuple[int, bool] | None:
    """Return the panel of a row, or None if the row does not have the paper's 16k tokens and hidden size 2048."""
    panel = row["head_dim"], row["causal"]
    fits = row["batch"] * row["seq_len"] == TOKENS and row["heads"] * row["head_dim"] == HIDDEN
    return panel if fits and row["kv_heads"] == row["heads"] and panel in PANELS else None


def draw(rows: list[dict], results: Path, environment: dict) -> list[Path]:
    """Draw the rows of the paper's shapes, one PNG and SVG per pass, beside the results file. Return their paths."""
    paths = []
    for pass_, title in TITLES.items():
        shown = [row for row in rows if row["pass"] == pass_ and panel_of(row)]
        if shown:
            figure = figure_of(shown, f"{title}, {shown[0]['dtype']}, {environment['gpu']}")
            for suffix in ("png", "svg"):
                paths.append(results.with_name(f"{results.stem}-{pass_}.{suffix}"))
                save(figure, paths[-1])
    return paths


def figure_of(rows: list[dict], title: str) -> Figure:
    """Draw the head sizes side by side, without a mask above, causal below."""
    figure = Figure(figsize=(17, 9.5), layout="constrained")
    grid = figure.subplots(2, 2)
    for axes, (head_dim, causal) in zip(grid.flat, PANELS, strict=True):
        fill([row for row in rows if (row["head_dim"], row["causal"]) == (head_dim, causal)], axes)
        axes.set_title(f"head size {head_dim}, {'causal' if causal else 'no mask'}", fontsize=12)
    handles = {label: bars for axes in grid.flat for bars, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=8, frameon=False)
    figure.suptitle(title, fontsize=15)
    return figure


def fill(rows: list[dict], axes: Axes) -> None:
    """Draw bars grouped by length, each with its speed on top, or its status if it has no speed."""
    lengths = sorted({row["seq_len"] for row in rows})
    present = {row["variant"]: None for row in rows}
    variants = [name for name in {**LOOKS, **present} if name in present]
    width = 0.88 / max(len(variants), 1)
    for number, variant in enumerate(variants):
        label, colour = LOOKS.get(variant, (variant, "black"))  # a function of the user's has no look of its own
        of_variant = sorted((row for row in rows if row["variant"] == variant), key=lambda row: row["seq_len"])
        places = [lengths.index(row["seq_len"]) + (number - (len(variants) - 1) / 2) * width for row in of_variant]
        bars = axes.bar(places, [row["tflops"] or 0 for row in of_variant], width, color=colour, label=label)
        texts = [whole_speed(row, "tflops", variant == "flash2") for row in of_variant]
        axes.bar_label(bars, texts, rotation=90, fontsize=8, padding=2)
    axes.set_xticks(range(len(lengths)), map(length_text, lengths))
    axes.set(xlabel="sequence length", ylabel="TFLOP/s")
    axes.margins(x=0.01, y=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Save a picture. The same numbers give the same bytes: ids in an SVG are not random, and there is no date."""
    with matplotlib.rc_context({"svg.hashsalt": "gpt2-flash"}):
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
