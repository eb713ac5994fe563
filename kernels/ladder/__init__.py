"""A ladder of teaching kernels, from standard attention in memory to warp-specialised kernels for Hopper.

Each step is one module of at most 90 lines with one new idea. Its docstring says the idea, the expected gain and the
counter to look at. FORWARD and BACKWARD list the steps in order.

A forward step has forward(q, k, v, causal), which returns the output. A backward step has backward(dout, q, k, v, out,
logsumexp, causal), which returns dq, dk and dv. The scale of the scores is 1 / sqrt(D).

- q, k and v are (B, T, H, D) in bf16 or fp16. T is a multiple of 128, and D is 64 or 128. The strides of all three are
  (T s, s, D, 1). Contiguous tensors have s = H D, and the parts of one packed projection have s = 3 H D.
- out, dout and all results have q's shape and dtype, and are contiguous.
- logsumexp (B, H, T), fp32 and contiguous, is the natural logsumexp of the scaled scores.
"""

from importlib import import_module
from types import ModuleType

FORWARD = (
    "step_01_scores_in_memory",
    "step_02_coalesced_reads",
    "step_03_online_softmax",
    "step_04_shared_memory",
    "step_05_swizzled_tiles",
    "step_06_tensor_cores",
    "step_07_flash_attention_2",
    "step_08_two_stages",
    "step_09_three_stages",
    "step_10_split_causal_loop",
    "step_11_wgmma",
    "step_12_tma",
    "step_13_specialised_warps",
    "step_14_overlapped_softmax",
)
BACKWARD = ("step_15_separate_gradients", "step_16_atomic_adds", "step_17_tma_adds", "step_18_specialised_warps")


def load(name: str) -> ModuleType:
    """Import the step called `name`."""
    return import_module(f"kernels.ladder.{name}")
