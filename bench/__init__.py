"""Benchmarks. bench/results/<gpu>/ holds their measurements."""
