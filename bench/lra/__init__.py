"""Long Range Arena (Tay et al., 2021): encoder classifiers with exact and approximate attentions, on five tasks."""
