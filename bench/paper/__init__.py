"""The tables and figures of the FlashAttention papers, measured on this machine: python -m bench.paper --help.

runner.py           the program: which cells are missing, progress, results files, pages and pictures
worker.py           the process that measures one cell
tables/             one module per table
training_steps.py, perplexities.py      measurements that the tables of training share
attentions.py       the attentions by name
byte_counts.py, hbm_counters.py         bytes to and from HBM: counted by formula, and read from the GPU's counters
"""
