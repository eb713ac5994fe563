"""Faults injected into whole runs on a CPU: one clear sentence each, and nothing is lost."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from model.gpt2 import GPT2
from tests.e2e import at_call, curve, largest_file, load, run, train
from trainer.checkpoint import single
from trainer.checkpoint.files import CheckpointError
from trainer.folders import claimed

pytest_plugins = ["tests.e2e"]

LOSSES = ("train/loss", "train/grad_norm", "val/loss")
EACH_5 = ("train.max_steps=20", "checkpoint.interval=5", "checkpoint.dir=kept")


def fill_disk_at(monkeypatch, *names: str) -> None:
    """Let the disk be full whenever a checkpoint with one of these names is written."""
    write = single.write_file

    def write_on_a_full_disk(path, state):
        with largest_file(1000 if path.name in names else 2**40):
            write(path, state)

    monkeypatch.setattr(single, "write_file", write_on_a_full_disk)


def test_a_disk_that_refuses_the_files_of_a_resumed_run_leaves_the_old_ones(workplace):
    train("run", "train.max_steps=30").ok()
    files = [Path("run/config.yaml"), Path("run/metrics.jsonl")]
    before = [file.read_bytes() for file in files]
    for size in (1000, len(before[0]) + 500):  # the settings do not fit, or only the rows do not
        with largest_file(size):
            outcome = train("run", "checkpoint.resume=auto", "train.max_steps=40")
        assert outcome.code == 2 and "error: the disk cannot be used (File too large); make room" in outcome.err
        assert files[1].read_bytes() == before[1]
        assert size > 1000 or files[0].read_bytes() == before[0]


def test_full_disk_stops_the_run_with_the_checkpoint_to_continue(workplace, monkeypatch):
    train("whole", *EACH_5[:2]).ok()
    fill_disk_at(monkeypatch, "step-00000015.pt")
    outcome = train("run", *EACH_5)
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2
    assert "step-00000015.pt cannot be written (File too large); free some space, then continue with" in sentence
    assert not list(Path("kept").glob("*.partial"))
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    words = sentence.partition("continue with ")[2].split()
    assert words == ["checkpoint.resume=kept/step-00000010.pt", "hydra.run.dir=run", "checkpoint.dir=kept"]
    run("train.py", *words).ok()
    assert curve("run", *LOSSES) == curve("whole", *LOSSES)


def test_full_disk_is_told_and_training_goes_on_where_that_is_asked_for(workplace, monkeypatch):
    train("whole", *EACH_5[:2]).ok()
    fill_disk_at(monkeypatch, "step-00000015.pt", "best.pt")
    outcome = train("run", *EACH_5, "checkpoint.on_error=continue").ok()
    told = [line for line in outcome.out.splitlines() if "training continues" in line]
    assert len([line for line in told if "step-00000015.pt cannot be written" in line]) == 1
    assert sorted(path.name for path in Path("kept").iterdir()) == ["step-00000010.pt", "step-00000020.pt"]
    assert curve("run", *LOSSES) == curve("whole", *LOSSES)


def test_run_does_not_end_well_without_its_last_checkpoint(workplace, monkeypatch):
    fill_disk_at(monkeypatch, "step-00000020.pt", "best.pt")
    outcome = train("run", *EACH_5, "checkpoint.on_error=continue")
    assert outcome.code == 2 and outcome.err.startswith("error: kept/step-00000020.pt cannot be written")


def test_a_file_that_cannot_be_read_is_told_in_one_sentence(workplace, monkeypatch):
    def refuses(*args):
        raise PermissionError(errno.EACCES, "Permission denied", "tokens/train.bin")

    monkeypatch.setattr("data.tokens.open_tokens", refuses)
    outcome = train("run")
    assert outcome.code == 2 and outcome.err.startswith("error: tokens/train.bin cannot be used (Permission denied); ")
    assert "tokens to data.dir=..." in outcome.err and len(outcome.err.splitlines()) == 1
    assert not Path("run").exists() or os.listdir("run") == []


def test_damaged_checkpoint_is_passed_over_by_the_run_that_resumes(workplace):
    train("whole", *EACH_5[:2]).ok()
    train("run", *EACH_5).ok()
    newest = Path("kept/step-00000020.pt")
    newest.write_bytes(newest.read_bytes()[:-1])
    outcome = train("run", *EACH_5, "checkpoint.resume=auto").ok()
    (line,) = [line for line in outcome.out.splitlines() if " instead" in line]
    assert "step-00000020.pt" in line and "cut off" in line and line.endswith("step-00000015.pt instead")
    assert "continuing after step 15" in outcome.out
    assert curve("run", *LOSSES) == curve("whole", *LOSSES)
    assert load(newest)["step"] == 20


CUDA_ERROR = "CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has a total capacity of 8 GiB of which. See elsewhere."


@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (MemoryError(), "out of memory (MemoryError); choose"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            "out of memory (DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes);",
        ),
        (RuntimeError("CUDA error: out of memory\nmore"), "out of GPU memory (CUDA error: out of memory);"),
        (torch.OutOfMemoryError(CUDA_ERROR), "out of GPU memory (CUDA out of memory. Tried to allocate 9 GiB);"),
    ],
)
def test_a_set_up_without_the_memory_ends_with_a_sentence(workplace, monkeypatch, error, begins):
    """A step that runs out of memory names its sizes: see tests/trainer/test_memory.py."""

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(GPT2, "to", refuse)
    outcome = train("run")
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2 and sentence.startswith(f"error: {begins}")
    assert sentence.endswith("or another device; in training, lower train.batch_size or model.context_length")


def test_two_runs_do_not_write_into_one_folder(workplace):
    train("whole", *EACH_5[:2]).ok()
    before = Path("whole/metrics.jsonl").read_bytes()
    for claim in ({Path("whole"): "hydra.run.dir"}, {Path("whole/checkpoints"): "checkpoint.dir"}):
        (setting,) = claim.values()
        resume = ("checkpoint.resume=auto", "checkpoint.dir=whole/checkpoints", "train.max_steps=30")
        with claimed(claim):
            outcome = train("whole", *resume)
        assert outcome.code == 2
        assert f"{setting}={next(iter(claim)).resolve()} is used by another run; wait for it" in outcome.err
    assert Path("whole/metrics.jsonl").read_bytes() == before
    train("whole", *resume).ok()
    assert not list(Path("whole").rglob(".lock"))


@pytest.mark.parametrize("setting", ["hydra.run.dir", "checkpoint.dir"])
@pytest.mark.parametrize("place", ["/sys/kernel", "tokens/train.bin/run"], ids=["read-only", "below a file"])
def test_folder_that_cannot_be_written_to_is_refused(workplace, setting, place):
    outcome = train("run", f"{setting}={place}")
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2 and place in sentence and setting in sentence, sentence
    assert not any(Path().glob("run/**/*"))


def test_a_folder_that_refuses_in_the_end_does_not_hide_for_what_the_run_ended(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with pytest.raises(CheckpointError, match="no room"), claimed({tmp_path / "run": "hydra.run.dir"}):
        monkeypatch.setattr(Path, "unlink", refuse)
        raise CheckpointError("no room")


def test_a_run_that_torchrun_starts_again_and_that_begins_anew_says_so(workplace, monkeypatch):
    told = "torchrun restarted the processes, and this run begins again"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert told in train("run").ok().out
    assert told not in train("again", "checkpoint.resume=auto", "checkpoint.dir=new").ok().out


@pytest.mark.parametrize("split", ["train", "val"])
def test_token_file_cut_while_training_loses_no_step(workplace, monkeypatch, split):
    train("whole", "train.max_steps=20", "train.grad_accumulation=2").ok()
    kept = Path(f"tokens/{split}.bin").read_bytes()
    cut = at_call(10, lambda: os.truncate(f"tokens/{split}.bin", 1024), GPT2.forward)
    monkeypatch.setattr(GPT2, "forward", cut)
    outcome = train("run", "train.max_steps=20", "train.grad_accumulation=2")
    (sentence,) = outcome.err.splitlines()
    assert f"{split}.bin went from {len(kept)} to 1024 bytes while in use" in sentence
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    Path(f"tokens/{split}.bin").write_bytes(kept)
    saved = re.search(r"The state is saved in (\S+step-\d+\.pt)\.$", sentence).group(1)
    assert curve("run", *LOSSES[:2])[-1] == curve("whole", *LOSSES[:2])[load(saved)["step"] - 1]
    train("run", f"checkpoint.resume={saved}", "train.max_steps=20", "train.grad_accumulation=2").ok()
    assert curve("run", *LOSSES)[-10:] == curve("whole", *LOSSES)[-10:]
