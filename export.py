"""Write a checkpoint as a Hugging Face GPT-2: python export.py checkpoint=... to=... (see python export.py --help)."""

from pathlib import Path

from safetensors import SafetensorError

from conf.cli import launch
from conf.schema import ExportConfig
from data.tokenizers import end_of_text
from errors import UserError, first_line
from model.attention import NaiveConfig
from model.huggingface import CONFIG, WEIGHTS, save_pretrained
from trainer.checkpoint.load import load
from trainer.loading import model_of, sparsity_setting


def export(config: ExportConfig) -> None:
    """Write config.json and model.safetensors to an empty folder."""
    folder = Path(config.to)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"to={folder} exists and is not an empty folder; give a new one")
    state = load(config.checkpoint)
    model, eot = model_of(state, NaiveConfig()), end_of_text(state["tokenizer"])
    try:
        save_pretrained(model.config, model.state_dict(), folder, eot)
    except (OSError, SafetensorError) as error:
        if folder.is_dir():
            for name in (CONFIG, WEIGHTS):
                (folder / name).unlink(missing_ok=True)
        raise UserError(f"to={folder} cannot be written ({first_line(error)}); make room, or give another") from error
    print(f"step {state['step']} of {config.checkpoint} is now a Hugging Face GPT-2 in {folder}")
    if setting := sparsity_setting(state):
        print(f"it was trained with {setting}, but in Hugging Face's GPT-2 a token sees all tokens before it")


if __name__ == "__main__":
    launch(export, "export")
