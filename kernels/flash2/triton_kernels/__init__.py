"""FlashAttention-2 in Triton: forward and backward, portable over NVIDIA and AMD GPUs and Triton's interpreter.

Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), Algorithms 1 and 2.
Each program owns one tile of queries (forward, dQ) or of keys (dK and dV) and loops over the other side. Separate loops
handle the tiles that need a mask and those that do not; hidden tiles are skipped. Causal order, sliding window and
documents only move the ends of the range of keys that a query sees.

Legend: M rows of a query tile, N rows of a key tile, HEAD_DIM head size, D head size padded to a power of two; other
names as in kernels/common/head_rows.py. Softmax uses base 2, with log2(e) folded into the scale. Statistics and
accumulators are fp32.
"""
