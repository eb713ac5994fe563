"""The label and the colour of each attention variant, in every chart and report."""

from collections.abc import Iterable
from itertools import cycle
from typing import NamedTuple


class Look(NamedTuple):
    """How charts show a variant."""

    label: str
    colour: str


LOOKS = {
    "naive": Look("PyTorch, naive", "#8a8a8a"),
    "pytorch": Look("PyTorch, 16 bits", "#4f5b66"),
    "fused_softmax": Look("fused softmax", "#e377c2"),
    "sdpa_efficient": Look("SDPA memory-efficient (xformers)", "#b8a3d1"),
    "sdpa": Look("SDPA", "#1f77b4"),
    "sdpa_flash": Look("SDPA FlashAttention-2", "#1f77b4"),
    "fa2": Look("FlashAttention-2", "#17a8b8"),
    "flex": Look("FlexAttention", "#2ca02c"),
    "sdpa_cudnn": Look("SDPA cuDNN", "#f79431"),
    "fa3": Look("FlashAttention-3", "#8c564b"),
    "fa4": Look("FlashAttention-4", "#3949ab"),
    "flash1": Look("flash1 (ours)", "#9467bd"),
    "triton": Look("flash2, plain Triton (ours)", "#ff9896"),
    "flash2": Look("flash2 (ours)", "#d62728"),
    "block_sparse": Look("block_sparse (ours)", "#7aa6d8"),
    "local": Look("local (ours)", "#a8a91c"),
    "linformer": Look("Linformer", "#0b6e4f"),
    "linear": Look("linear attention", "#e6ab02"),
    "performer": Look("Performer", "#3b7dd8"),
    "local_window": Look("local, two-sided", "#7fc97f"),
    "reformer": Look("Reformer", "#a6761d"),
    "smyrf": Look("SMYRF", "#5c2a9d"),
}
"""In the order of bars. No chart has both `sdpa` and `sdpa_flash`."""
OTHERS = "#c4169c", "#00796b", "#6b4e00", "#3d5afe"


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """Return the looks of these variants. Others, such as a user's functions, come last and share OTHERS in turn."""
    names = list(names)
    known = {name: look for name, look in LOOKS.items() if name in names}
    unknown = dict.fromkeys(name for name in names if name not in LOOKS)
    return known | {name: Look(name, colour) for name, colour in zip(unknown, cycle(OTHERS), strict=False)}
