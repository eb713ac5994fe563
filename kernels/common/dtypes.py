"""The dtype of the sums and statistics that operators compute."""

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64, and fp32 for the other dtypes."""
    return torch.promote_types(dtype, torch.float32)
