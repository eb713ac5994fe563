"""Score a trained GPT-2 on all validation tokens of a corpus: python evaluate.py checkpoint=... (help: --help)."""

import json

from conf.cli import launch, output_dir
from conf.schema import EvaluateConfig
from data.tokenizers import get_tokenizer
from data.tokens import open_tokens
from errors import UserError
from trainer.build import check_variant
from trainer.distributed.world import refuse_several
from trainer.evaluation import score, window_sizes
from trainer.folders import check_writable, write_text
from trainer.loading import load_model
from trainer.loggers import finite
from trainer.precision import choose_compute


def evaluate(config: EvaluateConfig) -> None:
    """Print loss and perplexity over all validation tokens, and write evaluation.json."""
    refuse_several("evaluate.py")
    compute, folder = choose_compute(config.device, config.precision, trains=False), output_dir()
    check_writable(folder)
    model, tokenizer, origin = load_model(config.checkpoint, config.attention)
    tokens = open_tokens(config.data)
    if tokenizer != tokens.tokenizer:
        raise UserError(
            f"checkpoint={config.checkpoint} was trained on {tokenizer} tokens, but {tokens.dir} holds "
            f"{tokens.tokenizer} tokens; choose the data of its training, or others with data.tokenizer={tokenizer}"
        )
    context, stride = window_sizes(config.context_length, config.stride, model.config.context_length)
    documents = config.data.document_mask
    check_variant(config.attention, model.config, compute, context_length=context, documents=documents)
    sizes, file = {"context": context, "stride": stride, "batch": config.batch_size}, tokens.dir / "val.bin"
    options = {"compute": compute, "document_mask": documents, "name": str(file)}
    result = score(model.to(compute.device), tokens.val, get_tokenizer(tokenizer), **sizes, **options)
    print(
        f"{file}, {origin}, {config.attention.title} attention, {compute}, context {context}, "
        f"stride {stride}:\nloss {result['val/loss']:.4f} nats, perplexity {result['val/perplexity']:.3f} over "
        f"{result['tokens']:,} tokens; {result['val/word_perplexity']:.6g} per word, over {result['words']:,} words"
    )
    row = {"checkpoint": config.checkpoint, "data": str(tokens.dir), "attention": config.attention.name}
    row |= {key: finite(value) for key, value in result.items()} | sizes
    write_text(folder / "evaluation.json", json.dumps(row, indent=2, allow_nan=False) + "\n")
    print(f"outputs in {folder}")


if __name__ == "__main__":
    launch(evaluate, "evaluate")
