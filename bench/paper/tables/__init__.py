"""The tables of bench.paper. Each is a module of this package with

- TITLE, its headline;
- cells(settings), the list of cells to measure, as dictionaries; each cell gets a process of its own;
- measure(cell, gpu, settings), which yields the rows of a cell, in that process;
- markdown(rows), the table and a short note on its columns;
- pictures(rows, device), a matplotlib figure for each ending of the file name. Some tables have no pictures.

A row holds the keys of its cell, and "status": ok, oom, unsupported or failed. The last two have a "message".
"""

from importlib import import_module
from types import ModuleType

TABLES = {
    "gpt2": "gpt2_training",
    "gpt2_context": "gpt2_contexts",
    "gpt3": "gpt3_training",
    "bert": "bert",
    "kernels": "attention_speed",
    "memory": "attention_memory",
    "io": "hbm_traffic",
    "blocks": "tile_sizes",
    "scaling": "grid_scaling",
    "fusion": "kernel_fusion",
    "hierarchy": "memory_hierarchy",
    "softmax": "softmax_passes",
    "ladder": "ladder",
    "lra": "long_range_arena",
    "approximate": "approximate_attention",
}


def load_table(name: str) -> ModuleType:
    """Import the module of a table by the name that the command line uses. Importing all of them takes seconds."""
    return import_module(f"bench.paper.tables.{TABLES[name]}")
