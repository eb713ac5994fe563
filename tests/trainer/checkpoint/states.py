"""States that the tests of checkpoints save."""

import torch


def small(step: int = 1, **more) -> dict:
    """Return a state that `load` accepts, without a model."""
    return {"model": {"w": torch.arange(1000.0)}, "model_config": {}, "tokenizer": "byte", "step": step} | more
