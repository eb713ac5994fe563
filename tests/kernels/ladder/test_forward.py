"""The forward steps of the ladder against fp64, on a GPU. Triton's interpreter has no Gluon."""

import pytest
import torch

from kernels.common.launching import triton_version
from kernels.ladder import FORWARD, load
from tests.kernels.accuracy import Case, draw, exact
from tests.kernels.flash2_cases import BF16, F16

HOPPER = FORWARD[FORWARD.index("step_11_wgmma") :]


@pytest.mark.gpu
@pytest.mark.skipif(triton_version() < (3, 6), reason="needs Triton 3.6 or later")
@pytest.mark.parametrize("step", FORWARD)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "packed"), [(BF16, True), (F16, False)], ids=str)
def test_steps_are_attention(step, head_dim, causal, dtype, packed):
    """One tile of 128 queries, several tiles, and more programs than multiprocessors."""
    if step in HOPPER and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    for length, heads in ((128, 2), (384, 3), (1024, 16)):
        case = Case(2, length, length, heads, heads, head_dim, causal, dtype)
        q, k, v, _ = inputs = draw(case, "cuda")
        if packed:
            q, k, v = torch.stack((q, k, v), 2).unbind(2)
        got, want = load(step).forward(q, k, v, causal), exact(case, *inputs)[0]
        assert got.shape == want.shape and got.dtype == dtype and got.is_contiguous()
        error = (got.double() - want).norm(dim=-1)  # of each row, so that one wrong tile does not drown
        assert error.norm() < 1e-2 * want.norm()
        assert (error < 0.1 * want.norm(dim=-1).mean()).all()
