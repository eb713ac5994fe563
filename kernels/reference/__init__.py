"""The papers' algorithms, line by line. `python -m kernels.reference` walks through a small example."""
