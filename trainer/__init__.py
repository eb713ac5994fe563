"""What the loop of train.py leans on: optimizer, checkpoints, precision, FLOPs, meters and loggers."""
