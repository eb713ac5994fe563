import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from bench.attention.contenders import available, bind, draw_inputs
from bench.attention.shapes import AttentionShape
from kernels.flash2 import flash2
from kernels.naive.definition import standard_attention
from tests.bench.stopwatch import TINY, measure


def test_grouped_heads_are_measured_too():
    shape = AttentionShape("grouped", batch=1, seq_len=20, heads=4, head_dim=16, kv_heads=2, causal=False)
    variants = {"naive": standard_attention, "flash2": flash2, "sdpa_flash": available()["sdpa_flash"]}
    assert {row["status"] for row in measure(variants, shape).values()} == {"ok"}


def test_gpt2s_shape_gives_views_of_one_projection_and_flash2_its_packed_operator():
    shape = AttentionShape("packed", batch=2, seq_len=20, heads=2, head_dim=16, packed=True)
    data = draw_inputs(shape, "cpu")
    ours, theirs = (bind(name, f, shape, data) for name, f in [("flash2", flash2), ("naive", standard_attention)])
    assert [x.shape for x in ours.leaves] == [(2, 20, 3, 2, 16)]
    assert [x.stride() for x in theirs.leaves] == [(20 * 96, 96, 16, 1)] * 3
    assert {x.untyped_storage().data_ptr() for x in ours.leaves + theirs.leaves} == {data.qkv.data_ptr()}
    assert {row["status"] for row in measure({"naive": standard_attention, "flash2": flash2}, shape).values()} == {"ok"}


def test_torchs_variants_get_heads_first_and_the_others_tokens_first():
    data = draw_inputs(TINY, "cpu")
    (q, *_), (mine, *_) = (bind(name, flash2, TINY, data).leaves for name in ("sdpa_cudnn", "fa3"))
    assert q.transpose(1, 2).is_contiguous() and mine.is_contiguous() and torch.equal(q, mine)


@pytest.mark.parametrize(("name", "package"), [("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")])
def test_the_authors_kernels_are_contenders_where_their_package_is_installed(monkeypatch, name, package):
    assert name not in available()
    for parent in {package.partition(".")[0], package}:
        module = ModuleType(parent)
        module.__spec__, module.__path__ = ModuleSpec(parent, None, origin="a file"), []
        module.flash_attn_func = lambda q, k, v, softmax_scale, causal: (2 * q, None)
        monkeypatch.setitem(sys.modules, parent, module)
    assert torch.equal(available()[name](torch.ones(1), None, None, causal=True, scale=1.0), torch.full((1,), 2.0))
