"""The tables and figures of the FlashAttention papers, measured on this machine: python -m bench.paper --help.

`runner.py` is the program: it finds missing cells and writes the results files. `settings.py` has its settings.
`worker.py` is the process that measures one cell.
`tables/` has one module per table.
`pages.py` makes the page and the pictures of a table from its results.
`training_steps.py` and `perplexities.py` have the measurements that the tables of training share.
`bert_model.py` has the model and the batches of the table `bert`.
`classifier_steps.py` times the steps of the table `lra`; `turns.py` times calls that take turns.
`attentions.py` has the attentions by name.
`byte_counts.py` computes the bytes to and from HBM by formula; `hbm_counters.py` reads the GPU's counters.
`triton_kernels.py` has the small kernels of the tables `softmax` and `hierarchy`.
`ladder_steps.py` has the steps of the table `ladder` as calls; `ladder_counters.py` reads their counters.
`crossings.py` finds the lengths where lines of the table `approximate` cross.
`launches.py` lists the Triton kernels that a call launches.
`occupancy.py` computes how many programs of a kernel are resident on a multiprocessor.
"""
