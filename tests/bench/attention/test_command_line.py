"""The settings of bench.attention: which shapes, variants and files they choose, and what is refused."""

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
        "error: bench.attention needs a GPU and finds none; without one, use explain or function\n"
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
    assert capsys.readouterr().out.splitlines()[1] == "d80_causal_2048   tiles"


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
        (["seq_len=64", "cells=[gpt2]"], ["cells and seq_len exclude each other", "leave one of the two out"]),
        (["seq_len=64", "heads=4", "kv_heads=3"], ["heads=4", "kv_heads=3"]),
        (["dtype=int8"], ["dtype=int8", "bfloat16, float16, float32"]),
        (["rounds=0"], ["rounds=0"]),
        (["out=."], ["out=. is a folder; name a file in the folder"]),
        (["check=true"], ["check=true", "function=module:function"]),
        (["function=no_such_module:f"], ["function=no_such_module:f", "no_such_module"]),
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
    with pytest.raises(UserError, match="torch finds none; name a file with out="):
        attention.destination(AttentionSettings())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    assert attention.destination(AttentionSettings()) == ROOT / "bench/results/a100-sxm4-80gb/attention.json"
    assert attention.destination(AttentionSettings(cells=["gpt2"], out=Path("a.json"))) == Path("a.json")
    parts = {"cells": ["gpt2"]}, {"seq_len": 64}, {"variants": ["flash2"]}, {"function": "m:f"}, {"dtype": "float16"}
    assert all(attention.destination(AttentionSettings(**part)) is None for part in parts)
