"""AdamW of many tensors in one launch of a Triton kernel. What it computes is defined by torch.optim.AdamW."""
