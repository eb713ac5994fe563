"""GPT-2 weights from and to Hugging Face's `GPT2LMHeadModel`.

Hugging Face's names have the prefix `transformer.`, its linear layers store transposed weights (Conv1D), and its
vocabulary is not padded.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from errors import UserError, described
from model.gpt2 import GPT2, ModelConfig

# The options of a GPT-2 configuration that model/gpt2.py implements; the first value is the default.
REQUIRED = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
SIZES = ("n_layer", "n_head", "n_embd", "vocab_size")
IGNORED = (".attn.bias", ".attn.masked_bias", "lm_head.weight")  # masks in old releases, and the tied head
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
WEIGHTS, CONFIG = "model.safetensors", "config.json"
FORMATS = WEIGHTS, f"{WEIGHTS}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"
"""Files that hold the weights, or that list the files which hold them. The first one in a folder counts."""
PLACES = "a run's folder, a step-*.pt file, a folder saved by save_pretrained"


def is_pretrained(path: Path) -> bool:
    """Return whether a file or folder is meant as Hugging Face's, even if it is incomplete."""
    return path.name in FORMATS or (path / CONFIG).is_file() or _weights_of(path) is not None


def _weights_of(folder: Path) -> Path | None:
    return next((folder / name for name in FORMATS if (folder / name).is_file()), None)


