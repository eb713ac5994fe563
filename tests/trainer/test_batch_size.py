"""train.batch_size=auto: the search, and a run on a CPU with the memory of a made-up GPU."""

import itertools
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from conf.schema import Config
from errors import UserError
from tests.e2e import TINY, curve, load, run, train
from trainer import batch_size
from trainer.batch_size import SIZES, candidates, check_batch_size, largest_fitting, trial_settings, with_batch_size
from trainer.config import TrainConfig
from trainer.distributed.world import World
from trainer.precision import Compute

pytest_plugins = ["tests.e2e"]

AUTO = TrainConfig(batch_size="auto")
CPU, GPU = (Compute(torch.device(kind), torch.float32) for kind in ("cpu", "cuda"))
LOSSES = ("train/loss", "train/grad_norm", "train/lr", "val/loss")
DIVISORS = [n for n in range(1, 481) if 480 % n == 0]


@pytest.mark.parametrize("sizes", [SIZES, DIVISORS, [1], [3, 9, 300]], ids=["any size", "divisors of 480", "1", "few"])
def test_the_search_finds_the_largest_size_in_a_few_trials(sizes):
    for limit in [*range(40), 63, 64, 65, 127, 128, 300, 479, 480, 1000]:
        trials = []
        found = largest_fitting(sizes, lambda size, limit=limit, trials=trials: trials.append(size) or size <= limit)
        assert found == max((size for size in sizes if size <= limit), default=None), limit
        doublings = max(1, 2 + math.floor(math.log2(max(limit, 8) / 8)))
        assert len(trials) == len(set(trials)) <= doublings + 4, (limit, trials)


def test_sizes_are_at_most_an_eighth_apart():
    assert SIZES[:20] == [*range(1, 16), 16, 18, 20, 22, 24] and SIZES[-1] == 2**20
    assert all(low < high <= low + max(1, low / 8) for low, high in itertools.pairwise(SIZES))


@pytest.mark.parametrize(
    ("settings", "processes", "expected"),
    [
        ({}, 1, {1: 1, 2: 2, 3: 3}),
        ({"grad_accumulation": 5}, 1, {1: 1, 2: 2, 3: 3}),
        ({}, 4, {1: 4, 2: 8, 3: 12}),
        ({"grad_accumulation": 8}, 4, {1: 1, 2: 2, 3: 3}),
        ({"grad_accumulation": 3}, 2, {1: 2, 3: 4, 5: 10}),
        ({"global_batch_size": 12}, 1, {1: 1, 2: 2, 3: 3, 4: 4, 6: 6, 12: 12}),
        ({"global_batch_size": 12}, 2, {1: 1, 2: 2, 3: 3, 6: 6}),
        ({"global_batch_size": 12, "grad_accumulation": 3}, 1, {4: 4}),
    ],
    ids=str,
)
def test_candidates_are_settings_that_the_processes_can_share(settings, processes, expected):
    """The keys are sizes of a device's micro-batch, and the values are settings train.batch_size."""
    found = candidates(replace(AUTO, **settings), processes)
    assert dict(list(found.items())[: len(expected)]) == expected
    assert "global_batch_size" not in settings or found == expected
    for size, number in list(found.items())[:50]:
        assert replace(AUTO, **settings, batch_size=number).share(processes)[0] == size


@pytest.mark.parametrize(
    ("settings", "compute", "sentence"),
    [
        ({}, CPU, "train.batch_size=auto needs a GPU; set a number"),
        (
            {},
            replace(GPU, world=World(0, 2, "fsdp")),
            "auto does not work with parallel=fsdp, because .*; set a number",
        ),
        (
            {"global_batch_size": 9},
            replace(GPU, world=World(0, 2, "ddp")),
            "train.global_batch_size=9 does not divide among 2",
        ),
        ({"global_batch_size": 9, "grad_accumulation": 2}, GPU, "9 micro-steps, not train.grad_accumulation=2; leave"),
        (
            {"batch_size": 9},
            replace(CPU, world=World(0, 2, "ddp")),
            "train.global_batch_size=9 does not divide among 2",
        ),
    ],
    ids=["a CPU", "fsdp", "too few sequences", "no divisor", "a number"],
)
def test_what_cannot_be_is_refused_at_once(settings, compute, sentence):
    with pytest.raises(UserError, match=sentence):
        check_batch_size(replace(AUTO, **settings), compute)


def test_two_micro_steps_stand_for_all():
    """ddp keeps its gradients from step to step, so a trial without ddp must have gradients in the forward pass."""
    settings = replace(AUTO, global_batch_size=480)
    assert (trial := trial_settings(settings, 24, 24, GPU)).share(1) == (24, 2) and trial.global_batch_size is None
    assert trial_settings(settings, 480, 480, GPU).share(1) == (480, 1)
    assert trial_settings(AUTO, 3, 6, replace(GPU, world=World(0, 2, "ddp"))).share(1) == (3, 2)


@dataclass(frozen=True)
class PairedWorld(World):
    """This process and another one, which runs out of memory above 20 sequences."""

    def largest(self, number: int) -> int:
        return max(number, int(TRIED[-1] > 20))


TRIED = []


def small_memory(monkeypatch, limit: int, after=lambda *args: None) -> list[int]:
    """Let trials above `limit` sequences run out of memory at their end, and return the list of trials."""
    TRIED.clear()

    def take_trial_steps(config, *args):
        TRIED.append(config.train.batch_size)
        after(config, *args)
        if config.train.batch_size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(batch_size, "limited_memory", lambda settings: nullcontext())
    monkeypatch.setattr(batch_size, "free_memory", lambda compiled: None)  # collecting garbage takes a second
    monkeypatch.setattr(batch_size, "take_trial_steps", take_trial_steps)
    return TRIED


