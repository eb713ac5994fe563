"""What the `data` group of the configuration holds."""

from dataclasses import dataclass

from errors import UserError

NAMES = ("stdlib", "tokens", "text", "openwebtext", "wikitext-2", "wikitext-103", "fineweb-edu-10bt", "tinystories")


@dataclass
class DataConfig:
    """The corpus: where its token files lie and, where they are made here, what they are made of."""

    name: str
    """stdlib: the running Python's own standard library, tokenized on first use. tokens: token files that exist
    already, nanoGPT's among them. The others are tokenized once by `python -m data.prepare`: text is files of your
    own, and the rest are corpora of the Hugging Face hub."""

    dir: str
    """Folder that holds train.bin, val.bin and meta.json."""

    tokenizer: str
    """byte (UTF-8 bytes, 257 tokens) or gpt2 (GPT-2's BPE, 50257 tokens)."""

    source: str | None = None
    """A file, a folder or a glob of .parquet, .jsonl or .txt files, the last two also as .gz or .zst; in place of the
    hub where a corpus of the hub lies on this machine. A parquet row, a JSON line and a text file are one document."""

    text_column: str = "text"
    """Column of the parquet files, or key of the JSON lines, that holds the text."""

    document_start: str | None = None
    """A regular expression: rows (lines of text files) are parts of documents, which begin where it matches."""

    train_files: str = "*"
    """Of the files found, those for train.bin, as a pattern of their names."""

    val_files: str | None = None
    """Those for val.bin; null holds out a share of the documents instead."""

    val_fraction: float = 0.01
    """That share, between 0 and 1; for name=stdlib a document is a file."""

    split_seed: int = 2357
    """Seed that decides which documents are held out."""

    hub_id: str | None = None
    """The dataset on the hub."""

    hub_revision: str | None = None
    """The commit of it that is downloaded."""

    hub_files: str | None = None
    """A pattern of the paths in it."""

    expected_documents: int | None = None
    """How many documents that commit holds."""

    expected_tokens: int | None = None
    """How many tokens of GPT-2's they are, one after each document included."""

    document_mask: bool = False
    """In training and evaluation, documents do not see each other: attention ends where a document begins."""

    workers: int | None = None
    """Threads that tokenize; null for as many as there are cores. The token files do not depend on it."""

    def __post_init__(self):
        if self.name not in NAMES:
            raise UserError(f"data.name={self.name} is unknown: choose one of {', '.join(NAMES)}.")
        if not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction={self.val_fraction} leaves a split empty: choose it between 0 and 1.")
        if self.split_seed < 0:
            raise UserError(f"data.split_seed={self.split_seed} must be at least 0.")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"data.workers={self.workers} must be at least 1, or null for all cores.")
