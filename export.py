"""Write a checkpoint as a Hugging Face GPT-2: python export.py checkpoint=... to=... (see python export.py --help)."""

from pathlib import Path

from conf.cli import launch
from conf.schema import ExportConfig
from data.tokenizers import end_of_text
from errors import UserError
from model.gpt2 import ModelConfig
from model.huggingface import save_pretrained
from trainer import checkpoint


def export(config: ExportConfig) -> None:
    """Writes config.json and model.safetensors, never over another model."""
    folder = Path(config.to)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"to={folder} exists and is not an empty folder; give a new one")
    state = checkpoint.load(config.checkpoint)
    eot = end_of_text(state["tokenizer"])
    with checkpoint.of_this_version(state):
        save_pretrained(ModelConfig(**state["model_config"]), state["model"], folder, eot)
    print(f"step {state['step']} of {config.checkpoint} is now a Hugging Face GPT-2 in {folder}")


if __name__ == "__main__":
    launch(export, "export")
