"""Several processes on one machine, joined by gloo on its CPU or NCCL on its GPUs: they train what one trains."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from conf.schema import TrainConfig
from errors import UserError
from model.attention import AttentionConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from tests import several
from tests.e2e import ROOT, TINY, curve, load, python_path, rows, run, train, wait_for_step, write_tokens
from tests.several import SINGLE_NODE, ended, torchrun, train_on_two_nodes, train_together
from trainer import checkpoint
from trainer.checkpoint import find
from trainer.distributed.parallel import data_parallel, shard, synchronise_gradients
from trainer.distributed.world import World, choose_parallel, join
from trainer.precision import Compute
from trainer.signals import StopRequest

pytest_plugins = ["tests.e2e"]
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
    folder, resume = tmp_path_factory.mktemp("runs"), "checkpoint.resume={}/checkpoints/step-00000003"
    after_fsdp = f"{GLOBAL} {resume.format('fsdp')}"
    each_2 = f"{GLOBAL} parallel=fsdp checkpoint.interval=2 train.eval_interval=6"
    write_tokens(folder / "tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train("alone", *GLOBAL.split()).ok()
        train_together(
            2,
            f"locked {GLOBAL}",
            f"nowhere {GLOBAL} data.dir=nowhere",
            f"refused {GLOBAL}",
            f"wordless {GLOBAL} parallel=fsdp train.sample_tokens=5",
            f"compiled {GLOBAL} parallel=fsdp model.n_layer=4 train.compile=true train.sample_tokens=5",
            f"ddp {GLOBAL}",
            f"fsdp_after_alone {GLOBAL} parallel=fsdp {resume.format('alone')}.pt",
            f"fsdp {GLOBAL} parallel=fsdp train.activation_checkpointing=full",
            f"ddp_after_fsdp {after_fsdp}",
            f"terminated {GLOBAL} parallel=fsdp checkpoint.interval=100",
            f"slow {each_2}",
            f"full {each_2} checkpoint.on_error=continue",
            f"stopped {each_2}",
            f"unreadable {GLOBAL} parallel=fsdp",
            f"slow_unreadable {GLOBAL}",
            f"ddp_after_unreadable {GLOBAL} checkpoint.resume=unreadable/checkpoints/step-00000004",
        )
        train_on_two_nodes(
            2,
            f"four {GLOBAL}",
            f"fsdp_after_fsdp {after_fsdp} parallel=fsdp",
            f"hsdp_after_fsdp {after_fsdp} parallel=hsdp train.sample_tokens=5",
        )
        train("alone_after_fsdp", *after_fsdp.split()).ok()
        yield folder


@pytest.mark.parametrize(
    ("folder", "after"),
    [
        *(("ddp", 0), ("fsdp", 0), ("four", 0), ("fsdp_after_alone", 3), ("ddp_after_fsdp", 3)),
        ("ddp_after_unreadable", 4),
        *(("fsdp_after_fsdp", 3), ("hsdp_after_fsdp", 3), ("alone_after_fsdp", 3)),
    ],
)
def test_neither_the_number_of_processes_nor_the_way_they_share_the_work_changes_the_curve(runs, folder, after):
    assert_same_curve(runs / folder, runs / "alone", after)


@pytest.mark.gpu
@pytest.mark.parametrize("processes", [2, 4])
def test_nor_do_they_on_gpus_joined_by_nccl(tmp_path, monkeypatch, processes):
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} CUDA devices")
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "tokens")
    on_gpus = f"{GLOBAL} device=cuda precision=fp32 attention=flash2 train.compile=false"
    train("alone", *on_gpus.split()).ok()
    train_together(processes, f"ddp {on_gpus}", f"fsdp {on_gpus} parallel=fsdp")
    for folder in ("ddp", "fsdp"):
        assert_same_curve(tmp_path / folder, tmp_path / "alone")


def test_the_first_process_alone_logs_and_saves(runs):
    """On two nodes too: 16 sequences of 32 tokens a step, whoever read them."""
    for folder in ("ddp", "four"):
        logged = rows(runs / folder)
        assert [(row["step"], row["tokens"]) for row in logged] == [(step, step * 16 * 32) for step in range(1, 7)]
        assert load(runs / folder / "checkpoints" / "step-00000006.pt")["loader"]["position"] == 6 * 16


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [
        ("locked", "another run writes to locked"),
        ("nowhere", "nowhere"),
        ("refused", "could not be written (No space left on device)"),
    ],
)
def test_what_the_first_process_refuses_the_others_refuse_too(runs, folder, sentence):
    """So that those of a sweep, or here of what tests/several.py runs next, meet again in the next job."""
    code, *_, error = (runs / folder / "out.txt").read_text().splitlines()
    assert code == "2" and error.startswith("error: ") and sentence in error


def test_what_one_process_lacks_for_a_sample_leaves_it_out_in_all(runs):
    code, *lines = (runs / "wordless" / "out.txt").read_text().splitlines()
    assert code == "0" and "no sample: no byte" in lines


def test_blocks_that_are_compiled_one_by_one_sample_too(runs):
    code, *lines = (runs / "compiled" / "out.txt").read_text().splitlines()
    assert code == "0" and "a sample:" in lines


def test_a_signal_to_one_process_stops_all_after_the_same_step(runs):
    """And they end when the checkpoint is whole, which is written beside training."""
    assert [step for step, *_ in curve(runs / "terminated")] == [1, 2, 3]
    assert checkpoint.load(runs / "terminated")["step"] == 3
    code, *lines = (runs / "terminated" / "out.txt").read_text().splitlines()
    path = find(runs / "terminated")
    (saved,) = [number for number, line in enumerate(lines) if line.startswith(f"saved {path}, in ")]
    assert code == "143" and saved < lines.index(f"SIGTERM after step 3; continue with checkpoint.resume={path}")


@pytest.mark.parametrize("folder", ["unreadable", "slow_unreadable"])
def test_tokens_that_one_process_cannot_read_stop_all_and_no_step_is_lost(runs, folder):
    """And no process says that the state is saved before it is, as tests/several.py sees to."""
    code, *lines = (runs / folder / "out.txt").read_text().splitlines()
    saved = find(runs / folder)
    sentence = f"error: train.bin can no longer be read: put it back as it was. The state is saved in {saved}."
    assert code == "2" and lines[-1] == sentence and saved.stem == "step-00000004"


def test_training_goes_on_while_a_checkpoint_is_written(runs):
    """Its writer waits for the step after the next; it is told when it is whole, and not before."""
    code, *lines = (runs / "slow" / "out.txt").read_text().splitlines()
    told = [line.split(",")[0] for line in lines if line.startswith(("step", "saved"))]
    saved = told.index(f"saved {runs / 'slow' / 'checkpoints' / 'step-00000002'}")
    assert code == "0" and [line[:8] for line in told[:saved]] == ["step 1/6", "step 2/6", "step 3/6"]
    assert_same_curve(runs / "slow", runs / "full")


@pytest.mark.parametrize(
    ("folder", "expected", "goes_on", "left"),
    [
        (
            "full",
            "0",
            "; training goes on, as checkpoint.on_error=continue",
            ["best", "step-00000002", "step-00000006"],
        ),
        ("stopped", "2", "", ["step-00000002"]),
    ],
)
def test_a_full_disk_of_one_process_is_told_and_leaves_the_earlier_checkpoint(runs, folder, expected, goes_on, left):
    code, *lines = (runs / folder / "out.txt").read_text().splitlines()
    (told,) = [line.removeprefix("error: ") for line in lines if "could not be written" in line]
    kept = runs / folder / "checkpoints"
    assert code == expected and told == (
        f"{kept}/step-00000004 could not be written (File too large); make room, and continue with "
        f"checkpoint.resume={kept}/step-00000002{goes_on}"
    )
    assert sorted(path.name for path in kept.iterdir()) == left


@pytest.fixture(scope="module")
def as_file(runs) -> Path:
    """The folder of a run by one process that continued the end of `fsdp`, and so only wrote it as a file."""
    train("as_file", *GLOBAL.split(), f"checkpoint.resume={find('fsdp')}").ok()
    return runs / "as_file"


def test_split_weights_are_those_of_a_file(runs, as_file):
    """Both those of two processes and those of four, which hold each part twice."""
    ours, theirs = checkpoint.load(runs / "fsdp"), load(find(as_file))
    for key in ("model", "optimizer"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0)
    assert ours.keys() - {"path"} == theirs.keys()
    ours, theirs = checkpoint.load(runs / "hsdp_after_fsdp"), load(find(runs / "alone"))
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-3, atol=1e-5)


def test_split_weights_are_exported_and_sampled(runs, as_file, tmp_path):
    exported = []
    for source in (runs / "fsdp", as_file):
        run("export.py", f"checkpoint={source}", f"to={tmp_path / source.name}").ok()
        exported.append(load_file(tmp_path / source.name / "model.safetensors"))
    torch.testing.assert_close(*exported, rtol=0, atol=0)
    run("sample.py", f"checkpoint={runs / 'fsdp/checkpoints/best'}", "prompt=1 + ", "max_tokens=3", "device=cpu").ok()


def test_a_later_step_in_parts_is_not_mixed_with_a_new_run(runs):
    refused = train("new", "checkpoint.dir=fsdp/checkpoints")
    assert refused.code == 2 and "fsdp/checkpoints/step-00000006 is of a later step than the 0" in refused.err


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda newest: flip(newest / "part-00001.safetensors"), "part-00001.safetensors does not match its checksum"),
        (lambda newest: os.truncate(newest / "part-00000.safetensors", 9), "part-00000.safetensors does not match"),
        (lambda newest: (newest / "part-00001.safetensors").unlink(), "part-00001.safetensors is missing"),
        (
            lambda newest: shutil.copy(newest / "part-00001.safetensors", newest / "more.safetensors"),
            "more.safetensors",
        ),
        (lambda newest: (newest / "rest.pt").unlink(), "rest.pt is no readable checkpoint .it is missing"),
        (lambda newest: flip(newest / "rest.pt"), "rest.pt is no readable checkpoint .*checksum"),
        (lambda newest: shutil.copy(find("alone"), newest / "rest.pt"), "is not a checkpoint of this trainer"),
        (
            lambda newest: shutil.copy("hsdp_after_fsdp/checkpoints/step-00000006/part-00000.safetensors", newest),
            "part-00000.safetensors does not match",
        ),
    ],
    ids=["flipped", "cut", "missing", "one more", "no rest", "rest flipped", "rest of a file", "of another run"],
)
def test_a_damaged_part_is_refused_by_name_and_the_checkpoint_before_is_taken(runs, tmp_path, damage, sentence):
    shutil.copytree("fsdp/checkpoints", tmp_path, symlinks=True, dirs_exist_ok=True)
    newest, before = tmp_path / "step-00000006", tmp_path / "step-00000003"
    damage(newest)
    with pytest.raises(UserError, match=f"{newest}.*{sentence}"):
        checkpoint.load(newest)
    told = []
    assert checkpoint.load(tmp_path, tell=told.append)["step"] == 3
    (line,) = told
    assert re.search(f"{newest}.*{sentence}", line) and line.endswith(f"{before} is taken instead")


def test_a_killed_process_is_started_again_and_nothing_is_lost(runs):
    """It is killed while it writes a checkpoint; that goes, and the one before is continued, by torchrun alone."""
    each_2 = f"{GLOBAL} parallel=fsdp checkpoint.interval=2 checkpoint.dir=kept checkpoint.resume=auto"
    job = torchrun(2, several.__file__, f"killed {each_2}", options=(*SINGLE_NODE, "--max-restarts=1"))
    _, err = ended(job)
    assert job.returncode == 0, err
    assert "Signal 9 (SIGKILL)" in err or "exitcode: -9" in err, err
    assert "continuing after step 3," in (runs / "killed" / "out.txt").read_text()
    assert_same_curve(runs / "killed", runs / "alone")
    assert sorted(path.name for path in (runs / "kept").iterdir()) == ["best", "step-00000004", "step-00000006"]


def test_readmes_script_for_slurm_saves_and_is_queued_again(tmp_path, monkeypatch):
    """Its signal comes to the script, which passes it on to torchrun; scontrol here writes down what it is told."""
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "tokens")
    script = re.search(
        r" {4}#SBATCH --requeue --signal=B:TERM.*?exit \$code\n", (ROOT / "README.md").read_text(), re.DOTALL
    )
    tiny = f"{ROOT / 'train.py'} {' '.join(TINY)} train.max_steps=100000"
    launcher = f"{sys.executable} -m torch.distributed.run --standalone"
    changes = {"torchrun": launcher, "train.py": tiny, "--nproc_per_node=8": "--nproc_per_node=2"}
    text = re.sub("|".join(changes), lambda found: changes[found[0]], textwrap.dedent(script[0]))
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" > queued\n')
    (tmp_path / "scontrol").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "PYTHONPATH": python_path()}
    variables = os.environ | variables | {"OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(["bash", "-c", text], env=variables, start_new_session=True)
    try:
        wait_for_step(5, "runs/a", job)
        job.terminate()
        assert job.wait(timeout=60) != 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert Path("queued").read_text() == "requeue 7\n"
    assert checkpoint.load("runs/a")["step"] == curve("runs/a")[-1][0]


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


@pytest.mark.parametrize("place", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}])
def test_a_place_that_is_told_in_part_is_refused(monkeypatch, place):
    for key, value in place.items():
        monkeypatch.setenv(key, value)
    missing = "but not .*LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; start by torchrun"
    with pytest.raises(UserError, match=missing), join(None, "cpu", timeout_s=3):
        pass


def test_tasks_of_srun_that_know_nothing_of_each_other_are_refused(monkeypatch):
    """Unless each is to train alone; one task, or processes that torchrun or submitit told their places, are none."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    for asked in (None, "ddp"):
        with pytest.raises(
            UserError, match="srun started 8 tasks, .* torchrun, or let hydra/launcher=slurm start them"
        ):
            choose_parallel(asked)
    assert choose_parallel("none") == "none"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert choose_parallel(None) == "none"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert choose_parallel(None) == "ddp"


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gradients_travel_once_for_all_micro_steps(group):
    sent, tokens = [], torch.zeros((1, 8), dtype=torch.int64)
    model = GPT2(ModelConfig(1, 1, 8, 8, 11), build_attention(AttentionConfig("sdpa")))
    model = data_parallel(model, World(parallel="ddp"))
    for i in range(4):
        synchronise_gradients(model, wanted=i == 3)
        with CommDebugMode() as seen:
            model(tokens, tokens).backward()
        sent.append(seen.get_total_counts())
    assert sent == [0, 0, 0, 1]


