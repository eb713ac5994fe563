"""train.batch_size=auto: the search, and a run on a CPU with the memory of a made-up GPU."""

import itertools
import re
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
from trainer.batch_size import (
    SIZES,
    candidates,
    check_batch_size,
    largest_fitting,
    limited_memory,
    trial_settings,
    with_batch_size,
)
from trainer.config import TrainConfig
from trainer.distributed.world import World
from trainer.meters import GIB
from trainer.precision import Compute

pytest_plugins = ["tests.e2e"]

AUTO = TrainConfig(batch_size="auto")
CPU, GPU = (Compute(torch.device(kind), torch.float32) for kind in ("cpu", "cuda"))
LOSSES = ("train/loss", "train/grad_norm", "train/lr", "val/loss")
DIVISORS = [n for n in range(1, 481) if 480 % n == 0]


def trials_of(sizes, largest, peak, limit) -> tuple[int | None, list[int]]:
    """Search among `sizes`, which fit up to `largest`. Return the size that was found, and the trials."""
    trials = []

    def trial(size: int) -> int | None:
        trials.append(size)
        return int(peak(size)) if size <= largest else None

    return largest_fitting(sizes, trial, int(limit)), trials


@pytest.mark.parametrize("sizes", [SIZES, DIVISORS, [1], [3, 9, 300]], ids=["any size", "divisors of 480", "1", "few"])
@pytest.mark.parametrize(
    ("peak", "slack", "most"),
    [
        (lambda n: 7 * n + 900, 0, 5),
        (lambda n: 7 * n + 900, 30, 8),
        (lambda n: 6 * n + 900, 0, 8),
        (lambda n: 7 * max(n, 20) + 900, 0, 12),
    ],
    ids=["line", "4 sequences too high", "a seventh too high", "flat below 20"],
)
def test_the_search_finds_the_largest_size_in_a_few_trials(sizes, peak, slack, most):
    """With the first law, the line tells exactly what fits. With the others, the line is too optimistic."""
    for largest in [*range(40), 63, 64, 65, 127, 128, 129, 159, 160, 161, 255]:
        found, trials = trials_of(sizes, largest, peak, limit=max(7 * largest + 900, peak(largest)) + slack)
        assert found == max((size for size in sizes if size <= largest), default=None), largest
        assert len(trials) == len(set(trials)) <= most, (largest, trials)


@pytest.mark.parametrize(
    ("sizes", "largest", "limit", "expected"),
    [
        (SIZES, 155, 75.2, (144, [4, 8, 144])),
        (SIZES, 140, 75.2, (128, [4, 8, 144, 128])),
        (SIZES, 119, 75.2, (112, [4, 8, 144, 128, 112, 120])),
        (SIZES, 5, 5, (5, [4, 8, 6, 5])),
        (SIZES, 3, 4, (3, [4, 2, 3])),
        (SIZES, 0, 1, (None, [4, 2, 1])),
        (DIVISORS, 480, 1000, (480, [4, 8, 480])),
        (DIVISORS, 5, 75.2, (5, [4, 8, 5, 6])),
        ([1, 2, 3], 3, 75.2, (3, [3])),
        ([1, 2, 4, 8, 1009], 1009, 1000, (1009, [4, 8, 1009])),
    ],
)
def test_the_trials_follow_the_line_of_a_model_like_gpt2(sizes, largest, limit, expected):
    """The largest size may be smaller than the line says, because memory is fragmented."""
    assert trials_of(sizes, largest, lambda n: (2 + 0.47 * n) * GIB, limit * GIB) == expected


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
        ({"global_batch_size": 9, "grad_accumulation": 2}, GPU, "9 micro-steps, not train.grad_accumulation=2; set"),
        (
            {"batch_size": 9},
            replace(CPU, world=World(0, 2, "ddp")),
            "train.batch_size=9 does not divide among 2",
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
    """This process and another one, which runs out of memory above 28 sequences."""

    def largest(self, number: int) -> int:
        return max(number, 2**40 if TRIED[-1] > 28 else 0)


TRIED = []


def small_memory(monkeypatch, limit: int, after=lambda *args: None) -> list[int]:
    """Let trials above `limit` sequences run out of memory at their end, and return the list of trials.

    A sequence takes 1 GiB, and torch counts 1 GiB more than a trial can have.
    """
    TRIED.clear()

    def take_trial_steps(config, *args):
        TRIED.append(config.train.batch_size)
        after(config, *args)
        if config.train.batch_size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(batch_size, "limited_memory", lambda *args: nullcontext((limit + 1) * GIB))
    monkeypatch.setattr(batch_size, "free_memory", lambda compiled: None)  # collecting garbage takes a second
    monkeypatch.setattr(batch_size, "take_trial_steps", take_trial_steps)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: TRIED[-1] * GIB)
    return TRIED


