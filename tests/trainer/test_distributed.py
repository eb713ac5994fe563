"""Several processes on one machine's CPU, joined by gloo: they train what one process trains."""

import re
import time

import pytest

from conf.schema import TrainConfig
from errors import UserError
from tests.e2e import curve, load, rows, run, train
from tests.several import ended, torchrun, train_together
from trainer.distributed import choose_parallel

pytest_plugins = ["tests.e2e"]

# 16 sequences a step, in micro-steps of 2; 13 windows of validation, which divide among no number of processes.
GLOBAL = "train.batch_size=2 train.grad_accumulation=8 train.eval_tokens=416 train.eval_interval=4 train.max_steps=8"
GLOBAL += " optimizer.grad_clip=0.5 checkpoint.interval=4"
LOSSES = ("train/loss", "train/grad_norm", "train/lr", "val/loss")


def assert_same_curve(found: str, expected: str, after: int = 0) -> None:
    """To fp32 rounding; `found` began after so many steps."""
    for (step, *ours), (_, *theirs) in zip(curve(found, *LOSSES), curve(expected, *LOSSES)[after:], strict=True):
        assert ours == [value if value is None else pytest.approx(value, rel=2e-5) for value in theirs], step


@pytest.fixture
def alone(workplace) -> str:
    """The folder of a run by one process."""
    train("alone", *GLOBAL.split()).ok()
    return "alone"


def test_the_number_of_processes_changes_no_curve(alone):
    """Resumed runs too: of two processes after one, and of one after two."""
    resume = "checkpoint.resume={}/checkpoints/step-00000004.pt"
    train_together(2, f"two {GLOBAL}", f"two_after_one {GLOBAL} {resume.format(alone)}")
    train("one_after_two", *GLOBAL.split(), resume.format("two")).ok()
    assert_same_curve("two", alone)
    assert_same_curve("two_after_one", alone, after=4)
    assert_same_curve("one_after_two", alone, after=4)
    logged = rows("two")
    assert [row["step"] for row in logged] == list(range(1, 9))  # by the first process alone
    assert all(row["tokens"] == row["step"] * 16 * 32 for row in logged)
    position = load("two/checkpoints/step-00000008.pt")["loader"]["position"]
    assert position == load("alone/checkpoints/step-00000008.pt")["loader"]["position"] == 8 * 16


@pytest.mark.parametrize(
    ("settings", "processes", "share"),
    [
        ({"batch_size": 32, "grad_accumulation": 15}, 1, (32, 15)),
        ({"batch_size": 32, "grad_accumulation": 15}, 8, (30, 2)),
        ({"batch_size": 32, "global_batch_size": 512}, 8, (32, 2)),
        ({"batch_size": 8}, 2, (4, 1)),
        ({"batch_size": 5}, 5, (1, 1)),
    ],
    ids=str,
)
def test_the_processes_share_the_global_batch_in_equal_micro_steps(settings, processes, share):
    assert TrainConfig(**settings).share(processes) == share


@pytest.mark.parametrize(("sequences", "processes", "remedy"), [(8, 3, 9), (2, 8, 8), (10, 4, 8)])
def test_a_global_batch_that_does_not_divide_is_refused_with_one_that_does(sequences, processes, remedy):
    with pytest.raises(UserError, match=f"{sequences} sequences .* {processes} processes") as refusal:
        TrainConfig(batch_size=sequences).share(processes)
    assert int(re.search(r"global_batch_size=(\d+)", str(refusal.value))[1]) == remedy


@pytest.mark.parametrize(
    ("asked", "launched", "sentence"),
    [
        ("dp", None, "parallel=dp is unknown; choose one of none, ddp, fsdp, hsdp"),
        ("fsdp", None, "parallel=fsdp needs a process for each GPU; start it by torchrun"),
        ("none", 2, "parallel=none, but 2 processes were started"),
    ],
)
def test_a_way_that_does_not_go_with_the_launcher_is_refused(monkeypatch, asked, launched, sentence):
    if launched:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(launched))
    with pytest.raises(UserError, match=sentence):
        choose_parallel(asked)


def test_a_process_alone_joins_nobody_and_several_are_ddp(monkeypatch):
    assert choose_parallel(None) == "none"
    monkeypatch.setenv("RANK", "0")
    for size, expected in ((1, "none"), (2, "ddp")):
        monkeypatch.setenv("WORLD_SIZE", str(size))
        assert choose_parallel(None) == expected


def test_eval_only_by_several_processes_is_refused(workplace, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = run("train.py", "eval_only=true", "checkpoint=somewhere", "data=tokens", "data.dir=tokens")
    assert refused.code == 2 and "eval_only=true takes one process, and 2 were started" in refused.err


FAULT = """
import sys, time, torch
from trainer.distributed import join
try:
    with join("ddp", "cpu", timeout_s=3) as world:
        world.sum(torch.ones(()))
        if world.rank == 1:
            {fault}
        world.sum(torch.ones(()))
except Exception as error:
    sys.exit(f"{{type(error).__name__}} of process {{world.rank}}: {{error}}")
"""


@pytest.mark.parametrize(
    ("fault", "sentences"),
    [
        ("raise ValueError('no disk')", ["ValueError of process 1: no disk"]),
        ("time.sleep(60)", ["process 0 of 2 lost another, or waited for it for more than train.timeout_s=3"]),
    ],
    ids=["it fails", "it stands still"],
)
def test_one_process_that_fails_ends_the_job_with_its_error_shown(tmp_path, fault, sentences):
    (tmp_path / "job.py").write_text(FAULT.format(fault=fault))
    began = time.monotonic()
    job = torchrun(2, str(tmp_path / "job.py"))
    _, err = ended(job, timeout_s=50)
    assert job.returncode != 0 and time.monotonic() - began < 50
    assert [sentence for sentence in sentences if sentence not in err] == []
