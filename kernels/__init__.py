"""GPU kernels, each beside the plain PyTorch algorithm that defines it: attention, and what a step spends most on."""
