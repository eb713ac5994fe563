"""flash2's kernels on AMD GPUs, from their machine code and from rocprof's counters. See __main__.py."""
