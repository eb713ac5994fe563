"""The tables and figures of the FlashAttention papers, measured on this machine: python -m bench.paper --help.

Each table is a module of this package with
- TITLE, its headline;
- cells(config), what is measured, as dictionaries; each cell gets a process of its own;
- measure(cell, gpu, config), which yields the rows of a cell, in that process;
- markdown(rows), the table and what has to be said of it;
- pictures(rows, where), a matplotlib figure for each ending of the file's name.

A row holds what is in its cell, and "status": ok, oom or failed, with a "message" where it failed.
"""
