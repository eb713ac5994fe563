"""Result rows of bench.attention: how a row begins, and how the rows of a shape are printed."""

from bench.attention.shapes import AttentionShape

SHAPE = "batch", "heads", "kv_heads", "seq_len", "head_dim", "causal", "dtype"
MEASURED = "ms", "ms_p20", "ms_p80", "tflops", "peak_mib", "error", "status", "message"


def empty_row(shape: AttentionShape, variant: str, pass_: str) -> dict:
    """Return a row that holds only the shape."""
    return {"variant": variant, "pass": pass_, **{key: getattr(shape, key) for key in SHAPE}, **dict.fromkeys(MEASURED)}


def shape_line(shape: AttentionShape, rows: list[dict]) -> str:
    """Return one line: each variant's TFLOP/s, forward/backward/both."""
    texts = {}
    for row in rows:
        text = f"{row['tflops']:.0f}" if row["status"] == "ok" else row["status"]
        texts.setdefault(row["variant"], []).append(text)
    return f"{shape.name:17} " + "  ".join(f"{variant} {'/'.join(of_passes)}" for variant, of_passes in texts.items())
