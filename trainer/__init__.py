"""The parts of train.py's loop: optimizer, checkpoints, precision, FLOPs, meters and loggers."""
