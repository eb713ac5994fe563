"""Loading a trained model: from a checkpoint, or from a Hugging Face folder or hub id."""

from dataclasses import asdict
from pathlib import Path

import torch

from data.tokenizers import vocab_size
from errors import UserError
from model.attention import SPARSE_KEYS, AttentionConfig, BlockSparseConfig, CustomConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from model.huggingface import find_pretrained, is_pretrained, load_pretrained, read_config, with_sizes
from trainer.checkpoint.files import State
from trainer.checkpoint.folder import find
from trainer.checkpoint.load import load, of_this_version, restore_pattern_of
from trainer.distributed.world import ALONE, World, print_in_first
from trainer.layout import shown


def model_of(
    state: State, attention: AttentionConfig, activation_checkpointing: str = "none", fp8: bool = False
) -> GPT2:
    """Return the model of a checkpoint's state."""
    attend = build_attention(attention)
    with of_this_version(state):
        try:
            shape = ModelConfig(**state["model_config"])
        except UserError as error:  # the user did not set these values
            raise ValueError(str(error)) from error
        model = GPT2(shape, attend, activation_checkpointing, fp8)
        model.load_state_dict(state["model"])
    return model


def sparsity(state: State) -> dict[str, object]:
    """Return the attention settings that say which pairs of tokens the model was trained without."""
    with of_this_version(state):
        return _sparse_keys(state["config"]["attention"])


def sparsity_setting(state: State) -> str:
    """Return the settings of `sparsity` as written on a command line."""
    return _written(sparsity(state))


def _sparse_keys(attention: dict[str, object]) -> dict[str, object]:
    return {key: attention[key] for key in SPARSE_KEYS if attention.get(key) is not None}


def _written(sparse_keys: dict[str, object]) -> str:
    return " ".join(f"attention={SPARSE_KEYS[key]} attention.{key}={value}" for key, value in sparse_keys.items())


def _is_sparse_alike(attention: AttentionConfig, state: State) -> bool:
    """Return whether `attention` leaves out the pairs of tokens that the model was trained without."""
    trained = sparsity(state)
    if "pattern" in trained and isinstance(attention, BlockSparseConfig):  # several files can hold the same matrix
        length = state["model_config"]["context_length"]
        own = build_attention(BlockSparseConfig(pattern=trained["pattern"]))
        return torch.equal(build_attention(attention).blocks(length), own.blocks(length))
    return all(getattr(attention, key, None) == value for key, value in trained.items())


def _check_all_pairs(model: GPT2, attention: AttentionConfig, source: str) -> None:
    """Refuse an attention that leaves out pairs of tokens, for a model that was trained with all pairs."""
    length = model.config.context_length
    model.attention.check_length(length)
    if model.attention.kept_share(length) < 1:
        raise UserError(
            f"{_written(_sparse_keys(asdict(attention)))} leaves out pairs of tokens, but checkpoint={source} was "
            "trained with all pairs; set attention=flash2"
        )


def is_checkpoint(source: str) -> bool:
    """Return whether `source` is a checkpoint or a run of this trainer, not a Hugging Face folder or hub id."""
    return find(source) is not None and not is_pretrained(Path(source))


def read_shape(source: str, asked: ModelConfig, tokenizer: str) -> ModelConfig:
    """Return the shape of model.pretrained=`source`, with the context length and dropout of `asked`.

    A checkpoint of this trainer must have been trained on tokens of `tokenizer`.
    """
    if not is_checkpoint(source):
        return read_config(find_pretrained(source), asked)
    state = load(source, key="model.pretrained", whole=False)
    if state["tokenizer"] != tokenizer:
        raise UserError(
            f"model.pretrained={source} was trained on {state['tokenizer']} tokens, not on {tokenizer} tokens; prepare "
            f"the data with data.tokenizer={state['tokenizer']}"
        )
    with of_this_version(state):
        sizes = state["model_config"]
        return with_sizes(asked, sizes, sizes["context_length"], source)


def load_weights(model: GPT2, source: str, world: World = ALONE) -> None:
    """Copy the weights of model.pretrained=`source` into `model`. A shorter context takes the first positions.

    The run `source` may still be saving. All processes then read the checkpoint that the first one finds.
    """
    if not is_checkpoint(source):
        load_pretrained(model, find_pretrained(source))
        return
    state = world.agreed(lambda: load(source, key="model.pretrained", tell=lambda text: None))
    if (path := world.from_first(state["path"])) != state["path"]:
        state = load(path, key="model.pretrained")
    with of_this_version(state):
        positions = state["model"]["wpe.weight"][: model.config.context_length]
        model.load_state_dict(state["model"] | {"wpe.weight": positions})
        print_in_first(f"the weights are from {_origin_of(state)}")


def _origin_of(state: State) -> str:
    """Return a checkpoint's real path and step."""
    return f"{shown(Path(state['path']).resolve())} (step {state['step']})"


def saved_scales(source: str) -> State:
    """Return the FP8 scales of a checkpoint, or {} if it has none."""
    return load(source, whole=False).get("fp8_scales", {}) if is_checkpoint(source) else {}


def load_model(
    source: str,
    attention: AttentionConfig,
    activation_checkpointing: str = "none",
    any_pairs: bool = False,
    fp8: bool = False,
) -> tuple[GPT2, str, str]:
    """Return the model of a checkpoint, a Hugging Face folder or a hub id, the name of its tokenizer, and its origin.

    The origin is a text with the checkpoint's real path and step, because `source` can be a link or a run's folder.
    Unless `any_pairs`, refuse an `attention` that leaves out other pairs of tokens than the attention of the training.
    A Hugging Face model does not say how it was trained, and nobody knows which pairs a custom function left out.
    """
    path = Path(source)
    if path.exists() and not is_pretrained(path):
        state = load(path)
        restore_pattern_of(state)
        if not any_pairs and not _is_sparse_alike(attention, state):
            raise UserError(
                f"checkpoint={source} was trained with {sparsity_setting(state)}, but attention={attention.name} "
                f"leaves out other pairs of tokens, or none; set {sparsity_setting(state)}"
            )
        model = model_of(state, attention, activation_checkpointing, fp8)
        if not (any_pairs or sparsity(state) or state["config"]["attention"]["name"] == CustomConfig.name):
            _check_all_pairs(model, attention, source)
        return model, state["tokenizer"], _origin_of(state)
    folder = find_pretrained(source, key="checkpoint")
    shape, known = read_config(folder), vocab_size("gpt2")
    if shape.vocab_size < known:
        raise UserError(
            f"checkpoint={source} knows {shape.vocab_size} tokens, fewer than the {known} of GPT-2's tokenizer; give a "
            "model with GPT-2's vocabulary, or the run that exported this model"
        )
    model = GPT2(shape, build_attention(attention), activation_checkpointing, fp8)
    load_pretrained(model, folder)
    return model, "gpt2", source
