"""Checkpoints: the state of a run on disk, written completely or not at all, and read without running code from it."""
