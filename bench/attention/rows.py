"""Result rows of bench.attention: how a row begins, and what many rows say about flash2's speed."""

import statistics

from bench.attention.charts import LOOKS, PANELS, panel_of
from bench.attention.shapes import LENGTHS, PASSES, AttentionShape

RIVALS = "sdpa_flash", "sdpa_cudnn", "fa3"
SHAPE = "batch", "heads", "kv_heads", "seq_len", "head_dim", "causal", "dtype"
MEASURED = "ms", "ms_p20", "ms_p80", "tflops", "peak_mib", "error", "status", "message"


def empty_row(shape: AttentionShape, variant: str, pass_: str) -> dict:
    """Return a row that holds only the shape."""
    return {"variant": variant, "pass": pass_, **{key: getattr(shape, key) for key in SHAPE}, **dict.fromkeys(MEASURED)}


def speedups(rows: list[dict], rival: str, pass_: str) -> list[float]:
    """Return flash2's speed over the rival's for every shape in `rows` that has both timings."""
    speeds = {}
    for row in rows:
        if row["pass"] == pass_ and row["status"] == "ok":
            shape = row["batch"], row["heads"], row["seq_len"], row["head_dim"], row["causal"]
            speeds.setdefault(shape, {})[row["variant"]] = row["tflops"]
    return [by["flash2"] / by[rival] for by in speeds.values() if "flash2" in by and rival in by]


def ratio_text(rows: list[dict]) -> str:
    """Return flash2's speed over each rival's, forward/backward/both: the geometric mean over the shapes in `rows`."""
    texts = []
    custom = {row["variant"]: None for row in rows if row["variant"] not in LOOKS}
    for rival in (*RIVALS, *custom):
        speeds = [speedups(rows, rival, pass_) for pass_ in PASSES]
        if any(speeds):
            means = (f"{statistics.geometric_mean(of_pass):.2f}" if of_pass else "-" for of_pass in speeds)
            texts.append(f"{rival} {'/'.join(means)}")
    return ", ".join(texts)


def shape_line(shape: AttentionShape, rows: list[dict]) -> str:
    """Return one line: each variant's TFLOP/s, forward/backward/both, and flash2's speed over its rivals'."""
    texts = {}
    for row in rows:
        text = f"{row['tflops']:.0f}" if row["status"] == "ok" else row["status"]
        texts.setdefault(row["variant"], []).append(text)
    line = f"{shape.name:17} " + " ".join(f"{variant} {'/'.join(of_passes)}" for variant, of_passes in texts.items())
    return f"{line} | x {ratio_text(rows)}".removesuffix(" | x ")


def summary(rows: list[dict]) -> str:
    """Return the geometric means over the paper's lengths, one line per head size and mask."""
    lines = ["flash2's speed over its rivals', geometric mean over 512 to 16k, forward/backward/both:"]
    for panel in PANELS:
        part = [row for row in rows if panel_of(row) == panel]
        lengths = {row["seq_len"] for row in part if row["variant"] == "flash2" and row["status"] == "ok"}
        if lengths:
            missing = "" if len(lengths) == len(LENGTHS) else f" ({len(lengths)} of {len(LENGTHS)} lengths)"
            lines.append(f"{panel.name:12} x {ratio_text(part)}{missing}")
    return "\n".join(lines) if len(lines) > 1 else ""
