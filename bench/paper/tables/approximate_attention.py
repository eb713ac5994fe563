"""FlashAttention (Dao et al., 2022), figure 3: time and memory of attentions against the sequence length.

One process measures all attentions at one length in turn: forward and backward, without the projections around them.
"""

from collections.abc import Iterator
from functools import partial

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import nn

from bench.attention.accuracy import Truth, check, truth_of
from bench.attention.contenders import Contender, Inputs, bind, draw_inputs
from bench.attention.shapes import AttentionShape
from bench.common.drawing import SMALL, WIDTH, styled
from bench.common.formatting import cost_text, length_text, table, value_text
from bench.common.looks import looks_of
from bench.common.timing import Gpu, recorded
from bench.lra.approximate.reformer import Reformer
from bench.lra.attentions import EXACT, build_attention
from bench.lra.config import EncoderConfig
from bench.paper.classifier_steps import call_plain
from bench.paper.crossings import where_below
from bench.paper.settings import PaperSettings
from bench.paper.turns import take_turns
from errors import UserError, problem_of

TITLE = "FlashAttention's figure 3: exact, sparse and approximate attentions against the length"
SPARSE = "block_sparse", "local_window"
APPROXIMATE = "linformer", "linear", "performer", "reformer", "smyrf"
KINDS = {name: kind for kind, names in {"exact": EXACT, "sparse": SPARSE}.items() for name in names}
KINDS |= dict.fromkeys(APPROXIMATE, "approximate")
OURS = "flash1", "flash2", "block_sparse"
BASE = "flash2"
SIZES = {"full": {"batch": 16, "heads": 8, "head_dim": 64}, "smoke": {"batch": 1, "heads": 2, "head_dim": 16}}
LENGTHS = {"full": [2**power for power in range(7, 17)], "smoke": [64, 128]}
ROUNDS = {"full": 15, "smoke": 1}
COSTS = {"ms": "ms", "peak_mib": "MiB"}
DECIMALS = {"ms": 2, "peak_mib": 0}
STYLES = {"exact": "o-", "sparse": "s--", "approximate": "^:"}


def cells(settings: PaperSettings) -> list[dict]:
    return [{"seq_len": length} for length in LENGTHS[settings.size]]


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each attention: time and peak memory of forward and backward beyond their inputs."""
    sizes = SIZES[settings.size]
    shape = AttentionShape("approximate", seq_len=cell["seq_len"], causal=False, **sizes)
    inputs = draw_inputs(shape, gpu.device)
    truth = truth_of(shape, inputs)
    rows, calls = [], []
    for name in KINDS:
        row = {"variant": name, **sizes, "ms": None, "peak_mib": None, "status": None, "message": None}
        rows.append(row)
        with recorded([row], gpu):
            if contender := contender_of(row, shape, inputs, gpu.device):
                warm(contender, row, shape, truth, gpu)
                calls.append((row, contender.call("both")))
        gpu.release()
    take_turns(calls, gpu, ROUNDS[settings.size])
    yield from rows


def contender_of(row: dict, shape: AttentionShape, inputs: Inputs, device: str) -> Contender | None:
    """Return an attention with inputs of its own and its weights.

    If the attention does not support the length, return None and say why in the row.
    """
    name, width = row["variant"], shape.heads * shape.head_dim
    config = EncoderConfig(2, 2, shape.seq_len, n_embd=width, n_head=shape.heads)
    torch.manual_seed(0)
    try:
        attend = build_attention(name, config)
    except UserError as error:
        row.update(status="unsupported", message=problem_of(error))
        return None
    weights = attend.to(device).parameters() if isinstance(attend, nn.Module) else ()
    contender = bind(name, partial(call_plain, attend), shape, inputs)
    if isinstance(attend, Reformer):  # its keys are its queries, so k gets no gradient
        contender.leaves = contender.leaves[0], contender.leaves[2]
    contender.leaves += tuple(weights)
    return contender


def warm(contender: Contender, row: dict, shape: AttentionShape, truth: Truth, gpu: Gpu) -> None:
    """Run both passes, check them if they are exact, and measure their memory."""
    if contender.variant in EXACT:
        check(contender, shape, truth)
    else:
        contender.dout = torch.empty_like(contender.forward()).copy_(contender.dout)
    row["peak_mib"] = gpu.added_peak(contender.call("both")) / 2**20


def lines_of(rows: list[dict], cost: str) -> dict[str, dict[int, float]]:
    """Return a cost by length for each attention, for the lengths that it was measured at."""
    done = sorted((row for row in rows if row["status"] == "ok"), key=lambda row: row["seq_len"])
    return {name: {r["seq_len"]: r[cost] for r in done if r["variant"] == name} for name in KINDS}


def markdown(rows: list[dict]) -> str:
    """Return a table of milliseconds, a table of MiB, and where each line crosses the line of flash2."""
    lengths = sorted({row["seq_len"] for row in rows})
    found = {(row["variant"], row["seq_len"]): row for row in rows if "variant" in row}
    parts = []
    for cost, unit in COSTS.items():
        lines = []
        for name, kind in KINDS.items():
            text = partial(cost_text, ours=name in OURS, decimals=DECIMALS[cost])
            lines.append([f"`{name}`", kind, *(value_text(found.get((name, n)), cost, text) for n in lengths)])
        parts.append(table([unit, "kind", *map(length_text, lengths)], lines, left=2))
    curves = {cost: lines_of(rows, cost) for cost in COSTS}
    lines = [
        [f"`{name}`", *(where_below(curves[cost][name], curves[cost][BASE]) for cost in COSTS)]
        for name in KINDS
        if name != BASE
    ]
    parts.append(table(["attention", f"faster than `{BASE}`", f"less memory than `{BASE}`"], lines, left=3))
    shape = next((f"Batch {r['batch']}, {r['heads']} heads of {r['head_dim']}" for r in rows if "batch" in r), "-")
    reasons = dict.fromkeys(f"`{r['variant']}`: {r['message']}." for r in rows if r["status"] == "unsupported")
    notes = [
        f"{shape}, bf16, not causal, without dropout or padding. Forward and backward of attention alone. `naive`, "
        "`local_window` and the approximate attentions are PyTorch operations without torch.compile. MiB: peak "
        "with the output and the gradients, without the inputs. A call slower than 1 s is timed once. The last table "
        "interpolates on logarithmic axes, up to the longest length that both ran.",
        *(["UNSUPPORTED:", *reasons] if reasons else []),
    ]
    return "\n\n".join([*parts, " ".join(notes)])


@styled
def pictures(rows: list[dict], device: str) -> dict[str, Figure]:
    """Draw time and memory against the length, a line for each attention. The legend is below both panels."""
    figure = Figure(figsize=(WIDTH, 6.2), layout="constrained")
    lengths = sorted({row["seq_len"] for row in rows})
    for axes, (cost, unit) in zip(figure.subplots(1, 2), COSTS.items(), strict=True):
        curves = lines_of(rows, cost)
        for name, look in looks_of(name for name in KINDS if curves[name]).items():
            style = {"color": look.colour, "lw": 3 if name == BASE else 1.6, "label": f"{look.label}, {KINDS[name]}"}
            axes.loglog(*zip(*curves[name].items(), strict=True), STYLES[KINDS[name]], **style)
        axes.set_xticks(lengths, map(length_text, lengths), rotation=45)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="sequence length", ylabel=unit)
        axes.grid()
    figure.axes[0].set_title("forward and backward")
    figure.axes[1].set_title("peak memory")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=SMALL)
    figure.suptitle(f"Attention against the sequence length, bf16, {device}")
    return {"": figure}
