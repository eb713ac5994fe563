"""AdamW of many tensors in one launch of a Triton kernel. torch.optim.AdamW is its definition."""
