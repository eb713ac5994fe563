"""Sums of rows; where there is no GPU the kernel runs in the interpreter."""

import pytest
import torch

from kernels.sums import TILE, sum_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 300, 40), (3, TILE[0], 2 * TILE[1]), (2, 2 * TILE[0] + 1, 7)], ids=str
)
def test_rows_are_summed_in_fp32_into_what_is_given(shape):
    parts = torch.randn(shape, device=DEVICE)
    exact = parts.double().sum(1)
    found = sum_rows(parts)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-5)
    room = torch.full((shape[0], 2, shape[2]), float("nan"), device=DEVICE)
    assert torch.equal(sum_rows(parts, room[:, 1]), found)
    assert torch.equal(room[:, 1], found) and room[:, 0].isnan().all()