@pytest.mark.filterwarnings("error::UserWarning")
def test_blocks_return_no_views_which_fsdp_warns_of(group):
    compute = Compute(torch.device("cpu"), torch.float32, World(parallel="fsdp"))
    model = shard(GPT2(ModelConfig(2, 1, 8, 8, 11), build_attention(AttentionConfig("sdpa"))), compute, False)
    tokens = torch.zeros((1, 8), dtype=torch.int64)
    model(tokens, tokens)


def test_micro_steps_but_the_last_keep_their_gradients(workplace, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "trainer.distributed.parallel.synchronise_gradients", lambda model, wanted: asked.append(wanted)
    )
    train("run", "train.grad_accumulation=3", "train.max_steps=2").ok()
    assert asked == [False, False, True] * 2


def test_a_signal_while_processes_agree_counts_the_next_time(monkeypatch):
    """The others have been told that there is none, and take another step with this process."""
    stop = StopRequest()
    monkeypatch.setattr(dist, "all_reduce", lambda *_: setattr(stop, "signal", signal.SIGTERM))
    world = World(size=2, parallel="ddp")
    assert [world.is_stopped(stop), world.is_stopped(stop)] == [False, True]


def test_each_process_draws_dropout_of_its_own_and_the_first_as_it_would_alone():
    def drawn(rank: int, seed: int = 7) -> Tensor:
        torch.manual_seed(1)
        World(rank, size=3, parallel="ddp").draw_apart(seed)
        return torch.rand(4)

    torch.manual_seed(1)
    draws = [torch.rand(4), drawn(1), drawn(2), drawn(1, seed=8), drawn(2, seed=8)]
    assert torch.equal(drawn(0), draws[0])
    assert not any(torch.equal(a, b) for a, b in combinations(draws, 2))


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


