"""The count of floating-point operations of GPT-2 and of attention.

A multiply-add is two operations, and a backward pass costs two forward passes. So a weight costs 6 operations per
token: 6N in all. N leaves out the position table, which is only looked up. The token table counts, because it is also
the matrix of the head. Grouped heads (model.n_kv_head) have fewer weights, but compute the same pairs of tokens.

Per token and layer, QK^T and PV cost 2 T d each, and 6 T d each with the backward pass: 12 L d T in all. This is
the convention of the FlashAttention papers, Megatron-LM and PaLM: causality halves nothing, and recomputation does not
count. `causal=True` halves it to 6 L d T. An attention that leaves out pairs of tokens, by a window or by blocks,
counts for the share of the causal pairs that it keeps. Pairs that documents hide count in full.

An attention kernel costs 4 B H T^2 D forward, for two matmuls, and half of that if causal. The backward pass has five
matmuls (S and dP, then dQ, dK and dV) and costs 2.5 times the forward pass.

B batch, T sequence, H heads, D head size, d embedding width, L layers.
"""

import torch

# Dense 16-bit peak with fp32 accumulation, in TFLOP/s, by the exact name that the driver reports. Names nest (A10 in
# A100), and a MIG slice has its card's name with a suffix. Halved if a datasheet gives only a figure with sparsity.
PEAK_TFLOPS = {
    # NVIDIA A100 (2021), A30, A10 and A40 datasheets
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A30": 165.0,
    "NVIDIA A10": 125.0,
    "NVIDIA A40": 149.7,
    # NVIDIA H100 Tensor Core GPU Architecture whitepaper, table "H100 SXM5 and PCIe" (dense)
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    # NVIDIA H100 datasheet (2023): 1,671 with sparsity
    "NVIDIA H100 NVL": 835.0,
    # NVIDIA H200 datasheet: 1,979 with sparsity (SXM), 1,671 (NVL); the SXM card is H100's chip at H100's clocks
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.0,
    # NVIDIA HGX B200 datasheet: 36 PFLOP/s with sparsity over 8 GPUs
    "NVIDIA B200": 2250.0,
    # NVIDIA L4 datasheet: 242 with sparsity; NVIDIA L40S datasheet: 362 dense
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
    # NVIDIA Ampere GA102, Ada and RTX Blackwell architecture whitepapers, "FP16 Tensor TFLOPS with FP32 Accumulate"
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    # AMD Instinct MI300X datasheet; MI250X datasheet: 383 for the card, which shows as two devices
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI250X": 191.5,
}


def model_flops_per_token(
    n_params: int, n_layer: int, n_embd: int, context_length: int, causal: bool = False, kept: float = 1.0
) -> int:
    """Return the FLOPs per token of a training step. `n_params` leaves out the position table; `kept` is the share of
    the causal pairs of tokens that attention computes."""
    attention = (6 if causal else 12) * n_layer * n_embd * context_length
    return 6 * n_params + round(attention * kept)


def attention_flops(batch: int, heads: int, seq_len: int, head_dim: int, causal: bool, *, pass_: str) -> float:
    """Return the FLOPs of one attention call. `heads` counts query heads; `pass_` is forward, backward or both."""
    forward = 4 * batch * heads * seq_len**2 * head_dim / (2 if causal else 1)
    return {"forward": 1.0, "backward": 2.5, "both": 3.5}[pass_] * forward


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the dense matmul peak in FLOP/s of a device, by torch's name of it, or None if it is unknown.

    Only 16-bit dtypes have a peak: whether fp32 runs as TF32 is a setting.
    """
    known = device_name in PEAK_TFLOPS and dtype in (torch.bfloat16, torch.float16)
    return PEAK_TFLOPS[device_name] * 1e12 if known else None
