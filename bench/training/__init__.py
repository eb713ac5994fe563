"""python -m bench.training: training steps side by side."""
