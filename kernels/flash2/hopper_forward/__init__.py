"""Warp-specialised attention forward for Hopper, in Gluon: the scheme of FlashAttention-3.

Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), Algorithms 1 and
2. kernels/hopper/__init__.py explains Gluon. One program stays on each multiprocessor and walks over tiles of queries.
With documents, a program draws its tiles from a counter. A program has these warps:

- The producer warp copies Q, K and V into rings in shared memory by TMA.
- Each of two or three consumer warpgroups owns 64 rows of a tile. It issues S = Q K^T of one block of keys before P V
  of the block before. The next tile's first block directly follows the last block. This hides the start of every tile
  except the first.

With heads of 64, a consumer computes the maxima under its own P V, and the exponentials under the products of the
other consumers. Three consumers have too few registers for a second P. With larger heads, each consumer runs the whole
softmax under its own P V.

schedule.py assigns tiles to programs, and producer.py loads them. tile.py computes parts of one tile. kernel.py is the
kernel, and host.py launches it.

Legend: T queries, S keys; M rows of a query tile, 64 per consumer; N keys of a block; D0 + D1 head size in two parts
(80 = 64 + 16; D1 = 0 for 64 and 128), so that no product is padded. Each part has its own TMA descriptor and product.
Softmax uses base 2, with log2(e) folded into the scale. Statistics and accumulators are fp32.
"""
