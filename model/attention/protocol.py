"""The protocol of attention variants: a config dataclass builds a small callable object."""

from dataclasses import dataclass, fields

from omegaconf import MISSING
from torch import Tensor

from errors import UserError, first_line
from model.linear import Linear


class Attention:
    """An attention variant. Subclasses define the call and override what differs from the defaults here."""

    keywords: frozenset[str] = frozenset({"causal", "scale", "dropout_p", "cu_seqlens"})
    """The options that a call accepts."""
    fullgraph = True
    """Whether torch.compile(fullgraph=True) can trace the call."""
    runs_on_cpu = True
    """Whether forward and backward run on a CPU."""
    refusals: tuple[type[Exception], ...] = (ValueError, RuntimeError)
    """The exceptions that a call raises if it cannot do what it is asked."""
    remedy = "choose another attention"
    """The advice to the user after a refusal."""
    matrix: Tensor | None = None
    """The matrix that the variant reads from a file, if any. Checkpoints store it."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        dropout_p: float = 0.0,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Return softmax(q k^T scale) v, (batch, seq_q, heads, head_dim).

        q is (batch, seq_q, heads, head_dim), k and v are (batch, seq_k, kv_heads, head_dim). All three may be strided
        views of one packed projection. cu_seqlens (n + 1,) int32 are the cumulative lengths of documents. The sequences
        of the batch are laid end to end, and each document attends to itself alone (see kernels.flash2). Documents may
        be empty: training always passes batch * seq + 1 entries, and the last ones repeat the number of tokens.

        Raises:
            ValueError: the variant cannot do what it is asked. The message names a variant that can.
        """
        raise NotImplementedError

    def projected(self, x: Tensor, projection: Linear, heads: int, kv_heads: int, **options) -> Tensor:
        """Project x (batch, seq, C) to q, k and v, and return their attention (batch, seq, heads, head_dim)."""
        return self(*split_projection(projection.product(x, projection.bias), heads, kv_heads), **options)

    def kept_share(self, seq_len: int) -> float:
        """Return the share of the causal pairs of seq_len tokens that the variant computes."""
        return 1.0

    def check_length(self, context_length: int) -> None:
        """Raise a UserError if the variant cannot run sequences of context_length tokens."""

    def check_results(self, q: Tensor, k: Tensor, v: Tensor, **options) -> None:
        """Raise a ValueError if an example has wrong results. The variants of this repository have tests instead."""

    def explain(self, error: Exception) -> str:
        """Return in a few words why a call failed."""
        return first_line(error)


def kind_of(output: object) -> str:
    """Return the shape and the dtype of a tensor as text, or the type of any other object."""
    return f"{tuple(output.shape)} {output.dtype}" if isinstance(output, Tensor) else f"a {type(output).__name__}"


def split_projection(projected: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (batch, seq, heads, head_dim), k and v (batch, seq, kv_heads, head_dim) as views of a projection."""
    sizes = heads, kv_heads, kv_heads
    return projected.unflatten(2, (sum(sizes), -1)).split(sizes, dim=2)


@dataclass
class AttentionConfig:
    """Which attention, and its settings (group `attention`). Each variant has a subclass with its own settings."""

    name: str = MISSING
    """The variant. Choose it with attention=NAME."""

    def __post_init__(self):
        expected = type(self).name
        if self.name != expected:
            raise UserError(
                f"attention.name={self.name} contradicts attention={expected}; choose a variant with attention=NAME"
            )

    def __str__(self) -> str:
        """Return the variant and the settings that differ from their defaults, as the command line has them."""
        text = f"attention={self.name}"
        for field in fields(self):
            if (value := getattr(self, field.name)) != field.default:
                text += f" attention.{field.name}={str(value).lower() if isinstance(value, bool) else value}"
        return text

    @property
    def title(self) -> str:
        """The variant, and in brackets the setting that decides what is computed or which kernel runs, if any."""
        return f"{self.name} ({self.detail})" if self.detail else self.name

    @property
    def detail(self) -> str:
        """The text in the brackets of `title`."""
        return ""

    def build(self) -> Attention:
        """Return the variant with these settings."""
        raise NotImplementedError
