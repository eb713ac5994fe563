"""The `data` group of the configuration."""

from dataclasses import dataclass

from errors import UserError, check_choice, check_range

NAMES = ("stdlib", "tokens", "text", "openwebtext", "wikitext-2", "wikitext-103", "fineweb-edu-10bt", "tinystories")
HELD_OUT_DOCUMENTS, HELD_OUT_TOKENS = 0.01, 0.1  # what val_fraction=null means
SPLIT_KEYS = ("val_fraction", "split_seed")  # the settings that choose the held-out documents


@dataclass
class DataConfig:
    """The corpus: the folder of its token files and, if they are prepared here, their source."""

    name: str
    """stdlib: the standard library of the Python that first used the folder, tokenized then. tokens: existing token
    files, for example nanoGPT's. text: your own files. The others are corpora of the Hugging Face hub. `python -m
    data.prepare` tokenizes text and hub corpora once."""
    dir: str
    """Folder of train.bin, val.bin and meta.json."""
    tokenizer: str
    """byte (UTF-8 bytes, 257 tokens) or gpt2 (GPT-2's BPE, 50257 tokens)."""
    source: str | None = None
    """A file, a folder or a glob of .parquet, .jsonl or .txt files; .jsonl and .txt also as .gz or .zst. For a hub
    corpus: a copy of its files on this machine. A parquet row, a JSON line and a text file are one document each."""
    text_column: str = "text"
    """Column of the parquet files, or key of the JSON lines, that holds the text."""
    on_bad_row: str = "stop"
    """stop: end at a row that is not text. skip: leave such rows out, count them, and list them in meta.json."""
    document_start: str | None = None
    """A regular expression. If set, rows (lines of text files) are joined to documents; a match begins a document."""
    train_files: str = "*"
    """Pattern for the names of the files that go to train.bin."""
    val_files: str | None = None
    """Pattern for the names of the files that go to val.bin; null holds out a share of the documents instead.
    `val_fraction` must be null if this is set."""
    val_fraction: float | None = None
    """Share of the documents to hold out, between 0 and 1; null is 0.01. With name=stdlib a document is a file. If the
    share is less than one document, or no document falls into it, the last tokens are held out; null is then 0.1."""
    split_seed: int = 2357
    """Seed that chooses the held-out documents."""
    hub_id: str | None = None
    """The dataset on the hub."""
    hub_revision: str | None = None
    """Commit of the dataset to download."""
    hub_files: str | None = None
    """Pattern for the paths of its files."""
    expected_documents: int | None = None
    """Number of documents in that commit."""
    document_mask: bool = False
    """Separate documents in training and evaluation: a token attends only to its own document."""
    workers: int | None = None
    """Threads that tokenize; null for one per core. The token files do not depend on it."""

    def __post_init__(self):
        check_choice("data.name", self.name, NAMES)
        check_choice("data.on_bad_row", self.on_bad_row, ("stop", "skip"))
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction={self.val_fraction} leaves a split empty; set it between 0 and 1")
        check_range("data.split_seed", self.split_seed, 0)
        check_range("data.workers", self.workers, 1)