def search(settings: TrainConfig, compute: Compute) -> TrainConfig:
    return with_batch_size(Config(train=settings), compute, None, None)


TRIALS_OF_A_PAIR = """\
train.batch_size=auto: each trial compiles the model first
train.batch_size=auto: a micro-batch of 4 takes 4.0 of 33.0 GiB
train.batch_size=auto: a micro-batch of 8 takes 8.0 of 33.0 GiB
train.batch_size=auto: a micro-batch of 32 does not fit in 33.0 GiB
train.batch_size=auto: a micro-batch of 30 does not fit in 33.0 GiB
train.batch_size=auto: a micro-batch of 26 takes 26.0 of 33.0 GiB
train.batch_size=auto: a micro-batch of 28 takes 28.0 of 33.0 GiB
train.batch_size=auto: train.batch_size=56 after trials of 4, 8, 32, 30, 26, 28
"""


def test_all_processes_take_the_least_that_fits_in_one(monkeypatch, capsys):
    small_memory(monkeypatch, limit=32)
    settings = replace(AUTO, compile=True)
    assert search(settings, replace(CPU, world=PairedWorld(0, 2, "ddp"))).batch_size == 56  # 28 in each
    assert capsys.readouterr().out == TRIALS_OF_A_PAIR
    assert search(settings, replace(CPU, world=PairedWorld(1, 2, "ddp"))).batch_size == 56
    assert capsys.readouterr().out == ""
    settings = replace(settings, compile=False, global_batch_size=480)
    assert search(settings, CPU) == replace(settings, batch_size=32)
    assert capsys.readouterr().out.startswith("train.batch_size=auto: a micro-batch of 4 takes 4.0 of 33.0 GiB\n")


@pytest.mark.parametrize(("of_other", "cuda_graphs", "expected"), [(95, False, 76), (95, True, 38), (57, False, 57)])
def test_all_processes_have_the_same_limit(monkeypatch, of_other, cuda_graphs, expected):
    """80 of this GPU's 100 GiB are free."""

    class Pair(World):
        def largest(self, number: int) -> int:
            return max(number, -of_other * GIB)

    fractions = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (78 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    with limited_memory(replace(AUTO, cuda_graphs=cuda_graphs), Pair()) as limit:
        assert limit == expected * GIB
    assert fractions == pytest.approx([expected / 100, 1])


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
    assert tried == [4, 2, 1]


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
    assert "train.batch_size=auto: train.batch_size=6 after trials of 4, 8, 6, 7\n" in begun.out and len(tried) == 4
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
    assert "after trials of 4, 8, " in begun.out
    assert re.search(r"a micro-batch of 8 takes \d+\.\d of \d+\.\d GiB\n", begun.out)
    number = OmegaConf.load("auto/config.yaml").train.batch_size
    train("given", *options, f"train.batch_size={number}").ok()
    assert curve("auto", *LOSSES) == curve("given", *LOSSES)
