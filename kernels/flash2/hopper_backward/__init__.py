"""Warp-specialised attention backward for Hopper, in Gluon, with dQ fused: five products per tile instead of seven.

Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), section
3.1 and appendix B.2. kernels/hopper/__init__.py explains Gluon.

host.py launches three kernels:

- statistics.py, delta_kernel: prepare the statistics of the queries. It also zeroes the fp32 accumulator of dQ and the
  counters of its additions.
- main_loop.py, main_kernel: each program owns N keys of one key/value head. It computes dK and dV and adds its part of
  dQ to the accumulator. One warp loads tiles by TMA. One warp, or two in a deterministic backward, adds tiles of dQ by
  TMA's reduce-add (reducer.py). The other warps compute (tile.py).
- finish.py, finish_kernel: scale and round the accumulator to dQ.

By default the additions to dQ have no fixed order, so the last bits of dQ may differ from call to call; dK and dV do
not. In a deterministic backward, the key tiles take turns: each query tile has a counter, and a program waits until the
counter says that all later key tiles have added (schedule.py). FUSED is false if the plain kernel computes dQ: for
heads of 128 with dropout (tiles.json), and in the cases of dispatch.deterministic_config.

If q, k and v contain a bias, its gradient is the sum of their gradients over the tokens. finish_kernel sums dQ. The sum
of dV = P^T dO equals the sum of dO, because the rows of P add up to one; delta_kernel computes it. The sum of dK is
zero: a key's bias changes all scores of a query by the same amount, and softmax only depends on their differences.

Legend: M rows of a query tile, N rows of a key tile, D0 + D1 head size in two parts (80 = 64 + 16; D1 = 0 for 64 and
128), so no product is padded. Suffixes: _t transposed, [N, M]; _s in shared memory; 16 rounded to the inputs' dtype.
Statistics of a query: its logsumexp in base 2, delta = rowsum(dO o O) and, with dropout, its random number. If
host.statistics_for says so, products subtract logsumexp and delta (IN_PRODUCTS).
"""
