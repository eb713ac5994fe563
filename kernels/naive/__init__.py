"""Standard attention, with every N x N matrix in memory."""
