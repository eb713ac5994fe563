"""The table `fusion`: its check of attention with dropout, its bytes, and whether inductor fused."""

from functools import partial

import pytest
import torch
from torch._inductor.fx_passes import fuse_attention

from bench.attention.accuracy import WrongResult
from bench.attention.contenders import draw_inputs
from bench.attention.shapes import AttentionShape
from bench.paper.tables import kernel_fusion
from kernels.naive.definition import standard_attention

SHAPE = AttentionShape("fusion", **kernel_fusion.SHAPES["smoke"])


@pytest.fixture
def attend():
    """Return attention of fixed inputs as a function of mask and dropout."""
    torch.manual_seed(0)
    return partial(standard_attention, *draw_inputs(SHAPE, "cpu")[:3], scale=0.25)


def test_attention_with_dropout_passes_and_other_results_do_not(attend):
    exact = attend(causal=True).double()[:1]
    kernel_fusion.check_dropped(attend(causal=True, dropout_p=0.1), exact)
    for wrong in ({"causal": True}, {"causal": True, "dropout_p": 0.25}, {"causal": False, "dropout_p": 0.1}):
        with pytest.raises(WrongResult, match="dropout alone makes 0.33"):
            kernel_fusion.check_dropped(attend(**wrong), exact)
    with pytest.raises(WrongResult, match="nan"):
        kernel_fusion.check_dropped(exact * float("nan"), exact)


def test_the_steps_move_the_scores_and_the_fused_kernel_does_not():
    """n = 4, d = 2, one head of 2 bytes an element: a product 16 + 8 + 8 elements, the others 16 read and 16 written;
    dropout also stores 16 bytes. Fused: q, k, v and the output of 8 elements each, and 4 statistics of 4 bytes."""
    found = kernel_fusion.bytes_of(AttentionShape("tiny", batch=1, seq_len=4, heads=1, head_dim=2))
    assert [found[step] for step in kernel_fusion.STEPS] == [64, 64, 64, 80, 64]
    assert found["flash2"] == 64 + 16 and found["torch.compile, mask added"] is None


def test_a_pattern_has_fired_if_inductor_has_put_its_fused_attention_in():
    """Here the call itself runs what inductor puts in."""
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    seen = []
    fused = partial(fuse_attention._sfdp_replacement_6, q, k, v, torch.zeros(8, 8), 4.0, 0.0)
    assert kernel_fusion.patterns_fired(fused, seen.append) == 1
    assert kernel_fusion.patterns_fired(partial(torch.zeros, 1, 2, 8, 16), seen.append) == 0
    assert [x.shape for x in seen] == [(1, 8, 2, 16)] * 2


def test_the_five_kernels_are_compared_as_one_sum():
    cell = {"batch": 1, "heads": 2, "seq_len": 64, "head_dim": 16}
    steps = [{"part": step, "ms": 1.0, "bytes": 10**9, "fired": None} for step in kernel_fusion.STEPS]
    others = zip(kernel_fusion.COMPILED, (1, 0), (2.0, 4.0), strict=True)
    rows = steps + [{"part": part, "ms": ms, "bytes": None, "fired": fired} for part, fired, ms in others]
    rows = [cell | row | {"status": "ok"} for row in rows]
    made = kernel_fusion.markdown(rows)
    assert "| mask | 1.000 | 1.00 | 1,000 | - | - |" in made
    assert "| five kernels | 5.000 | 5.00 | 1,000 | 1.00 | - |" in made
    assert "| torch.compile, mask added | 2.000 | - | - | 2.50 | fired |" in made
    assert "| torch.compile, masked_fill | 4.000 | - | - | 1.25 | did not fire |" in made
    rows[1] |= {"status": "oom"}
    assert "five kernels | " not in kernel_fusion.markdown(rows).partition("\n")[2]
