"""What the `data` group of the configuration holds."""

from dataclasses import dataclass

from errors import UserError

NAMES = ("stdlib", "tokens", "text")


@dataclass
class DataConfig:
    """The corpus: where its token files lie and, where they are made here, what they are made of."""

    name: str
    """stdlib: the running Python's own standard library, tokenized on first use. tokens: token files that exist
    already, nanoGPT's among them. text: files of your own, tokenized once by `python -m data.prepare`."""

    dir: str
    """Folder that holds train.bin, val.bin and meta.json."""

    tokenizer: str
    """byte (UTF-8 bytes, 257 tokens) or gpt2 (GPT-2's BPE, 50257 tokens)."""

    source: str | None = None
    """For name=text: a file, a folder or a glob of .parquet, .jsonl(.gz) or .txt(.gz) files. A parquet row, a JSON
    line and a text file are one document each."""

    text_column: str = "text"
    """Column of the parquet files, or key of the JSON lines, that holds the text."""

    val_fraction: float = 0.01
    """Share of the documents held out for validation, between 0 and 1; for name=stdlib a document is a file."""

    split_seed: int = 2357
    """Seed that decides which documents are held out."""

    def __post_init__(self):
        if self.name not in NAMES:
            raise UserError(f"data.name={self.name} is unknown: choose one of {', '.join(NAMES)}.")
        if not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction={self.val_fraction} leaves a split empty: choose it between 0 and 1.")
