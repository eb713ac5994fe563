"""Building blocks of the warp-specialised Gluon kernels for Hopper."""
