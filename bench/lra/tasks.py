"""The tasks of Long Range Arena, and how Xiong et al. train on them.

Sizes of the tasks: Tay et al., Long Range Arena (arXiv 2011.04006), and its code.
Batch sizes, steps and learning rates: lra_config.py of Xiong et al., Nystromformer (arXiv 2102.03902). That file has no
Path-X and no Path-256. Their batch sizes, steps and learning rates come from Long Range Arena's own code for images of
128 and 256 pixels.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A task: its sequences, its examples, and how a model trains on it."""

    name: str
    vocab_size: int
    """Rows of the embedding. Token 0 is padding."""
    classes: int
    context_length: int
    """Tokens of the longest sequence. Shorter ones are padded."""
    batch_size: int
    """Examples of a step. With `pairs`, a step has two sequences per example."""
    steps: int
    warmup_steps: int
    examples: dict[str, int]
    """Examples of the splits train, val and test."""
    learning_rate: float = 1e-4
    """Peak learning rate, at the end of the warm-up."""
    pairs: bool = False
    """Whether an example is two documents."""

    @property
    def padded_length(self) -> int:
        """The next power of two. Xiong et al. pad sequences to this length."""
        return 1 << (self.context_length - 1).bit_length()

    @property
    def image_size(self) -> int:
        """Pixels of a side of the images. Only for tasks whose tokens are the pixels of a square image."""
        return round(self.context_length**0.5)


def _splits(train: int, val: int, test: int) -> dict[str, int]:
    return {"train": train, "val": val, "test": test}


_DIGITS = {"vocab_size": 32, "classes": 10, "context_length": 2_000}
_BYTES = {"vocab_size": 512, "classes": 2, "context_length": 4_000}
_PAIRS = _BYTES | {"examples": _splits(147_086, 18_090, 17_437), "pairs": True}
_PIXELS = {"vocab_size": 512, "classes": 10, "context_length": 1_024}
_PATHS = {"vocab_size": 512, "classes": 2, "examples": _splits(160_000, 20_000, 20_000)}
_LONG_PATHS = _PATHS | {"steps": 500_000, "learning_rate": 1e-3}
_LIST = (
    Task("listops", **_DIGITS, batch_size=32, steps=5_000, warmup_steps=1_000, examples=_splits(96_000, 2_000, 2_000)),
    Task("text", **_BYTES, batch_size=32, steps=20_000, warmup_steps=8_000, examples=_splits(25_000, 25_000, 25_000)),
    Task("retrieval", **_PAIRS, batch_size=32, steps=30_000, warmup_steps=800),
    Task("image", **_PIXELS, batch_size=256, steps=35_000, warmup_steps=175, examples=_splits(45_000, 5_000, 10_000)),
    Task("pathfinder", **_PATHS, context_length=32**2, batch_size=256, steps=62_400, warmup_steps=312),
    Task("path_x", **_LONG_PATHS, context_length=128**2, batch_size=64, warmup_steps=2_500),
    Task("path_256", **_LONG_PATHS, context_length=256**2, batch_size=32, warmup_steps=5_000),
)
TASKS = {task.name: task for task in _LIST}
TABLE_3 = ("listops", "text", "retrieval", "image", "pathfinder")
"""The tasks of Table 3 of FlashAttention. Text has the same examples in val and test, as in Long Range Arena."""
