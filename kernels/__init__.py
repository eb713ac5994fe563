"""GPU kernels for attention and for the other expensive parts of a training step.

An operator's folder holds definition.py (the algorithm in plain PyTorch), op.py (the PyTorch operator), launch.py (the
choice of a kernel), triton_kernels.py and hopper.py (the kernels). `common` and `hopper` hold shared parts. `reference`
holds the papers' algorithms, line by line, and `ladder` holds kernels for teaching.
"""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns if it is unset, and 3.10 will change it to 0.
