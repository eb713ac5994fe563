"""How this project counts floating-point operations; nothing else in it does.

A multiply-add is two operations, and a backward pass costs two forward passes, so that a weight costs 6 operations per
token: 6N, with N every parameter but the position table, which is looked up and never multiplied. The token table is
looked up too, but it is also the head's matrix, and counts as that.

Attention multiplies no weights. Per token and layer QK^T and PV cost 2 T d each, 4 T d together, and three times that
with the backward pass: 12 L d T. That is the convention of the FlashAttention papers, Megatron-LM and PaLM: causality
halves nothing, and what is computed a second time (activations, or the scores in a fused backward) is not counted.
`causal=True` gives the work that causal attention cannot avoid, 6 L d T, for those who want the stricter figure. An
attention that leaves pairs of tokens out, by a window or a list of blocks, counts for the share of the causal pairs
that it keeps; what documents hide is in the data, and counts.

An attention kernel is measured by what it computes: 4 B H T^2 D forward, for the two matmuls, halved when causal; 2.5
times that backward, which has five (S and dP again, then dQ, dK and dV).

B batch, T sequence, H heads, D head size, d embedding width, L layers.
"""

import torch

TENSOR_CORE_DTYPES = (torch.bfloat16, torch.float16)

# Dense 16-bit peak with fp32 accumulation, in TFLOP/s, by the exact name the driver reports. Exact, because names nest
# (A10 in A100, L4 in L40S, RTX 4090 in "RTX 4090 Laptop GPU") and a MIG slice bears its card's name with a suffix.
# Where a datasheet gives only the figure with sparsity, this is half of it.
PEAK_TFLOPS = {
    # NVIDIA A100 datasheet (2021)
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    # NVIDIA A30, A10 and A40 datasheets
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
    """FLOPs of one training step, forward and backward, per token: 6N + 12 L d T.

    `n_params` leaves out the position table. With `causal` the attention term is halved: 6N + 6 L d T. `kept` is the
    share of the causal pairs of tokens that attention computes.
    """
    attention = (6 if causal else 12) * n_layer * n_embd * context_length
    return 6 * n_params + round(attention * kept)


def attention_flops(batch: int, heads: int, seq_len: int, head_dim: int, causal: bool, *, pass_: str) -> float:
    """FLOPs of one attention call: 4 B H T^2 D forward, halved when causal.

    `heads` counts query heads; sharing K and V among them saves no FLOPs. `pass_` is "forward", "backward" (2.5 times
    the forward) or "both" (3.5 times); ValueError for another.
    """
    forwards = {"forward": 1.0, "backward": 2.5, "both": 3.5}
    if pass_ not in forwards:
        raise ValueError(f"pass_ is {pass_!r}; it must be one of {', '.join(forwards)}")
    forward = 4 * batch * heads * seq_len**2 * head_dim / (2 if causal else 1)
    return forwards[pass_] * forward


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """The device's dense matmul peak in FLOP/s, for the name `torch.cuda.get_device_name` gives; None if not known.

    Known for bfloat16 and float16 on the devices of `PEAK_TFLOPS`. float32 has none, since whether its matmuls run as
    TF32 is a setting; nor has a CPU. None means that no MFU can be said, which is better than a wrong one.
    """
    tflops = PEAK_TFLOPS.get(device_name)
    if tflops is None or dtype not in TENSOR_CORE_DTYPES:
        return None
    return tflops * 1e12
