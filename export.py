"""Write a checkpoint as a Hugging Face GPT-2: python export.py checkpoint=... to=... (see python export.py --help)."""

from pathlib import Path

from safetensors import SafetensorError

from conf.cli import launch
from conf.schema import ExportConfig
from data.tokenizers import get_tokenizer
from errors import UserError, first_line
from model.attention import NaiveConfig
from model.huggingface import save_pretrained, save_tokenizer
from trainer.checkpoint.load import load
from trainer.distributed.world import refuse_several
from trainer.loading import model_of, sparsity_setting


def export(config: ExportConfig) -> None:
    """Write the model and its tokenizer to an empty folder."""
    refuse_several("export.py")
    folder = Path(config.to)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"to={folder} exists and is not an empty folder; give a new one")
    state = load(config.checkpoint)
    model, tokenizer = model_of(state, NaiveConfig()), get_tokenizer(state["tokenizer"])
    sparsity = sparsity_setting(state)
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    try:
        save_pretrained(model.config, model.state_dict(), folder, tokenizer.eot)
        save_tokenizer(tokens, tokenizer.eot, model.config.context_length, folder)
    except (OSError, SafetensorError) as error:
        for path in folder.iterdir() if folder.is_dir() else ():
            path.unlink()
        raise UserError(f"to={folder} cannot be written ({first_line(error)}); make room, or give another") from error
    print(f"step {state['step']} of {config.checkpoint} is now a Hugging Face GPT-2 in {folder}, with its tokenizer")
    if sparsity:
        print(f"it was trained with {sparsity}, but in Hugging Face's GPT-2 a token sees all tokens before it")


if __name__ == "__main__":
    launch(export, "export")
