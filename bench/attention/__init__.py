"""python -m bench.attention: attention kernels side by side."""
