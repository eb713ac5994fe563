"""Benchmarks; what they measured lies in bench/results/<gpu>/."""
