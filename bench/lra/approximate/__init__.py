"""Approximate attentions from their papers, in plain PyTorch.

Each is an nn.Module of an EncoderConfig, called as f(q, k, v) -> out. All tensors are (B, T, H, D) of one floating
dtype. No step waits for the device and shapes depend only on shapes, so CUDA graphs can capture them. 16-bit inputs are
multiplied as they are. Softmax, sums over the sequence, random features and hashes are computed in fp32 or more.

The defaults give each query about 256 keys, projected keys or features, except in linear attention. Random numbers are
drawn once, at construction.

B batch, T sequence length, H heads, D head size.
"""
