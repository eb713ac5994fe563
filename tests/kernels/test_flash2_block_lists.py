"""Block-sparse flash2: the lists of blocks, and the kernels that walk over them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.common.checks import document_bounds
from kernels.flash2 import block_lists as blocks
from kernels.flash2 import definition, dispatch, flash2
from kernels.flash2.options import Options
from tests.kernels.accuracy import Case, draw, outcome
from tests.kernels.flash2_cases import BF16, FEW_TILES, KERNEL_DEVICE, visible_keys, written_out


def kept_pairs(pattern: torch.Tensor, length: int) -> torch.Tensor:
    """Return (length, length) boolean: whether the block of a query and a key is kept."""
    block = torch.arange(length) // 128
    return pattern[block[:, None], block]


@pytest.mark.parametrize("implementation", [definition, dispatch], ids=["definition", "kernels"])
@pytest.mark.parametrize(
    ("length", "rows", "causal", "document", "longest", "heads", "kv_heads"),
    [
        (261, "100 000 011", True, None, 16, 4, 2),
        (270, "010 100 000", False, 130, 16, 2, 1),
        (200, "11 01", True, 70, 16, 2, 1),
        (128, "1", False, None, 16, 2, 1),
        (400, "1000 1100 1010 1111", True, None, 2, 2, 1),
        (260, "101 111 111", False, 130, 1, 2, 2),
    ],
)
def test_blocks_left_out_are_not_seen(
    monkeypatch, implementation, length, rows, causal, document, longest, heads, kv_heads
):
    """Compare with autograd in fp64.

    The cases include rows and columns without a block, blocks that the causal mask hides, and divided lists.
    """
    monkeypatch.setattr(blocks, "longest_piece", lambda counts: longest)
    case = Case(1, length, length, heads=heads, kv_heads=kv_heads, head_dim=16, causal=causal)
    pattern = torch.tensor([[block == "1" for block in row] for row in rows.split()])
    inputs, cuts = draw(case, KERNEL_DEVICE), [] if document is None else [0, document, length]
    kept_blocks = blocks.listed(pattern, causal, bool(cuts), length % 128 != 0).lists.to(KERNEL_DEVICE)
    documents = document_bounds(torch.tensor(cuts, device=KERNEL_DEVICE), 1, length) if cuts else None
    options = Options(None, documents, kept_blocks, causal, 0, 0.25)
    dlogsumexp = torch.randn(1, heads, length, device=KERNEL_DEVICE)
    tiles = FEW_TILES if implementation is dispatch else {}
    out, logsumexp = implementation.forward(*inputs[:3], *options, **tiles)
    grads = implementation.backward(inputs[3], *inputs[:3], out, logsumexp, dlogsumexp, True, *options, **tiles)
    visible = visible_keys(case, None, cuts) & kept_pairs(pattern, length)
    expected = written_out(case, inputs, visible.to(KERNEL_DEVICE), dlogsumexp)
    for got, want in zip((out, logsumexp, *grads), expected, strict=True):
        torch.testing.assert_close(got, want.float(), atol=2e-5, rtol=2e-4)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(0, 2**32), st.booleans(), st.booleans(), st.integers(1, 5))
def test_divided_lists_hold_what_whole_ones_do(n, seed, causal, documents, longest):
    """Each block of keys has its list, in order, in consecutive rows, and no row is too long.

    Divided lists come first, then longer before shorter ones. Lists of blocks of queries are never divided.
    """
    pattern = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)) < 0.7
    rows = {}
    with pytest.MonkeyPatch.context() as patch:
        for length in (n, longest):
            patch.setattr(blocks, "longest_piece", lambda counts, length=length: length)
            rows[length] = blocks.listed(pattern, causal, documents, False).lists.tolist()
    whole, divided = rows[n], rows[longest]
    assert divided[:n] == whole[:n]
    lists = {block: (partial, row[:count]) for block, _, partial, count, *row in whole[n:]}
    order = []
    for block, pieces, partial, count, *row in divided[n:]:
        assert partial <= count <= longest
        if pieces:
            found, of_block, left = (0, []), block, pieces
            order.append((pieces > 1, count))
        assert block == of_block and left > 0
        left -= 1
        found = found[0] + partial, found[1] + row[:count]
        if not left:
            assert found == lists.pop(block)
    assert not lists and order == sorted(order, reverse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("length", [5000, 8192])
def test_tuned_tiles_sum_the_pieces_of_long_lists(head_dim, length):
    """All queries see the butterfly's first block of keys. The results have the same bits each time."""
    case = Case(1, length, length, heads=4, kv_heads=2, head_dim=head_dim, dtype=BF16)
    pattern = blocks.butterfly(-(-length // 128))
    kept = blocks.listed(pattern, causal=True, documents=False, ragged=length % 128 != 0).to("cuda")
    assert kept.lists[len(pattern), 1] > 1
    inputs = draw(case, "cuda")
    got = outcome(lambda q, k, v: flash2(q, k, v, causal=True, blocks=kept), *inputs)
    again = outcome(lambda q, k, v: flash2(q, k, v, causal=True, blocks=kept), *inputs)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    visible = (visible_keys(case, None, []) & kept_pairs(pattern, length)).to("cuda")
    expected = written_out(case, inputs, visible, torch.zeros(1, 4, length, device="cuda"))
    for x, want in zip(got, (expected[0], *expected[2:]), strict=True):
        assert (x.double() - want).norm() < 1e-2 * want.norm()


@pytest.mark.parametrize("change", [{"causal": False}, {"cu_seqlens": torch.tensor([0, 50, 300])}, {}])
def test_blocks_listed_for_another_call_are_refused(change):
    """With such lists, queries would see hidden keys, or keys past the end."""
    q, k, v, _ = draw(Case(batch=1, seq_q=300, seq_k=300), "cpu")
    kept = blocks.listed(blocks.butterfly(3), causal=True, documents=False, ragged=bool(change))
    flash2(q, k, v, causal=True, blocks=kept._replace(ragged=True))
    with pytest.raises(ValueError, match=r"blocks were listed with \w+=\w+, and this call has"):
        flash2(q, k, v, **{"causal": True, "blocks": kept} | change)
    with pytest.raises(ValueError, match="blocks is a Tensor; pass the result of kernels.flash2.block_lists.listed"):
        flash2(q, k, v, causal=True, blocks=kept.lists)
