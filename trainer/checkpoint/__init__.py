"""Checkpoints: the state of a run on disk, written completely or not at all, and read without running code from it.

config.py       the settings (group `checkpoint`)
files.py        the file format: torch's archive, then a SHA-256 seal; atomic writes and deletes
folder.py       the names of checkpoints in a folder: find, list, check
single.py       one file per checkpoint: step-00000100.pt
background.py   the same files, written by a thread beside training
sharded.py      one folder per checkpoint, if the weights are split among processes
load.py         read a checkpoint, or the newest complete one of a folder
policy.py       when to save, what to do if the disk refuses, and agreement among processes
"""
