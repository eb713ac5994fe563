"""What token files hold: python -m data.inspect data=openwebtext

Prints counts, lengths of documents and the first documents as text, verifies the checksums of meta.json, and draws a
histogram of the lengths into the folder of the token files.
"""

if __name__ == "__main__":
    from errors import before_imports

    before_imports()

from collections.abc import Callable
from pathlib import Path

import numpy as np

from data.config import DataConfig
from data.tokenizers import Tokenizer, get_tokenizer
from data.tokens import SPLITS, checksum, open_tokens, read_meta
from errors import UserError

CHUNK = 2**24  # tokens looked at at a time
SHOWN_DOCUMENTS, SHOWN_TOKENS = 3, 100
QUANTILES = 0.01, 0.25, 0.5, 0.75, 0.99


def inspect(config: DataConfig, *, log: Callable[[str], None] = print) -> None:
    """Log what `config.dir` holds, and draw lengths.png there.

    Raises UserError where there are no token files, and where their checksums are not those of meta.json.
    """
    tokens = open_tokens(config)
    tokenizer = get_tokenizer(tokens.tokenizer)
    verdicts = _verify(tokens.dir)
    lengths = {split: document_lengths(getattr(tokens, split), tokenizer.eot) for split in SPLITS}
    for split in SPLITS:
        log(f"{split}.bin: {_describe(getattr(tokens, split), lengths[split])}; {verdicts[split]}")
    for number, text in enumerate(first_documents(tokens.train, tokenizer), start=1):
        log(f"document {number} of train.bin: {text}")
    picture = tokens.dir / "lengths.png"
    _draw(lengths, picture, config.name)
    log(f"lengths of documents drawn in {picture}")


def document_lengths(tokens: np.ndarray, eot: int) -> np.ndarray:
    """Tokens of each document, its end of text included; what follows the last end of text is a document too."""
    ends = [np.flatnonzero(tokens[i : i + CHUNK] == eot) + i + 1 for i in range(0, len(tokens), CHUNK)]
    bounds = np.concatenate([[0], *ends, [len(tokens)]])
    lengths = np.diff(bounds)
    return lengths if lengths[-1] else lengths[:-1]


def first_documents(tokens: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """The beginnings of the first documents as text, as Python would quote them."""
    texts, start = [], 0
    while start < len(tokens) and len(texts) < SHOWN_DOCUMENTS:
        ends = np.flatnonzero(tokens[start : start + CHUNK] == tokenizer.eot)
        length = int(ends[0]) if len(ends) else len(tokens[start : start + CHUNK])
        shown = tokens[start : start + min(length, SHOWN_TOKENS)].tolist()
        if shown and max(shown) >= tokenizer.vocab_size:
            raise UserError(
                f"Document {len(texts) + 1} holds the token {max(shown)}, which the {tokenizer.name} tokenizer lacks: "
                "set the data.tokenizer that the files were made with, or prepare them again."
            )
        texts.append(repr(tokenizer.decode(shown)) + (" ..." if length > SHOWN_TOKENS else ""))
        start += length + 1
    return texts


def _verify(folder: Path) -> dict[str, str]:
    meta = read_meta(folder)
    if meta is None or "sha256" not in meta:
        return dict.fromkeys(SPLITS, "no meta.json with checksums")
    for split in SPLITS:
        path = folder / f"{split}.bin"
        found, promised = checksum(path), meta["sha256"][path.name]
        if found != promised:
            raise UserError(
                f"{path} has the SHA-256 {found[:16]}..., but its meta.json promises {promised[:16]}...: it was "
                "damaged or changed since; prepare it again."
            )
    return dict.fromkeys(SPLITS, "SHA-256 as in meta.json")


def _describe(tokens: np.ndarray, lengths: np.ndarray) -> str:
    values = np.quantile(lengths, QUANTILES).round().astype(int)
    quantiles = ", ".join(f"{quantile:.0%} {value:,}" for quantile, value in zip(QUANTILES, values, strict=True))
    return (
        f"{len(tokens):,} tokens in {len(lengths):,} documents of {lengths.mean():,.0f} tokens on average "
        f"({quantiles}, longest {lengths.max():,})"
    )


def _draw(lengths: dict[str, np.ndarray], picture: Path, name: str) -> None:
    import matplotlib

    matplotlib.use("agg")  # draws without a screen
    import matplotlib.pyplot as plt

    longest = max(int(values.max()) for values in lengths.values())
    bins = np.geomspace(1, longest + 1, 60)
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for split, values in lengths.items():
        axes.hist(values, bins=bins, weights=np.full(len(values), 100 / len(values)), histtype="step", label=split)
    axes.set(xscale="log", xlabel="tokens of a document", ylabel="% of the documents", title=name)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    from conf.cli import launch  # the command line knows this package, not the other way round

    launch(lambda config: inspect(config.data), "inspect")
