"""GPT-2 weights from and to Hugging Face's `GPT2LMHeadModel`.

The names are the same but for the prefix `transformer.`; Hugging Face keeps the weights of linear layers transposed
(its Conv1D), and its vocabulary is not padded.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from errors import UserError
from model.gpt2 import GPT2, ModelConfig

# What makes a GPT-2 the one of this project, where a configuration may say otherwise.
REQUIRED = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
SIZES = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size")
IGNORED = ("attn.bias", "attn.masked_bias", "lm_head.weight")  # masks of old releases, and the tied head
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def find_pretrained(source: str, key: str = "model.pretrained") -> Path:
    """The folder that holds config.json and model.safetensors: `source` itself, or a download of that hub id.

    `key` names the setting in messages.

    Raises:
        UserError: there is neither such a folder nor such a hub repository in reach.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if source.startswith(("/", ".", "~")):  # as no hub id does
            problem = "is no folder" if folder.exists() else "does not exist"
            raise UserError(f"{key}={source} {problem}; give a folder saved by save_pretrained, or a hub id")
        folder = _download(source, key)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{key}={source} holds no {name}; give a folder saved by save_pretrained")
    return folder


def _download(hub_id: str, key: str) -> Path:
    from huggingface_hub import snapshot_download  # not needed, and slow to import, where weights are local

    try:
        return Path(snapshot_download(hub_id, allow_patterns=[CONFIG, WEIGHTS], etag_timeout=10))
    except Exception as error:  # the hub client raises a dozen types for a bad name or no network
        raise UserError(
            f"{key}={hub_id} is no folder, and the hub gave no such model "
            f"({type(error).__name__}); check the name and the network, or give a folder saved by save_pretrained"
        ) from error


def read_config(folder: Path, model: ModelConfig | None = None) -> ModelConfig:
    """The shape of a pretrained GPT-2, with the context length and dropout of `model` where that is given.

    Raises:
        UserError: it is no GPT-2, or its position table is shorter than model.context_length.
    """
    config = _read_json(folder / CONFIG)
    if model is not None and model.context_length > config["n_positions"]:
        raise UserError(
            f"model.context_length={model.context_length} is longer than the {config['n_positions']} positions of "
            f"model.pretrained={folder}; set model.context_length={config['n_positions']} or less"
        )
    chosen = model or ModelConfig(context_length=config["n_positions"])
    return ModelConfig(
        n_layer=config["n_layer"],
        n_head=config["n_head"],
        n_embd=config["n_embd"],
        vocab_size=config["vocab_size"],
        context_length=chosen.context_length,
        dropout=chosen.dropout,
        pretrained=chosen.pretrained,
    )


def _read_json(path: Path) -> dict:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is no readable configuration ({error}); download or export it again") from error
    for key, accepted in REQUIRED.items():
        if config.get(key, accepted[0]) not in accepted:
            raise UserError(f"{path} has {key}={config[key]}, not GPT-2's {accepted[0]}; give a plain GPT-2")
    missing = [key for key in ("model_type", *SIZES) if key not in config]
    if missing:
        raise UserError(f"{path} lacks {missing[0]}; give the configuration of a GPT2LMHeadModel")
    return config


def load_pretrained(model: GPT2, folder: Path) -> None:
    """Copies Hugging Face's weights into `model`, whose shape read_config gave; fewer positions take the first ones.

    Raises:
        UserError: the file is broken, or holds other weights than a GPT-2 of that shape.
    """
    try:
        weights = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise UserError(f"{folder / WEIGHTS} is broken ({error}); download or export it again") from error
    weights = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    parameters = dict(model.named_parameters())
    strange = sorted(name for name in weights.keys() - parameters.keys() if not name.endswith(IGNORED))
    missing = sorted(parameters.keys() - weights.keys())
    if strange or missing:
        difference = f"lacks {missing[0]}" if missing else f"also holds {strange[0]}"
        raise UserError(
            f"{folder / WEIGHTS} {difference}: it is not the GPT-2 that {CONFIG} describes; give a whole one"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            weight = weights[name].T if name.endswith(TRANSPOSED) else weights[name]
            rows, weight = _true_rows(model, name, parameter, weight)
            if rows.shape != weight.shape:
                raise UserError(
                    f"{folder / WEIGHTS} holds {name} of shape {tuple(weight.shape)} where {CONFIG} asks for "
                    f"{tuple(rows.shape)}; the two files do not belong together"
                )
            rows.copy_(weight)


def _true_rows(model: GPT2, name: str, parameter: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a parameter that a weight fills, and those of the weight that fill it."""
    if name == "wte.weight":
        parameter.zero_()  # the padding
        return parameter[: model.config.vocab_size], weight
    if name == "wpe.weight":
        return parameter, weight[: len(parameter)]
    return parameter, weight


def save_pretrained(config: ModelConfig, weights: dict[str, Tensor], folder: Path, eot: int) -> None:
    """Writes config.json and model.safetensors that GPT2LMHeadModel.from_pretrained opens; `eot` ends a text."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(weights, **{"wte.weight": weights["wte.weight"][: config.vocab_size]})
    weights = {
        f"transformer.{name}": (weight.T if name.endswith(TRANSPOSED) else weight).contiguous().cpu()
        for name, weight in weights.items()
    }
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    description = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_positions": config.context_length,
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "tie_word_embeddings": True,
    }
    (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n")
