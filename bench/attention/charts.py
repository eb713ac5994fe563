"""The bar charts of the FlashAttention-2 paper (its figures 4 to 6) from the rows of bench.attention."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.attention.shapes import HIDDEN, TOKENS
from bench.common.drawing import SMALL, WIDTH, save, styled
from bench.common.formatting import length_text, whole_speed
from bench.common.looks import Look, looks_of

TITLES = {
    "forward": "Attention forward speed",
    "backward": "Attention backward speed",
    "both": "Attention forward + backward speed",
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


@styled
def figure_of(rows: list[dict], title: str) -> Figure:
    """Draw each panel that has rows. The panels are in one column, so that a bar is wide enough for its number."""
    panels = [panel for panel in PANELS if any((row["head_dim"], row["causal"]) == panel for row in rows)]
    figure = Figure(figsize=(WIDTH, 1.2 + 2.6 * len(panels)), layout="constrained")
    looks = looks_of(row["variant"] for row in rows)
    for axes, (head_dim, causal) in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels, strict=True):
        fill([row for row in rows if (row["head_dim"], row["causal"]) == (head_dim, causal)], looks, axes)
        axes.set_title(f"head size {head_dim}, {'causal' if causal else 'no mask'}", loc="left")
    axes.set_xlabel("sequence length")
    handles = {
        label: bars for axes in figure.axes for bars, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 4), fontsize=SMALL)
    figure.suptitle(title)
    return figure


def fill(rows: list[dict], looks: dict[str, Look], axes: Axes) -> None:
    """Draw bars grouped by length, each with its speed on top, or its status if it has no speed."""
    lengths = sorted({row["seq_len"] for row in rows})
    width = 0.88 / len(looks)
    for number, (variant, (label, colour)) in enumerate(looks.items()):
        of_variant = sorted((row for row in rows if row["variant"] == variant), key=lambda row: row["seq_len"])
        places = [lengths.index(row["seq_len"]) + (number - (len(looks) - 1) / 2) * width for row in of_variant]
        bars = axes.bar(places, [row["tflops"] or 0 for row in of_variant], 0.92 * width, color=colour, label=label)
        texts = [whole_speed(row, "tflops", variant == "flash2") for row in of_variant]
        axes.bar_label(bars, texts, rotation=90, fontsize=SMALL, padding=2)
    axes.set_xticks(range(len(lengths)), map(length_text, lengths))
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("TFLOP/s")
    axes.margins(x=0.01, y=0.2)  # room for the numbers of the highest bars
    axes.grid(axis="y")
