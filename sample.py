"""Continue a text with a trained GPT-2: python sample.py checkpoint=... prompt="..." (see python sample.py --help)."""

from pathlib import Path

import torch

from conf.cli import launch
from conf.schema import SampleConfig
from data.tokenizers import get_tokenizer, vocab_size
from errors import UserError
from model.attention import build_attention, check_attention
from model.generate import generate
from model.gpt2 import GPT2, ModelConfig
from model.huggingface import WEIGHTS, find_pretrained, load_pretrained, read_config
from trainer import checkpoint
from trainer.precision import choose_compute


def load_model(config: SampleConfig) -> tuple[GPT2, str]:
    """The model of a checkpoint of ours, or of a Hugging Face folder or hub id, and the name of its tokenizer."""
    attention, source = build_attention(config.attention), Path(config.checkpoint)
    if source.exists() and not (source / WEIGHTS).is_file():
        state = checkpoint.load(source)
        model = GPT2(ModelConfig(**state["model_config"]), attention)
        model.load_state_dict(state["model"])
        return model, state["tokenizer"]
    folder = find_pretrained(config.checkpoint, key="checkpoint")
    shape, known = read_config(folder), vocab_size("gpt2")
    if shape.vocab_size < known:
        raise UserError(
            f"checkpoint={config.checkpoint} knows {shape.vocab_size} tokens, fewer than the {known} of GPT-2's "
            "tokenizer; give a model of that tokenizer, or the run that this one was exported from"
        )
    model = GPT2(shape, attention)
    load_pretrained(model, folder)
    return model, "gpt2"


def sample(config: SampleConfig) -> None:
    """Streams the continuations to stdout."""
    compute = choose_compute(config.device, config.precision)
    model, tokenizer_name = load_model(config)
    tokenizer = get_tokenizer(tokenizer_name)
    shape = model.config
    check_attention(
        config.attention, head_dim=shape.head_dim, dtype=compute.dtype, dropout_p=0.0, device=compute.device
    )
    prompt = tokenizer.encode(config.prompt) or [tokenizer.eot]
    if max(prompt) >= shape.vocab_size:
        raise UserError(
            f"the prompt holds token {max(prompt)}, but checkpoint={config.checkpoint} knows only "
            f"{shape.vocab_size}; give a prompt without it"
        )
    model.to(compute.device).eval()
    generator = torch.Generator().manual_seed(config.seed)
    for number in range(config.num_samples):
        if number:
            print("\n" + "-" * 80)
        print(config.prompt, end="", flush=True)
        decode = tokenizer.stream_decoder()
        with compute.autocast():
            for token in generate(
                model,
                prompt,
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                top_k=config.top_k,
                top_p=config.top_p,
                generator=generator,
                stop=tokenizer.eot,
            ):
                print(decode(token), end="", flush=True)
    print()


if __name__ == "__main__":
    launch(sample, "sample", literal="prompt")
