"""Ranks of processes, and how the processes join, agree, and end if one of them fails."""

import signal
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from errors import UserError
from tests.e2e import train
from tests.several import ended, torchrun
from trainer.distributed.world import PLACE, World, choose_parallel, join
from trainer.signals import StopRequest

pytest_plugins = ["tests.e2e"]


@pytest.mark.parametrize(
    ("asked", "launched", "sentence"),
    [
        ("dp", None, "parallel=dp is unknown; choose one of none, ddp, fsdp, hsdp"),
        ("fsdp", None, "parallel=fsdp needs a process for each GPU; start torchrun --nproc_per_node"),
        ("none", 2, "parallel=none does not fit 2 processes; remove parallel=none"),
    ],
)
def test_a_setting_that_does_not_fit_the_launcher_is_refused(monkeypatch, asked, launched, sentence):
    if launched:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(launched))
    with pytest.raises(UserError, match=sentence):
        choose_parallel(asked)


def test_a_single_process_joins_nobody_and_several_default_to_ddp(monkeypatch):
    assert choose_parallel(None) == "none"
    monkeypatch.setenv("RANK", "0")
    for size, expected in ((1, "none"), (2, "ddp")):
        monkeypatch.setenv("WORLD_SIZE", str(size))
        assert choose_parallel(None) == expected


@pytest.mark.parametrize("place", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}])
def test_an_incomplete_environment_is_refused(monkeypatch, place):
    for key, value in place.items():
        monkeypatch.setenv(key, value)
    missing = "torchrun.s environment lacks .*LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; start the program with"
    with pytest.raises(UserError, match=missing), join(None, "cpu", timeout_s=3):
        pass


@pytest.mark.parametrize("key", PLACE)
def test_a_variable_that_is_not_a_number_is_refused(monkeypatch, key):
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"} | {key: "a"}
    for name, value in (place | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    sentence = f"^{key}=a is not an integer of at least [01]; start the program with torchrun, or unset {key}$"
    with pytest.raises(UserError, match=sentence), join(None, "cpu", timeout_s=3):
        pass


WRONG = {key: ("a", 0) for key in ("RANK", "SLURM_STEP_NUM_TASKS", "TORCHELASTIC_RESTART_COUNT")}
WRONG |= {"WORLD_SIZE": ("a", 1), "LOCAL_WORLD_SIZE": ("0", 1)}


@pytest.mark.parametrize("key", WRONG)
def test_a_single_process_too_is_told_which_variable_is_wrong(workplace, monkeypatch, key):
    """Some ended in a traceback of int, and LOCAL_WORLD_SIZE only when the run was stopped."""
    value, least = WRONG[key]
    monkeypatch.setenv(key, value)
    outcome = train("run", "train.max_steps=1")
    sentence = (
        f"error: {key}={value} is not an integer of at least {least}; start the program with torchrun, or unset {key}\n"
    )
    assert (outcome.code, outcome.err) == (2, sentence)


def test_tasks_of_srun_without_ranks_are_refused(monkeypatch):
    """Except with parallel=none, with a single task, and with ranks of torchrun or submitit."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    for asked in (None, "ddp"):
        with pytest.raises(UserError, match="srun started 8 tasks without ranks; .* torchrun .* hydra/launcher=slurm"):
            choose_parallel(asked)
    assert choose_parallel("none") == "none"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert choose_parallel(None) == "none"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert choose_parallel(None) == "ddp"


def test_a_signal_while_processes_agree_counts_the_next_time(monkeypatch):
    """The other processes have agreed on no signal, and take another step with this process."""
    stop = StopRequest(World(size=2, parallel="ddp"))
    monkeypatch.setattr(dist, "all_reduce", lambda *_: setattr(stop, "signal", signal.SIGTERM))
    assert [stop.is_requested(), stop.is_requested()] == [False, True]


def test_each_process_draws_its_own_dropout_and_the_first_draws_as_a_single_process():
    def drawn(rank: int, seed: int = 7) -> Tensor:
        torch.manual_seed(1)
        World(rank, size=3, parallel="ddp").draw_apart(seed)
        return torch.rand(4)

    torch.manual_seed(1)
    draws = [torch.rand(4), drawn(1), drawn(2), drawn(1, seed=8), drawn(2, seed=8)]
    assert torch.equal(drawn(0), draws[0])
    assert not any(torch.equal(a, b) for a, b in combinations(draws, 2))


FAULT = """
import sys, time, torch
from trainer.distributed.world import join
try:
    with join("ddp", "cpu", timeout_s=10) as world:
        world.sum(torch.ones(()))
        if world.rank == 1:
            {fault}
        world.sum(torch.ones(()))
except Exception as error:
    sys.exit(f"{{type(error).__name__}} of process {{world.rank}}: {{error}}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sentences"),
    [
        ("raise ValueError('no disk')", ["ValueError of process 1: no disk"]),
        ("time.sleep(60)", ["process 0 of 2 lost another process, or waited more than train.timeout_s=10 seconds"]),
    ],
    ids=["it fails", "it hangs"],
)
def test_an_error_of_one_process_ends_all_and_is_shown(tmp_path, fault, sentences):
    (tmp_path / "job.py").write_text(FAULT.format(fault=fault))
    job = torchrun(2, str(tmp_path / "job.py"))
    _, err = ended(job, timeout_s=100)
    assert job.returncode != 0
    assert [sentence for sentence in sentences if sentence not in err] == []