def find_pretrained(source: str, key: str = "model.pretrained") -> Path:
    """Return the folder of config.json and the weights: `source` itself, or a download of that hub id.

    `key` is the setting that messages name.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        is_path = source.startswith(("/", ".", "~")) or source.endswith(".pt") or source.count("/") > 1
        if folder.exists() or is_path:  # not a hub id
            problem = "is not a folder" if folder.exists() else "does not exist"
            raise UserError(f"{key}={source} {problem}; give {PLACES}, or a hub id")
        if "/" in source and folder.parent.is_dir():  # also the form of a hub id, but outputs/lastest is a slip
            raise UserError(
                f"{key}={source} does not exist in the folder {folder.parent}; give {PLACES}, or for a hub id start in "
                f"a folder without {folder.parent}"
            )
        from huggingface_hub import snapshot_download  # slow to import

        try:
            for weights in ("model*.safetensors*", "pytorch_model*"):
                folder = Path(snapshot_download(source, allow_patterns=[CONFIG, weights], etag_timeout=10))
                if _weights_of(folder):
                    break
        except Exception as error:  # the hub's client raises a dozen types
            raise UserError(
                f"{key}={source} is not a folder, and the hub did not give such a model ({type(error).__name__}); "
                f"check the name and the network, or give {PLACES}"
            ) from error
    if not (folder / CONFIG).is_file():
        raise UserError(f"{key}={source} has no {CONFIG}; give a folder saved by save_pretrained")
    if _weights_of(folder) is None:
        raise UserError(
            f"{key}={source} has no {WEIGHTS} or pytorch_model.bin, in one file or in shards; load the model with "
            "transformers and save it with save_pretrained"
        )
    return folder


def read_config(folder: Path, model: ModelConfig | None = None) -> ModelConfig:
    """Return the shape of a pretrained GPT-2, with the context length and dropout of `model` if given."""
    path = folder / CONFIG
    try:
        config = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not a readable configuration ({error}); download or export it again") from error
    for key, accepted in REQUIRED.items():
        if config.get(key, accepted[0]) not in accepted:
            raise UserError(f"{path} has {key}={config[key]}, not GPT-2's {accepted[0]}; give a plain GPT-2")
    if missing := [key for key in ("model_type", "n_positions", *SIZES) if key not in config]:
        raise UserError(f"{path} lacks {missing[0]}; give the configuration of a GPT2LMHeadModel")
    if wrong := [key for key in ("n_positions", *SIZES) if not isinstance(config[key], int)]:
        raise UserError(f"{path} has {wrong[0]}={config[wrong[0]]}, not a number; download or export it again")
    longest = config["n_positions"]
    return with_sizes(model or ModelConfig(context_length=longest), config, longest, folder)


def with_sizes(model: ModelConfig, sizes: Mapping, longest: int, source: str | Path) -> ModelConfig:
    """Return `model` with the sizes of model.pretrained=`source`, which has `longest` positions."""
    if model.context_length > longest:
        raise UserError(
            f"model.context_length={model.context_length} exceeds the {longest} positions of "
            f"model.pretrained={source}; set model.context_length={longest} or less"
        )
    kv_heads = sizes.get("n_kv_head")  # null, or not there in Hugging Face's GPT-2: n_head
    if model.n_kv_head not in (None, found := kv_heads or sizes["n_head"]):
        raise UserError(
            f"model.n_kv_head={model.n_kv_head} contradicts the {found} key heads of model.pretrained={source}; leave "
            "model.n_kv_head out"
        )
    return replace(model, n_kv_head=kv_heads, **{key: sizes[key] for key in SIZES})


def load_pretrained(model: GPT2, folder: Path) -> None:
    """Copy Hugging Face's weights into `model`, whose shape comes from read_config.

    A shorter context takes the first positions. The padding of the token table is zero.
    """
    weights = {
        name.removeprefix("transformer."): weight.T if name.endswith(TRANSPOSED) else weight
        for name, weight in _read_weights(folder).items()
        if not name.endswith(IGNORED)
    }
    shape = model.config
    if {"wpe.weight", "wte.weight"} <= weights.keys():
        weights["wpe.weight"] = weights["wpe.weight"][: shape.context_length]
        weights["wte.weight"] = pad(weights["wte.weight"], (0, 0, 0, shape.padded_vocab_size - shape.vocab_size))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        difference = str(error).splitlines()[1].strip()
        raise UserError(
            f"{_weights_of(folder)} is not the GPT-2 that {CONFIG} describes ({difference}); give a complete folder"
        ) from error


def _read_weights(folder: Path) -> dict[str, Tensor]:
    path, weights = _weights_of(folder), {}
    try:
        files = [path]
        if path.suffix == ".json":
            files = [folder / name for name in sorted(set(json.loads(path.read_text())["weight_map"].values()))]
        for path in files:
            is_pickle = path.suffix != ".safetensors"
            weights |= torch.load(path, map_location="cpu", weights_only=True) if is_pickle else load_file(path)
    except Exception as error:  # a foreign file raises anything from KeyError to UnpicklingError
        why = described(error).partition(". ")[0]  # the other sentences of torch.load advise to run foreign code
        raise UserError(f"{path} is broken ({why}); download or export it again") from error
    return weights


def save_pretrained(config: ModelConfig, weights: dict[str, Tensor], folder: Path, eot: int) -> None:
    """Write what GPT2LMHeadModel.from_pretrained reads, for generate() too; `eot` is the end-of-text token."""
    if config.groups > 1:
        raise UserError(
            f"model.n_kv_head={config.n_kv_head} is below model.n_head={config.n_head}, which Hugging Face's GPT-2 "
            "cannot hold; use sample.py and evaluate.py, or train with model.n_kv_head=null"
        )
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights | {"wte.weight": weights["wte.weight"][: config.vocab_size]}
    weights = {
        f"transformer.{name}": (weight.T if name.endswith(TRANSPOSED) else weight).contiguous().cpu()
        for name, weight in weights.items()
    }
    description = {"architectures": ["GPT2LMHeadModel"]} | {key: accepted[0] for key, accepted in REQUIRED.items()}
    description |= {key: getattr(config, key) for key in SIZES}
    description |= {"n_positions": config.context_length, "bos_token_id": eot, "eos_token_id": eot}
    description |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), config.dropout)
    _write_json(folder / CONFIG, description)
    _write_json(folder / "generation_config.json", dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), eot))
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors ignores the umask: only the owner could read it


def save_tokenizer(tokens: list[bytes], eot: int, context_length: int, folder: Path) -> None:
    """Write a byte-level BPE as AutoTokenizer.from_pretrained reads it.

    `tokens` are the bytes of all tokens: first the single bytes, then the others in the order of BPE's merges. `eot` is
    the end-of-text token, whose bytes do not matter.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    ranks = {token: i for i, token in enumerate(tokens) if i != eot}
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = (" ".join(names[part] for part in _last_merge(token, ranks)) for token in ranks if len(token) > 1)
    special = "<|endoftext|>"
    _write_json(folder / "vocab.json", {names[token]: i for token, i in ranks.items()} | {special: eot})
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "model_max_length": context_length}
    settings |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), special)
    _write_json(folder / "tokenizer_config.json", settings)


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two tokens that BPE merges last into `token`."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [first + second for first, second in pairwise(parts)]
        i = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
        parts[i : i + 2] = [pairs[i]]
    return parts


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
