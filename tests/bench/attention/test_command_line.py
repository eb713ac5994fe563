"""The settings of bench.attention: which shapes, variants and files they choose, and what is refused."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

from bench.attention import __main__ as attention
from bench.attention.__main__ import AttentionSettings
from bench.attention.shapes import LENGTHS, AttentionShape
from bench.common.command_line import launch
from errors import UserError
from tests.e2e import ROOT


def call_main(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["attention", *map(str, arguments)])
    launch(attention.run, AttentionSettings)


def refusal(monkeypatch, capsys, *arguments):
    with pytest.raises(SystemExit, match="2"):
        call_main(monkeypatch, *arguments)
    return capsys.readouterr().err


def test_without_a_gpu_one_sentence_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(monkeypatch, capsys) == (
        "error: bench.attention finds no GPU; without one, use explain=true or function=module:function\n"
    )


def test_explain_asks_the_launcher_once_per_shape(monkeypatch, capsys):
    from kernels.flash2 import dispatch

    asked = []
    monkeypatch.setattr(dispatch, "explain", lambda *args: asked.append(args) or "tiles", raising=False)
    call_main(monkeypatch, "explain=true", "arch=sm_80", "cells=[d80_causal,gpt2]")
    assert asked == [
        (64, torch.bfloat16, True, 1024, "sm_80"),
        (80, torch.bfloat16, True, 2048, "sm_80"),
        (80, torch.bfloat16, True, 8192, "sm_80"),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "flash2 on sm_80:" and lines[2] == "d80_causal_2048   tiles"


def test_explain_refuses_a_gpu_without_kernels(monkeypatch, capsys):
    arch_of = pytest.importorskip("kernels.common.launching").arch_of
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    arch_of.cache_clear()
    error = refusal(monkeypatch, capsys, "explain=true")
    arch_of.cache_clear()
    assert "arch=sm_75 does not run flash2: the kernels need sm_80 or newer" in error


def test_explain_says_which_architecture_it_describes_without_a_gpu(monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    attention.run(AttentionSettings(explain=True, cells=["gpt2"]))
    assert capsys.readouterr().out.startswith("flash2 on sm_90, as an example because this machine has no GPU;")


ODD = 0, -1, 7, 257, 100_000, 2**62, 10**20
NAMES = [], [""], ["nope"], [["gpt2"]], ["gpt2", "gpt2"]


def test_odd_settings_are_computed_or_refused_in_one_sentence(monkeypatch):
    """They are accepted with a stub in place of the measurement, on a GPU and without one, or raise a UserError."""
    monkeypatch.setattr(attention, "measure_all", lambda *_: [])
    monkeypatch.setattr(attention, "check_function", lambda *_: Counter(ok=1))
    monkeypatch.setattr(attention, "Gpu", lambda: None)
    function = {"function": "kernels.naive.definition:standard_attention"}
    others = [{"dtype": dtype} for dtype in ("int8", "", "float16")]
    others += [{"explain": True, "arch": arch} for arch in ("rtx4090", "SM_90", "", "sm_89", "gfx942")]
    others += [{"function": name} for name in ("", "x", ":x", "nowhere:f", "math:pi", "math:sqrt")]
    others += [{"out": Path(name)} for name in ("", ".", "/dev/null/x", "a/b.json")]
    others += [{"arch": "sm_80"}, {"check": True}, {"causal": True}, {"head_dim": 64}, {"check": True, "explain": True}]
    sizes = [{"seq_len": 64, key: odd} for key in attention.LARGEST for odd in ODD]
    names = [{key: odd} for key in ("cells", "variants") for odd in NAMES]
    every = [given | mode for given in (*sizes, *names, *others) for mode in ({}, {"explain": True}, function)]
    refused = 0
    for given, on_gpu in itertools.product(every, (True, False)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_900)
        try:
            attention.run(AttentionSettings(**given))
        except UserError as error:
            refused += 1
            assert ";" in str(error) and "\n" not in str(error), given
    assert len(every) > 200 and len(every) < refused < 2 * len(every)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["d64_causal_512", "64k"], ["d64_causal_512", "64k"]),
        (["d128_full"], [f"d128_full_{n}" for n in LENGTHS]),
        (["d80"], ["d80_causal_2048", "d80_causal_8192"]),
    ],
    ids=str,
)
def test_shapes_are_chosen_by_the_beginning_of_their_names(cells, expected):
    assert [shape.name for shape in attention.chosen_shapes(AttentionSettings(cells=cells))] == expected


def test_a_shape_of_your_own():
    settings = AttentionSettings(
        batch=4, heads=16, kv_heads=2, seq_len=4096, head_dim=128, causal=True, dtype="float16"
    )
    assert attention.chosen_shapes(settings) == [
        AttentionShape("shape", 4, 4096, 16, 128, causal=True, kv_heads=2, dtype="float16")
    ]
    assert attention.chosen_shapes(AttentionSettings(seq_len=1024)) == [
        AttentionShape("shape", 16, 1024, 32, 64, False)
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cells=[d65]"], ["cells=[d65]", "d64_causal_512"]),
        (["head_dim=64"], ["seq_len=", "cells="]),
        (["seq_len=64", "cells=[gpt2]"], ["cells=[gpt2] has no effect with seq_len", "leave one of the two out"]),
        (["seq_len=64", "heads=4", "kv_heads=3"], ["heads=4", "kv_heads=3"]),
        (["dtype=int8"], ["dtype=int8", "bfloat16, float16, float32"]),
        (["rounds=0"], ["rounds=0"]),
        (["out=."], ["out=. is a folder; name a file in the folder"]),
        (["check=true"], ["check=true", "function=module:function"]),
        (["function=no_such_module:f"], ["function=no_such_module:f", "no_such_module"]),
        (["explain=true", "seq_len=64", "head_dim=100000"], ["head_dim=100000 is too large; give at most 1024"]),
        (["explain=true", "seq_len=64", "head_dim=512"], ["head_dim=512", "give 16 to 256"]),
        (["explain=true", "arch=rtx4090"], ["arch=rtx4090 is unknown", "sm_89"]),
        (["arch=sm_80"], ["arch=sm_80 has no effect; add explain=true"]),
        (["explain=true", "function=a:b"], ["function=... has no effect with explain=true"]),
        (["cells=[]"], ["cells=[] is empty; give at least one value"]),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_in_one_sentence(arguments, words, monkeypatch, capsys):
    error = refusal(monkeypatch, capsys, *arguments)
    assert error.count("\n") == 1 and all(word in error for word in words)


def test_an_unknown_variant_is_refused():
    with pytest.raises(UserError, match="variants=flash3 is unknown; choose one of naive, sdpa_flash"):
        attention.chosen_variants(AttentionSettings(variants=["flash3"]))


def test_only_the_whole_table_goes_to_the_gpus_folder(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="torch finds none; give out=FILE"):
        attention.destination(AttentionSettings())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    assert attention.destination(AttentionSettings()) == ROOT / "bench/results/a100-sxm4-80gb/attention.json"
    assert attention.destination(AttentionSettings(cells=["gpt2"], out=Path("a.json"))) == Path("a.json")
    parts = {"cells": ["gpt2"]}, {"seq_len": 64}, {"variants": ["flash2"]}, {"function": "m:f"}, {"dtype": "float16"}
    assert all(attention.destination(AttentionSettings(**part)) is None for part in parts)
