"""Several processes on one machine's CPU, joined by gloo: they train what one process trains."""

import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from conf.schema import TrainConfig
from errors import UserError
from tests.e2e import curve, load, rows, run, train, write_tokens
from tests.several import ended, torchrun, train_on_two_nodes, train_together
from trainer.checkpoint import find
from trainer.distributed import World, choose_parallel
from trainer.parallel import shard
from trainer.precision import Compute

pytest_plugins = ["tests.e2e"]
pytestmark = pytest.mark.xdist_group("several processes")  # its runs are launched once

# 16 sequences a step, in micro-steps of 2; 13 windows of validation, which divide among no number of processes.
GLOBAL = "train.batch_size=2 train.grad_accumulation=8 train.eval_tokens=416 train.eval_interval=3 train.max_steps=6"
GLOBAL += " optimizer.grad_clip=0.5 checkpoint.interval=3"
LOSSES = ("train/loss", "train/grad_norm", "train/lr", "val/loss")


def assert_same_curve(found: Path, expected: Path, after: int = 0) -> None:
    """To fp32 rounding; `found` began after so many steps."""
    for (step, *ours), (_, *theirs) in zip(curve(found, *LOSSES), curve(expected, *LOSSES)[after:], strict=True):
        assert ours == [value if value is None else pytest.approx(value, rel=2e-5) for value in theirs], step


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder of one run by one process and the same by several, in as few launches as can be."""
    folder, resume = tmp_path_factory.mktemp("runs"), "checkpoint.resume={}/checkpoints/step-00000003.pt"
    write_tokens(folder / "tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train("alone", *GLOBAL.split()).ok()
        train_together(
            2,
            f"ddp {GLOBAL}",
            f"ddp_after_alone {GLOBAL} {resume.format('alone')}",
            f"fsdp {GLOBAL} parallel=fsdp train.activation_checkpointing=full",
            f"terminated {GLOBAL} checkpoint.interval=100",
        )
        train_on_two_nodes(
            2, f"four {GLOBAL}", f"hsdp_after_fsdp {GLOBAL} parallel=hsdp {resume.format('fsdp')} train.sample_tokens=5"
        )
        train("alone_after_fsdp", *GLOBAL.split(), resume.format("fsdp")).ok()
        yield folder


@pytest.mark.parametrize(
    ("folder", "after"),
    [("ddp", 0), ("fsdp", 0), ("four", 0), ("ddp_after_alone", 3), ("hsdp_after_fsdp", 3), ("alone_after_fsdp", 3)],
)
def test_neither_the_number_of_processes_nor_the_way_they_share_the_work_changes_the_curve(runs, folder, after):
    assert_same_curve(runs / folder, runs / "alone", after)


def test_the_first_process_alone_logs_and_saves(runs):
    """On two nodes too: 16 sequences of 32 tokens a step, whoever read them."""
    for folder in ("ddp", "four"):
        logged = rows(runs / folder)
        assert [(row["step"], row["tokens"]) for row in logged] == [(step, step * 16 * 32) for step in range(1, 7)]
        assert load(runs / folder / "checkpoints" / "step-00000006.pt")["loader"]["position"] == 6 * 16


def test_a_signal_to_one_process_stops_all_after_the_same_step(runs):
    assert [step for step, *_ in curve(runs / "terminated")] == [1, 2, 3]
    assert load(find(runs / "terminated"))["step"] == 3


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


def test_fp16_is_not_split():
    compute = Compute(torch.device("cpu"), torch.float16, World(size=2, parallel="fsdp"))
    with pytest.raises(UserError, match="precision=fp16 does not go with parallel=fsdp; set precision=bf16"):
        shard(nn.Linear(1, 1), compute, reshard_after_forward=True)


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
