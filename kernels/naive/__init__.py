"""Standard attention, with every N x N matrix in memory: its own definition, and the reference of all tests."""
