"""A trained model from wherever it lies."""

from os.path import realpath
from pathlib import Path

from data.tokenizers import vocab_size
from errors import UserError
from model.attention import SPARSE_KEYS, AttentionConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from model.huggingface import WEIGHTS, find_pretrained, load_pretrained, read_config
from trainer import checkpoint
from trainer.checkpoint import State


def model_of(state: State, attention: AttentionConfig, activation_checkpointing: str = "none") -> GPT2:
    """The model of a checkpoint's state.

    Raises:
        CheckpointError: it is not of this version of the trainer.
    """
    attend = build_attention(attention)
    with checkpoint.of_this_version(state):
        try:
            shape = ModelConfig(**state["model_config"])
        except UserError as error:  # of settings that nobody has set here
            raise ValueError(str(error)) from error
        model = GPT2(shape, attend, activation_checkpointing)
        model.load_state_dict(state["model"])
    return model


def sparsity(state: State) -> dict[str, object]:
    """What said which pairs of tokens a model was trained without, of the settings of its attention; often nothing.

    Raises:
        CheckpointError: as model_of.
    """
    with checkpoint.of_this_version(state):
        trained = state["config"]["attention"]
        return {key: trained[key] for key in SPARSE_KEYS if trained[key] is not None}


def sparsity_setting(state: State) -> str:
    """The same as on a command line."""
    return " ".join(f"attention={SPARSE_KEYS[key]} attention.{key}={value}" for key, value in sparsity(state).items())


def load_model(
    source: str, attention: AttentionConfig, activation_checkpointing: str = "none", any_pairs: bool = False
) -> tuple[GPT2, str]:
    """The model of a checkpoint of ours, or of a Hugging Face folder or hub id, and the name of its tokenizer.

    Raises:
        UserError: there is none, it is broken, or it is no GPT-2 of that tokenizer; or, but for `any_pairs`, it was
            trained with an attention that leaves pairs of tokens out, and this one leaves out others or none.
    """
    path = Path(source)
    if path.exists() and not (path / WEIGHTS).is_file():
        state = checkpoint.load(path)
        given = ((str(value), str(getattr(attention, key))) for key, value in sparsity(state).items())
        if not any_pairs and any(realpath(then) != realpath(now) for then, now in given):  # a file has several paths
            raise UserError(
                f"checkpoint={source} was trained with {sparsity_setting(state)}, and this attention={attention.name} "
                "leaves out other pairs of tokens, or none; give the former"
            )
        return model_of(state, attention, activation_checkpointing), state["tokenizer"]
    folder = find_pretrained(source, key="checkpoint")
    shape, known = read_config(folder), vocab_size("gpt2")
    if shape.vocab_size < known:
        raise UserError(
            f"checkpoint={source} knows {shape.vocab_size} tokens, fewer than the {known} of GPT-2's "
            "tokenizer; give a model of that tokenizer, or the run that this one was exported from"
        )
    model = GPT2(shape, build_attention(attention), activation_checkpointing)
    load_pretrained(model, folder)
    return model, "gpt2"
