"""Standard attention, the reference of the other variants, against torch and against finite differences."""

import pytest
import torch
import torch.nn.functional as F

from kernels.naive.definition import standard_attention, visible
from tests.kernels.accuracy import Case, draw


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("seq_q", [3, 5, 7], ids=["fewer_queries", "equal_lengths", "more_queries_than_keys"])
def test_gradients_in_fp64_match_finite_differences(causal, seq_q):
    case = Case(batch=1, seq_q=seq_q, seq_k=5, heads=2, kv_heads=1, head_dim=4, dtype=torch.float64)
    q, k, v, _ = draw(case, "cpu")
    keep = torch.rand(1, 2, seq_q, 5) > 0.3

    def attend(q, k, v):
        return standard_attention(q, k, v, causal=causal, scale=0.7, dropout_p=0.3, keep=keep)

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in (q, k, v)])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_output_in_fp64_matches_torch(causal):
    case = Case(seq_q=63, seq_k=63, heads=4, kv_heads=2, dtype=torch.float64)
    q, k, v, _ = draw(case, "cpu")
    mask = visible(63, 63, q.device) if causal else None
    theirs = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(standard_attention(q, k, v, causal=causal, scale=0.3), theirs.transpose(1, 2))


@pytest.mark.parametrize("share", [1.0, 1.5, -0.1])
def test_dropout_outside_0_to_1_is_refused(share):
    q, k, v, _ = draw(Case(), "cpu")
    with pytest.raises(ValueError, match=f"dropout_p={share} is out of range; give"):
        standard_attention(q, k, v, causal=True, scale=1.0, dropout_p=share)


def test_queries_before_the_first_key_give_zeros():
    q, k, v, _ = draw(Case(seq_q=5, seq_k=3), "cpu")
    out = standard_attention(q, k, v, causal=True, scale=1.0)
    assert out[:, :2].eq(0).all() and out[:, 2:].ne(0).all()
