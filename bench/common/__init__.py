"""Parts that several benchmarks share: command line, results files, timing."""
