"""The shape of a classifier of bench.lra."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of a classifier."""

    vocab_size: int
    """Token 0 is padding."""
    classes: int
    context_length: int
    """The longest sequence."""
    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 2
    hidden: int = 128
    """Hidden units of a block's MLP and of the head."""
    pairs: bool = False
    """Whether an example is a pair of documents, as in Retrieval."""

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head
