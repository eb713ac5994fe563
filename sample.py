"""Continue a text with a trained GPT-2: python sample.py checkpoint=... prompt="..." (see python sample.py --help)."""

import sys

import torch

from conf.cli import launch
from conf.schema import SampleConfig
from data.tokenizers import get_tokenizer
from errors import UserError
from model.generate import generate
from trainer.build import check_variant
from trainer.distributed.world import refuse_several
from trainer.loading import load_model
from trainer.precision import choose_compute


def sample(config: SampleConfig) -> None:
    """Print the continuations while they are generated."""
    refuse_several("sample.py")
    compute = choose_compute(config.device, config.precision, trains=False)
    model, tokenizer_name, origin = load_model(config.checkpoint, config.attention)
    tokenizer = get_tokenizer(tokenizer_name)
    shape = model.config
    check_variant(config.attention, shape, compute, sampling=True)
    prompt = tokenizer.encode(config.prompt) or [tokenizer.eot]
    if max(prompt) >= shape.vocab_size:
        raise UserError(
            f"prompt holds token {max(prompt)}, but checkpoint={config.checkpoint} has a vocabulary of "
            f"{shape.vocab_size}; give a prompt without that token"
        )
    model.to(compute.device).eval()
    options = {key: getattr(config, key) for key in ("max_tokens", "temperature", "top_k", "top_p")}
    options |= {"generator": torch.Generator().manual_seed(config.seed)}
    options |= {"stop": tokenizer.eot, "vocab_size": tokenizer.vocab_size}
    print(f"using {origin}", file=sys.stderr)  # stdout has only the text
    for number in range(config.num_samples):
        if number:
            print("\n" + "-" * 80)
        print(config.prompt, end="", flush=True)
        decode = tokenizer.stream_decoder()
        with compute.autocast():
            for token in generate(model, prompt, **options):
                print(decode(token), end="", flush=True)
    print()


if __name__ == "__main__":
    launch(sample, "sample", literal="prompt")
