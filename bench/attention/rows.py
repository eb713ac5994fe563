"""The rows of a results file: the shape of one, and what many of them say about flash2's speed."""

import math

from bench.attention.charts import PANELS, panel_of
from bench.attention.shapes import LENGTHS, PASSES, Cell

RIVALS = "sdpa_flash", "sdpa_cudnn", "fa3"


def empty_row(cell: Cell, variant: str, pass_: str) -> dict:
    """A row of which only the shape is known."""
    shape = {
        key: getattr(cell, key) for key in ("batch", "heads", "kv_heads", "seq_len", "head_dim", "causal", "dtype")
    }
    unknown = ("ms", "ms_p20", "ms_p80", "tflops", "peak_mib", "error", "status", "message")
    return {"variant": variant, "pass": pass_, **shape, **dict.fromkeys(unknown)}


def speedups(rows: list[dict], rival: str, pass_: str) -> list[float]:
    """flash2's speed over the rival's, for every shape in `rows` where both were timed."""
    speeds = {}
    for row in rows:
        if row["pass"] == pass_ and row["status"] == "ok":
            shape = row["batch"], row["heads"], row["seq_len"], row["head_dim"], row["causal"]
            speeds.setdefault(shape, {})[row["variant"]] = row["tflops"]
    return [by["flash2"] / by[rival] for by in speeds.values() if "flash2" in by and rival in by]


def geometric_mean(values: list[float]) -> float:
    """The n-th root of the product; NaN of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def ratio_text(rows: list[dict]) -> str:
    """flash2's speed over each rival's, forward/backward/both: the geometric mean if `rows` hold several shapes."""
    texts = []
    for rival in RIVALS:
        means = [geometric_mean(speedups(rows, rival, pass_)) for pass_ in PASSES]
        if not all(map(math.isnan, means)):
            texts.append(f"{rival} " + "/".join("-" if math.isnan(mean) else f"{mean:.2f}" for mean in means))
    return ", ".join(texts)


def cell_line(cell: Cell, rows: list[dict]) -> str:
    """One line: each variant's TFLOP/s, forward/backward/both, and flash2's speed over its rivals'."""
    texts = {}
    for row in rows:
        text = f"{row['tflops']:.0f}" if row["status"] == "ok" else row["status"]
        texts.setdefault(row["variant"], []).append(text)
    for variant, of_passes in texts.items():
        failed_alike = of_passes[0] in ("oom", "failed") and len(set(of_passes)) == 1
        texts[variant] = of_passes[0] if failed_alike else "/".join(of_passes)
    line = f"{cell.name:17} " + " ".join(f"{variant} {text}" for variant, text in texts.items())
    return f"{line} | x {ratio_text(rows)}".removesuffix(" | x ")


def summary(rows: list[dict]) -> str:
    """The geometric means over the paper's lengths, one line per head size and mask."""
    lines = ["flash2's speed over its rivals', geometric mean over 512 to 16k, forward/backward/both:"]
    for panel in PANELS:
        part = [row for row in rows if panel_of(row) == panel]
        lengths = {row["seq_len"] for row in part if row["variant"] == "flash2" and row["status"] == "ok"}
        if lengths:
            missing = "" if len(lengths) == len(LENGTHS) else f" ({len(lengths)} of {len(LENGTHS)} lengths)"
            lines.append(f"{panel.name:12} x {ratio_text(part)}{missing}")
    return "\n".join(lines) if len(lines) > 1 else ""
