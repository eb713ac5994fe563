"""bench.parity with made-up runs."""

import json
import subprocess
from pathlib import Path

import pytest

from bench import parity
from bench.parity import ParitySettings
from errors import UserError


def write_run(folder, val_losses, speeds=(10, 20, 30, 50, 40)):
    """Write a run of five steps: training rows as train.py logs them, with validation rows between them."""
    lines = [
        {
            "step": step,
            "tokens": 100 * step,
            "train/loss": 10.0 - step,
            "perf/step_ms": 1000 / speed,
            "perf/tokens_per_second": speed,
            "perf/tflops": 2.0 * speed,
            "memory/peak_allocated_gib": 1.5 if step == 2 else 1.0,
        }
        for step, speed in enumerate(speeds, start=1)
    ]
    lines += [{"step": 5, "tokens": 500, "val/loss": loss} for loss in val_losses]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_is_the_medians_of_its_second_half_and_its_last_validation_loss(tmp_path):
    row = parity.summarise("flash2", write_run(tmp_path / "run", [9.0, 4.25]))
    # of the speeds 10, 20, 30, 50 and 40 the second half is 30, 50 and 40
    assert (row["tokens_per_second"], row["step_ms"], row["tflops"]) == (40, 25, 80)
    assert (row["variant"], row["steps"], row["tokens"], row["val_loss"], row["peak_gib"]) == (
        "flash2",
        5,
        500,
        4.25,
        1.5,
    )
    assert row["mfu"] is row["data_wait_fraction"] is None
    assert row["loss_curve"] == [(1, 9), (2, 8), (3, 7), (4, 6), (5, 5)] and row["val_curve"] == [(5, 9), (5, 4.25)]


def compare(losses, tmp_path, monkeypatch, **settings):
    """Run bench.parity with runs that end in the given validation losses, and check the written file."""
    out = tmp_path / "parity.json"
    monkeypatch.setattr(parity, "train", lambda variant, folder, settings: write_run(folder, [losses[variant]]))
    monkeypatch.chdir(tmp_path)
    try:
        parity.run(ParitySettings(variants=list(losses), settings=["device=cpu"], out=out, **settings))
    finally:
        written = json.loads(out.read_text())
        assert {row["variant"]: row["val_loss"] for row in written["rows"]} == losses
        assert written["environment"]["torch"]


def test_runs_within_the_tolerance_pass(tmp_path, monkeypatch, capsys):
    compare({"naive": 4.0, "sdpa": 4.019, "flash2": 4.01}, tmp_path, monkeypatch)
    assert "spread over 0.0190 nats (at most 0.02 wanted)" in capsys.readouterr().out


def test_runs_beyond_the_tolerance_fail_and_are_written(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        compare({"naive": 4.0, "sdpa": 4.021, "flash2": 4.01}, tmp_path, monkeypatch)
    assert stop.value.code == 1
    assert "spread over 0.0210 nats" in capsys.readouterr().out


def test_without_a_tolerance_all_runs_pass(tmp_path, monkeypatch, capsys):
    compare({"naive": 4.0, "sdpa": 5.0}, tmp_path, monkeypatch, tolerance=None)
    assert "spread over 1.0000 nats; written to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "files"),
    [({}, ["parity.json", "parity.json.old"]), ({"variants": ["sdpa", "flash2"]}, ["parity.json"])],
)
def test_only_the_default_variants_replace_the_published_results(given, files, tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "train", lambda variant, folder, settings: write_run(folder, [4.0]))
    monkeypatch.setattr(parity, "results_folder", lambda gpu: tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parity.json").write_text("published")
    parity.run(ParitySettings(settings=["device=cpu"], **given))
    assert sorted(file.name for file in tmp_path.glob("parity*")) == files
    assert (tmp_path / files[-1]).read_text() == "published"


def test_settings_after_two_dashes_go_to_train_py(tmp_path, monkeypatch, capsys):
    """A failed run ends the program without a traceback, and does not write results."""
    out, commands = tmp_path / "parity.json", []

    def run(command, **_):
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 2)

    monkeypatch.setattr(parity.subprocess, "run", run)
    own = ["variants=['sdpa:data.document_mask=true optimizer=muon']", "steps=10", f"out={out}"]
    passed_on = ["device=cpu", "data=tokens", "data.dir=with a blank, and 'quotes'"]
    monkeypatch.setattr("sys.argv", ["parity", *own, "--", *passed_on])
    with pytest.raises(SystemExit) as ended:
        parity.main()
    assert ended.value.code == 2 and not out.exists()
    assert "error: train.py ended with status 2 for sdpa:data" in capsys.readouterr().err
    fixed = ["attention=sdpa", "train.max_steps=10", "wandb.mode=disabled"]
    [command] = commands
    (folder,) = [part for part in command if part.endswith("_parity/sdpa-data-document_mask-true-optimizer-muon")]
    assert command == [
        "train.py",
        *parity.RECIPE,
        *passed_on,
        *fixed,
        folder,
        "data.document_mask=true",
        "optimizer=muon",
    ]


@pytest.mark.parametrize("setting", ["data=tokens", "+train.batch_size=4", "experiment=gpt2-124m"])
def test_a_setting_of_train_py_before_the_dashes_is_refused(setting, monkeypatch, capsys):
    """The advice was to leave it out."""
    monkeypatch.setattr("sys.argv", ["parity", "steps=4", setting, "--", "device=cpu"])
    with pytest.raises(SystemExit, match="2"):
        parity.main()
    sentence = f"{setting} is not a setting of bench.parity; settings of train.py come after --"
    assert capsys.readouterr().err == f"error: {sentence}\n"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"variants": ["naive", "flash3"]}, "variants=flash3 is unknown; choose one of naive, sdpa,"),
        ({"variants": []}, r"variants=\[\] is empty"),
        ({"steps": 1}, "steps=1 leaves no step to time"),
        ({"steps": 2**60}, "steps=1152921504606846976 is too large"),
        ({"settings": []}, "bench.parity finds no GPU; add -- device=cpu"),
        (
            {"settings": ["device=cpu", "train.max_steps=5"]},
            "train.max_steps=5 is set by bench.parity itself; give",
        ),
        ({"variants": ["flash2:train.max_steps=5"]}, "train.max_steps=5 is set by bench.parity itself; give"),
        ({"settings": ["attention=sdpa"]}, "attention=sdpa is set by bench.parity itself; name"),
    ],
    ids=["unknown attention", "no attention", "one step", "too many steps", "no GPU", "steps", "attention", "variant"],
)
def test_impossible_settings_are_refused_before_training(given, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parity.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(parity, "train", lambda *_: pytest.fail("trained"))
    with pytest.raises(UserError, match=sentence):
        parity.run(ParitySettings(**{"settings": ["device=cpu"], "out": Path("rows.json")} | given))
