"""Attention kernels, each beside the plain PyTorch algorithm that defines it."""
