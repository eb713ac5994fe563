"""Which tiles the programs of the Hopper backward compute, and in which order they add to dQ. Runs as plain Python."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.common.checks import document_bounds
from kernels.flash2.hopper_backward import schedule
from tests.kernels.accuracy import Case
from tests.kernels.flash2_cases import F32, visible_keys

HEADS = 2


def queries_of(j, documents, batch, offset, seq_q, seq_k, window, causal, has_window, has_documents):
    """Return first and end of the queries that see key j, as kernels.common.head_rows.queries_of does."""
    first, end = (int(x[j]) for x in documents[batch]) if has_documents else (0, seq_q)
    first = max(first, j - offset) if causal else first
    return first, min(end, j - offset + window) if has_window else end


@pytest.fixture(autouse=True, scope="module")
def python():
    """Run the functions of the schedule as Python."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(schedule, "queries_of", queries_of)
        language = SimpleNamespace(cdiv=lambda a, b: -(-a // b), minimum=min, maximum=max)
        language.where = lambda condition, a, b: a if condition else b
        patched.setattr(schedule, "gl", language)
        yield


@st.composite
def cases(draw):
    """Draw a shape, a window and cuts that the kernels allow."""
    seq_q, causal = draw(st.integers(1, 600)), draw(st.booleans())
    has_documents = causal and draw(st.booleans())
    seq_k = seq_q if has_documents else draw(st.integers(1, 600))
    window = draw(st.integers(1, seq_k - 1)) if seq_k > 1 and draw(st.booleans()) else 0
    case = Case(2, seq_q=seq_q, seq_k=seq_k, heads=1, kv_heads=1, head_dim=64, causal=causal, dtype=F32)
    inner = draw(st.lists(st.integers(0, 2 * seq_q), max_size=5)) if has_documents else []
    return case, window, sorted([0, *inner, 2 * seq_q]) if has_documents else []


@given(cases(), st.sampled_from([(64, 64), (128, 128), (64, 128)]), st.integers(1, 9))
@settings(deadline=None, max_examples=200)
def test_programs_compute_all_visible_tiles_and_wait_only_for_programs_before_them(drawn, tile_sizes, section):
    (case, window, cuts), (m_rows, n_rows) = drawn, tile_sizes
    masks = case.causal, window > 0, bool(cuts)
    documents = document_bounds(torch.tensor(cuts, dtype=torch.int32), 2, case.seq_q) if cuts else None
    visible, shape = visible_keys(case, window, cuts), (HEADS, 1, case.seq_q, case.seq_k)
    key_tiles, additions = -(-case.seq_k // n_rows), Counter()
    for program in range(2 * HEADS * key_tiles):
        schedule.gl.program_id = lambda axis, program=program: program
        head, tile = schedule.place.fn(2 * HEADS, key_tiles, section, True)
        batch, keys = head // HEADS, slice(tile * n_rows, (tile + 1) * n_rows)
        first, stop, full, full_end = schedule.query_tiles.fn(
            keys.start, documents, batch, shape, window, m_rows, n_rows, *masks
        )
        for m in range(first, stop):
            assert schedule.turn_of.fn(tile, m, shape, m_rows, n_rows, case.causal) == additions[head, m]
            additions[head, m] += 1
        seen = visible[batch, :, keys].any(-1)
        assert not seen[: first * m_rows].any() and not seen[stop * m_rows :].any()
        assert visible[batch, max(full, 0) : max(full_end, 0), keys].all()
    assert sum(additions.values()) > 0 and {head for head, _ in additions} == set(range(2 * HEADS))