@pytest.mark.parametrize(
    ("fault", "sentences"),
    [
        ("raise ValueError('no disk')", ["ValueError of process 1: no disk"]),
        ("time.sleep(60)", ["process 0 of 2 lost another, or waited for it for more than train.timeout_s=10"]),
    ],
    ids=["it fails", "it stands still"],
)
def test_one_process_that_fails_ends_the_job_with_its_error_shown(tmp_path, fault, sentences):
    (tmp_path / "job.py").write_text(FAULT.format(fault=fault))
    job = torchrun(2, str(tmp_path / "job.py"))
    _, err = ended(job, timeout_s=100)  # within which it ends
    assert job.returncode != 0
    assert [sentence for sentence in sentences if sentence not in err] == []


SWEEP = """
import os, runpy
import model.generate, trainer.optimizer
from tests.e2e import at_call

def fail():
    raise RuntimeError("of what is no user's to mend")

if os.environ["RANK"] in {ranks!r}:
    {module}.{name} = at_call({call}, fail, {module}.{name})
runpy.run_path({train!r}, run_name="__main__")
"""


def sweep_by_two(tmp_path: Path, monkeypatch, ranks: str, call: int, function: str, *overrides: str) -> tuple[int, str]:
    """How a sweep of two jobs ended whose first fails in those processes at a call of a function, and what it told."""
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "tokens")
    module, _, name = function.rpartition(".")
    script = SWEEP.format(ranks=ranks, module=module, name=name, call=call, train=str(ROOT / "train.py"))
    (tmp_path / "job.py").write_text(script)
    options = "-m", *TINY, "hydra.sweep.dir=sweep", "train.seed=1,2", *overrides
    job = torchrun(2, str(tmp_path / "job.py"), *options)
    _, err = ended(job)
    return job.returncode, err


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_job_of_a_sweep_in_which_all_processes_fail_leaves_the_others(tmp_path, monkeypatch, parallel):
    """They meet anew, as some may have sent what others did not."""
    failing = "01", 3, "trainer.optimizer.optimizer_step", f"parallel={parallel}"
    code, err = sweep_by_two(tmp_path, monkeypatch, *failing)
    assert code != 0 and err.count("RuntimeError: of what is no user's to mend") == 2 and "the sweep ends" not in err
    assert [len(curve(path.parent)) for path in sorted(Path("sweep").glob("*/metrics.jsonl"))] == [2, 5]


@pytest.mark.parametrize(
    ("rank", "call", "function"),
    [("1", 3, "trainer.optimizer.optimizer_step"), ("0", 1, "model.generate.generate")],
    ids=["in a step", "when the others are in the next job"],
)
def test_an_error_of_one_process_alone_ends_a_sweep(tmp_path, monkeypatch, rank, call, function):
    """Or it would begin the next job, and take what the others say in this one for a part of that."""
    options = "train.timeout_s=10", "train.sample_tokens=5"
    code, err = sweep_by_two(tmp_path, monkeypatch, rank, call, function, *options)
    assert code != 0 and err.count("RuntimeError: of what is no user's to mend") == 1
    assert "the sweep ends: not all processes failed in" in err
    assert len(list(Path("sweep").glob("*/metrics.jsonl"))) == 1