def search(settings: TrainConfig, compute: Compute) -> TrainConfig:
    return with_batch_size(Config(train=settings), compute, None, None)


def test_all_processes_take_the_least_that_fits_in_one(monkeypatch, capsys):
    small_memory(monkeypatch, limit=32)
    settings = replace(AUTO, compile=False)
    assert search(settings, replace(CPU, world=PairedWorld(0, 2, "ddp"))).batch_size == 40  # 20 in each
    assert (
        capsys.readouterr().out == "train.batch_size=auto: train.batch_size=40 after trials of 8, 16, 32, 24, 20, 22\n"
    )
    assert search(settings, replace(CPU, world=PairedWorld(1, 2, "ddp"))).batch_size == 40
    assert capsys.readouterr().out == ""
    assert search(replace(settings, global_batch_size=480), CPU) == replace(
        settings, batch_size=32, global_batch_size=480
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {},
            "train.batch_size=1 fits on this GPU; set train.activation_checkpointing=full, or a shorter model.context",
        ),
        ({"activation_checkpointing": "full"}, "fits on this GPU; set a shorter model.context_length or a smaller m"),
        ({"cuda_graphs": True}, "set train.cuda_graphs=false, or train.activation_checkpointing=full, or a shorter"),
    ],
    ids=str,
)
def test_a_gpu_on_which_nothing_fits_is_refused(monkeypatch, settings, sentence):
    tried = small_memory(monkeypatch, limit=0)
    with pytest.raises(UserError, match=f"train.batch_size=auto: not even .*{sentence}"):
        search(replace(AUTO, compile=False, **settings), CPU)
    assert tried == [8, 4, 2, 1]


def test_other_errors_end_the_search(monkeypatch):
    def fail(*_):
        raise RuntimeError("the kernel is wrong")

    small_memory(monkeypatch, limit=9, after=fail)
    with pytest.raises(RuntimeError, match="the kernel is wrong"):
        search(replace(AUTO, compile=False), CPU)


RUN = ("model.dropout=0.1", "train.grad_accumulation=2", "checkpoint.interval=3", "train.max_steps=6")


def test_a_run_is_the_same_as_with_the_number_and_resumes_without_a_search(workplace, monkeypatch):
    """The trials take real steps, and the last trial runs out of memory."""
    train("given", *RUN, "train.batch_size=6").ok()
    tried = small_memory(monkeypatch, limit=6, after=batch_size.take_trial_steps)
    monkeypatch.setattr(batch_size, "check_batch_size", lambda settings, compute: None)
    same_line = (*TINY, *RUN, "train.batch_size=auto", "hydra.run.dir=auto", "checkpoint.resume=auto")
    begun = run("train.py", *same_line, "checkpoint.keep=9").ok()
    assert "train.batch_size=auto: train.batch_size=6 after trials of 8, 4, 6, 7\n" in begun.out and len(tried) == 4
    assert OmegaConf.load("auto/config.yaml").train.batch_size == 6
    assert curve("auto", *LOSSES) == curve("given", *LOSSES)

    def state(folder: str) -> dict:
        return load(Path(folder, "checkpoints/step-00000006.pt"))

    def assert_same_end() -> None:
        assert state("auto")["config"]["train"] == state("given")["config"]["train"]
        ours, theirs = state("auto"), state("given")
        torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
        torch.testing.assert_close(ours["optimizer"], theirs["optimizer"], rtol=0, atol=0)
        assert torch.equal(ours["rng"][0]["torch"], theirs["rng"][0]["torch"])
        assert all(ours["rng"][0][kind] == theirs["rng"][0][kind] for kind in ("python", "numpy"))

    assert_same_end()
    Path("auto/checkpoints/step-00000006.pt").unlink()
    Path("auto/checkpoints/best.pt").unlink()
    resumed = run("train.py", *same_line).ok()
    assert "continuing after step 3" in resumed.out and "train.batch_size" not in resumed.out and len(tried) == 4
    assert_same_end()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("auto", "train.batch_size=auto needs a GPU; set a number"),
        ("many", "train.batch_size=many is not a number; set a number, or auto on a GPU"),
        ("0", "train.batch_size=0 is out of range; give at least 1"),
        ("1.5", "train.batch_size=1.5 has the wrong type; give a value of type int | str"),
        ("true", "train.batch_size=True has the wrong type; give a value of type int | str"),
    ],
)
def test_the_command_line_takes_a_number_or_auto(workplace, value, sentence):
    refused = train("run", f"train.batch_size={value}")
    assert refused.code == 2 and sentence in refused.err and not Path("run").exists()


@pytest.mark.gpu
def test_a_run_on_a_gpu_is_the_same_as_with_the_number(workplace, monkeypatch):
    monkeypatch.setattr(batch_size, "MEMORY_SHARE", 0.02)
    options = ("device=cuda", "train.compile=false", "train.max_steps=3", "train.deterministic=true")
    begun = train("auto", *options, "train.batch_size=auto").ok()
    assert "after trials of 8, 16, 32" in begun.out
    number = OmegaConf.load("auto/config.yaml").train.batch_size
    train("given", *options, f"train.batch_size={number}").ok()
    assert curve("auto", *LOSSES) == curve("given", *LOSSES)
