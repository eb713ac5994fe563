"""The dtype in which operators compute sums and statistics."""

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64, and fp32 for the other dtypes."""
    return torch.promote_types(dtype, torch.float32)
