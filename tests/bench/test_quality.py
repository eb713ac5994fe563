"""bench.quality on a CPU: the fast step follows Hugging Face's GPT-2, step by step."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from bench import quality
from bench.quality import QualitySettings
from bench.training import trainers
from errors import UserError
from trainer import precision


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    for module in (quality, trainers):
        monkeypatch.setattr(module, "VOCABULARY", 1000)
    ids = np.random.default_rng(0).integers(0, 1000, 4000).astype(np.uint16)
    for split in ("train", "val"):
        ids.tofile(tmp_path / f"{split}.bin")
    return tmp_path


def test_the_fast_step_follows_a_plain_one(tokens, monkeypatch, capsys):
    out = tokens / "quality.json"
    settings = {"model_name": "gpt2-nano", "context_length": 32, "batch": 2, "steps": 5, "device": "cpu", "out": out}
    norms, clip = [], quality.nn.utils.clip_grad_norm_
    monkeypatch.setattr(quality.nn.utils, "clip_grad_norm_", lambda *args: norms.append(args[1]) or clip(*args))
    quality.run(QualitySettings(tokens=str(tokens), **settings, seeds=[1, 2], control=True))
    assert norms == [1.0] * 20, "each step of four plain runs is clipped"
    rows = {(row["seed"], row["trained_by"]): row["loss_curve"] for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == [(seed, name) for seed in (1, 2) for name in ("fast", "plain", "control")]
    for seed in (1, 2):
        fast, plain, control = (rows[seed, name] for name in ("fast", "plain", "control"))
        assert len(fast) == 5 and fast == pytest.approx(plain, abs=2e-3) and control == pytest.approx(plain, abs=2e-3)
        assert abs(fast[0] - fast[1]) > 5e-3, "steps that differ by more than the two trainers do"
    assert rows[1, "fast"] != pytest.approx(rows[2, "fast"], abs=2e-3)
    ends = [rows[seed, name][-1] for name in ("fast", "plain") for seed in (1, 2)]
    assert f"fast {(sum(ends[:2]) - sum(ends[2:])) / 2:+.4f}, control" in capsys.readouterr().out


def test_fp8_follows_bf16_from_the_same_weights(tokens, capsys):
    out = tokens / "quality.json"
    settings = {"model_name": "gpt2-nano", "context_length": 32, "batch": 2, "steps": 10, "device": "cpu", "out": out}
    above = quality.compare(QualitySettings(tokens=str(tokens), **settings, fp8=True, control=True))
    rows = {row["trained_by"]: row["loss_curve"] for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["bf16", "fp8", "control"] and f"fp8 {above:+.4f}, control" in capsys.readouterr().out
    for name in ("fp8", "control"):
        assert rows[name] == pytest.approx(rows["bf16"], abs=0.01) and rows[name] != rows["bf16"]
    assert above == pytest.approx(rows["fp8"][-1] - rows["bf16"][-1]), "the last tenth"
    assert abs(rows["bf16"][0] - rows["bf16"][1]) > 0.02, "steps that differ by more than the precisions do"


@pytest.mark.parametrize(
    ("device", "length", "problem"),
    [
        ("cpu", 24, "multiples of 16, unlike with model.context_length=24"),
        ("cuda", 32, "from Ada or Hopper on, not A100"),
    ],
)
def test_fp8_is_refused_before_the_run_in_bf16(tokens, monkeypatch, device, length, problem):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "A100")
    monkeypatch.setattr(precision, "has_fp8", lambda place: False)
    monkeypatch.setattr(quality, "curves_of_precisions", lambda *_: pytest.fail("a run has begun"))
    settings = QualitySettings(tokens=str(tokens), device=device, context_length=length, fp8=True)
    with pytest.raises(UserError, match=rf"fp8=true does not run \(.*{problem}\); use a GPU from Ada or Hopper on and"):
        quality.run(settings)


@pytest.mark.parametrize(("above", "code"), [(0.009, None), (-0.009, None), (0.011, 1), (-0.02, 1), (float("nan"), 1)])
def test_exit_status_tells_whether_the_fast_runs_end_elsewhere(monkeypatch, above, code):
    monkeypatch.setattr(quality, "compare", lambda settings: above)
    with nullcontext() if code is None else pytest.raises(SystemExit) as ended:
        quality.run(QualitySettings(tokens="tokens"))
    assert code is None or ended.value.code == code


def test_losses_that_are_not_finite_are_written_as_null(tokens, monkeypatch):
    out = tokens / "quality.json"
    monkeypatch.setattr(quality, "curves_of_steps", lambda *_: [("fast", [1.0, float("nan")]), ("plain", [1.0, 2.0])])
    above = quality.compare(QualitySettings(tokens=str(tokens), device="cpu", steps=2, out=out))
    assert above != above and json.loads(out.read_text())["rows"][0]["loss_curve"] == [1.0, None]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"seeds": []}, r"seeds=\[\] is empty"),
        ({"seeds": [2**32]}, r"seeds=\[4294967296\] is too large"),
        ({"device": "tpu"}, "device=tpu is unknown; choose one of cuda, cpu"),
        ({"model_name": "gpt5"}, "model_name=gpt5 is unknown; choose one of gpt2, "),
    ],
)
def test_impossible_settings_are_refused(given, sentence):
    with pytest.raises(UserError, match=sentence):
        quality.run(QualitySettings(tokens="tokens", **given))


def test_unsuitable_token_files_are_refused_by_the_name_of_this_programs_setting(tokens):
    refused = {
        "nowhere": r"tokens=nowhere cannot be used \(nowhere/train\.bin does not exist\); give a folder of GPT-2",
        str(tokens): f"tokens={tokens} cannot be used .train.bin holds 4000 tokens, but one window takes 4001.; give",
    }
    for folder, sentence in refused.items():
        with pytest.raises(UserError, match=f"^{sentence}"):
            quality.run(QualitySettings(tokens=folder, device="cpu", context_length=4000))
