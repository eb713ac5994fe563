"""The algorithms of the papers, line by line, to be read: python -m kernels.reference walks through a small example."""
