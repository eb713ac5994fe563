"""Faults injected into whole runs on a CPU: one clear sentence each, and nothing is lost."""

import errno
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import pytest
import torch

from data import tokens
from model.gpt2 import GPT2, Block
from tests.e2e import ROOT, TINY, at_call, curve, largest_file, load, rows, run, start, train
from trainer import checkpoint
from trainer.checkpoint import CheckpointError, Checkpoints, find
from trainer.folders import claimed

pytest_plugins = ["tests.e2e"]

LOSSES = ("train/loss", "train/grad_norm", "val/loss")
EACH_5 = ("train.max_steps=20", "checkpoint.interval=5", "checkpoint.dir=kept")


def fill_disk_at(monkeypatch, *names: str) -> None:
    """The disk is full whenever a checkpoint of one of these names is written."""
    write = checkpoint.write_file

    def write_on_a_full_disk(path, state):
        with largest_file(1000 if path.name in names else 2**40):
            write(path, state)

    monkeypatch.setattr(checkpoint, "write_file", write_on_a_full_disk)


def test_full_disk_stops_the_run_with_the_checkpoint_to_continue(workplace, monkeypatch):
    train("whole", *EACH_5[:2]).ok()
    fill_disk_at(monkeypatch, "step-00000015.pt")
    outcome = train("run", *EACH_5)
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2
    assert "step-00000015.pt could not be written (File too large); make room, and continue with" in sentence
    assert not list(Path("kept").glob("*.partial"))
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    train("run", *EACH_5, re.search(r"checkpoint\.resume=\S+10\.pt", sentence).group()).ok()
    assert curve("run", *LOSSES) == curve("whole", *LOSSES)


def test_full_disk_is_told_and_training_goes_on_where_that_is_asked_for(workplace, monkeypatch):
    train("whole", *EACH_5[:2]).ok()
    fill_disk_at(monkeypatch, "step-00000015.pt", "best.pt")
    outcome = train("run", *EACH_5, "checkpoint.on_error=continue").ok()
    told = [line for line in outcome.out.splitlines() if "training goes on" in line]
    assert len([line for line in told if "step-00000015.pt could not be written" in line]) == 1
    assert sorted(path.name for path in Path("kept").iterdir()) == ["step-00000010.pt", "step-00000020.pt"]
    assert curve("run", *LOSSES) == curve("whole", *LOSSES)


def test_run_does_not_end_well_without_its_last_checkpoint(workplace, monkeypatch):
    fill_disk_at(monkeypatch, "step-00000020.pt", "best.pt")
    outcome = train("run", *EACH_5, "checkpoint.on_error=continue")
    assert outcome.code == 2 and outcome.err.startswith("error: kept/step-00000020.pt could not be written")


def test_a_file_that_cannot_be_read_is_told_in_one_sentence(workplace, monkeypatch):
    def refuses(*args):
        raise PermissionError(errno.EACCES, "Permission denied", "tokens/train.bin")

    monkeypatch.setattr(tokens, "open_tokens", refuses)
    outcome = train("run")
    begins = "error: tokens/train.bin: Permission denied; see to its permissions, or name another: outputs go where "
    assert outcome.code == 2 and outcome.err.startswith(begins) and "tokens where data.dir=..." in outcome.err
    assert not Path("run").exists() or os.listdir("run") == []


def test_damaged_checkpoint_is_passed_over_by_the_run_that_resumes(workplace):
    train("whole", *EACH_5[:2]).ok()
    train("run", *EACH_5).ok()
    newest = Path("kept/step-00000020.pt")
    newest.write_bytes(newest.read_bytes()[:-1])
    outcome = train("run", *EACH_5, "checkpoint.resume=auto").ok()
    (line,) = [line for line in outcome.out.splitlines() if "is taken instead" in line]
    assert "step-00000020.pt" in line and "cut off" in line and line.endswith("step-00000015.pt is taken instead")
    assert "continuing after step 15" in outcome.out
    assert curve("run", *LOSSES) == curve("whole", *LOSSES)
    assert load(newest)["step"] == 20


CUDA_ERROR = "CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has a total capacity of 8 GiB of which. See elsewhere."


@pytest.mark.parametrize(
    ("method", "error", "begins"),
    [
        ("forward", MemoryError(), "this machine has not the memory (MemoryError); choose"),
        (
            "forward",
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            "this machine has not the memory (DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 b",
        ),
        (
            "to",
            RuntimeError("CUDA error: out of memory\nmore"),
            "the GPU has not the memory (CUDA error: out of memory);",
        ),
        (
            "to",
            torch.OutOfMemoryError(CUDA_ERROR),
            "the GPU has not the memory (CUDA out of memory. Tried to allocate 9 GiB);",
        ),
    ],
)
def test_a_machine_without_the_memory_is_told_in_a_sentence(workplace, monkeypatch, method, error, begins):
    """Of a step, of the host; of what comes before the steps, of the GPU too."""

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(GPT2, method, refuse)
    outcome = train("run")
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2 and sentence.startswith(f"error: {begins}")
    assert sentence.endswith("or another device; in training, lower train.batch_size or model.context_length")


def twice(number: int) -> None:
    for _ in range(2):
        os.kill(os.getpid(), number)


def test_a_second_sigterm_lets_the_run_save(workplace, monkeypatch):
    monkeypatch.setattr(GPT2, "forward", at_call(8, lambda: twice(signal.SIGTERM), GPT2.forward))
    outcome = train("run", "train.max_steps=20")
    assert outcome.code == 128 + signal.SIGTERM, "what Slurm is told to requeue on"
    assert load(find("run"))["step"] == curve("run")[-1][0] == 8


def test_a_job_out_of_time_is_saved_before_it_is_queued_again(workplace, monkeypatch):
    """By the handler that submitit has for SIGUSR2, which in the first process does not return."""

    def queue_again(number, frame):
        sys.exit(f"queued again after step {load(find('run'))['step']}")

    monkeypatch.setattr(GPT2, "forward", at_call(8, lambda: os.kill(os.getpid(), signal.SIGUSR2), GPT2.forward))
    before = signal.signal(signal.SIGUSR2, queue_again)
    try:
        outcome = train("run", "train.max_steps=20")
        assert signal.getsignal(signal.SIGUSR2) is queue_again
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert outcome.code == "queued again after step 8" and "SIGUSR2 after step 8; continue with" in outcome.out


INTERRUPTED = """
import os, signal, sys, train
from tests.test_failures import GPT2, at_call
numbers = [signal.Signals[name] for name in sys.argv.pop(1).split(",")]
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which the tests may run, has it ignored
GPT2.forward = at_call(8, lambda: [os.kill(os.getpid(), number) for number in numbers], GPT2.forward)
train.launch(train.main, "config")
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM], ids=["alone", "torchrun's"])
def test_a_second_ctrl_c_stops_at_once(workplace, second):
    signals = f"SIGINT,{second.name}"
    settings = "train.max_steps=20", "checkpoint.interval=5", "hydra.run.dir=run"
    process = start("-c", INTERRUPTED, signals, *TINY, *settings)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -second
    assert err == "\nSIGINT: saving after this step; Ctrl-C ends the run at once, without\n"
    assert load(find("run"))["step"] == 5 and curve("run")[-1] == (7,)


def test_a_terminal_that_is_closed_lets_the_run_save(workplace):
    """Nobody reads stdout and stderr then."""
    process = start("-c", INTERRUPTED, "SIGHUP", *TINY, "train.max_steps=20", "hydra.run.dir=run")
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    assert load(find("run"))["step"] == curve("run")[-1][0] == 8


def test_training_goes_on_where_nobody_reads_what_it_says(workplace):
    """As before | head, which ends when it has had its lines."""
    process = start(str(ROOT / "train.py"), *TINY, "train.max_steps=20", "hydra.run.dir=run")
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(timeout=60), process.stderr.read()) == (0, "")
    assert load(find("run"))["step"] == curve("run")[-1][0] == 20


def test_a_terminal_that_is_gone_ends_no_run(workplace):
    """Not the live line on it either."""
    terminal, end = os.openpty()
    settings = *TINY, "train.max_steps=20", "hydra.run.dir=run"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, ROOT / "train.py", *settings], stdout=end, stderr=end, env=environment)
    os.close(end)
    told = b""
    while b"first step in" not in told:
        told += os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    assert load(find("run"))["step"] == curve("run")[-1][0] == 20


def test_a_signal_during_an_evaluation_does_not_wait_for_its_end(workplace, monkeypatch):
    """In its second batch of 4, after step 10."""
    monkeypatch.setattr(GPT2, "forward", at_call(12, lambda: os.kill(os.getpid(), signal.SIGTERM), GPT2.forward))
    outcome = train("run", "train.max_steps=20")
    assert outcome.code == 128 + signal.SIGTERM and "SIGTERM after step 10; continue with" in outcome.out
    assert load(find("run"))["step"] == 10 and curve("run", "val/loss")[-1] == (10, None)
    assert curve("run", "train/loss")[-1][1] is not None, "what the step came to is told"
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    resume = ("train.max_steps=20", "checkpoint.dir=run/checkpoints", "checkpoint.resume=auto")
    train("run", *resume).ok()
    train("whole", "train.max_steps=20").ok()
    made_up, whole = ({step: loss for step, loss in curve(of, "val/loss") if loss} for of in ("run", "whole"))
    assert made_up == whole and list(whole) == [10, 20], "what was cut short is made up"


def spoil(monkeypatch, factor: float, *calls: int) -> None:
    """The model's loss is multiplied by `factor` at its calls of these numbers."""
    forward, count = GPT2.forward, itertools.count(1)
    monkeypatch.setattr(
        GPT2, "forward", lambda *args, **kw: forward(*args, **kw) * (factor if next(count) in calls else 1)
    )


def test_steps_that_are_not_finite_are_skipped_counted_and_told(workplace, monkeypatch):
    spoil(monkeypatch, math.nan, 7, 8)
    outcome = train("run", "train.max_steps=10", "train.on_nan=skip").ok()
    skips = curve("run", "train/skipped_steps")
    assert skips == [(step, max(0, min(step, 8) - 6)) for step in range(1, 11)]
    assert outcome.out.count("the weights did not take it, as train.on_nan=skip") == 2
    assert [row["train/loss"] is None for row in rows("run")] == [step in (7, 8) for step in range(1, 11)]
    state = load("run/checkpoints/step-00000010.pt")
    assert state["skipped"] == 2 and all(weight.isfinite().all() for weight in state["model"].values())
    assert {int(moments["step"]) for moments in state["optimizer"]["state"].values()} == {8}


def test_too_many_steps_in_a_row_that_are_not_finite_stop_the_run(workplace, monkeypatch):
    spoil(monkeypatch, math.nan, *range(3, 12), *range(13, 23))
    outcome = train("run", "train.max_steps=40", "train.on_nan=skip", "train.log_interval=4", "train.eval_interval=99")
    assert outcome.code == 2 and "the loss was nan and the gradient norm nan at step 22;" in outcome.err
    assert "Lower optimizer.lr" in outcome.err and len(outcome.err.splitlines()) == 1
    record = Path(re.search(r"replay=(\S+)", outcome.err).group(1))
    again = run("train.py", f"replay={record}", "device=cpu").ok()
    assert "the batch of step 22 by " in again.out and "step-00000024.pt, flash2 attention" in again.out
    content = json.loads(record.read_text())
    content["loader"]["position"] = -5
    record.write_text(json.dumps(content))
    refused = run("train.py", f"replay={record}", "device=cpu")
    assert (refused.code, refused.err.count("is no record of a step")) == (2, 1)


def test_no_checkpoint_has_steps_in_it_that_nobody_judged(workplace, monkeypatch):
    """After a kill nobody would: here rows of metrics are further apart than checkpoints."""
    often = ("train.log_interval=20", "train.eval_interval=99", "checkpoint.interval=10", "train.max_steps=20")
    spoil(monkeypatch, math.nan, 7)
    outcome = train("run", *often)
    assert outcome.code == 2 and "the loss was nan and the gradient norm nan at step 7;" in outcome.err
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000010.pt"], "saved as it stops"
    spoil(monkeypatch, math.nan, 7)
    train("skipping", *often, "train.on_nan=skip").ok()
    assert load("skipping/checkpoints/step-00000010.pt")["skipped"] == 1


def test_a_job_of_a_sweep_does_not_go_on_from_anothers_checkpoints(workplace):
    sweep = ("-m", "attention=naive,sdpa", "hydra.sweep.dir=sweep", "checkpoint.resume=auto", "train.max_steps=2")
    outcome = run("train.py", *sweep, *TINY, "checkpoint.dir=runs/a")
    assert outcome.code == 2 and "runs/a has the checkpoints of the job 0_naive" in outcome.err
    for _ in range(2):  # begun, and continued
        run("train.py", *sweep, *TINY, "checkpoint.dir=runs/${hydra:job.num}").ok()


def test_a_loss_that_is_no_number_is_told_though_the_disk_is_full(workplace, monkeypatch):
    spoil(monkeypatch, math.nan, 3)
    fill_disk_at(monkeypatch, "step-00000003.pt")
    (sentence,) = train("run").err.splitlines()
    assert "The state is lost: " in sentence
    assert "the loss was nan and the gradient norm nan at step 3; the weights took no such step." in sentence
    assert "step-00000003.pt could not be written (File too large); make room" in sentence
    assert Path(re.search(r"replay=(\S+)", sentence).group(1)).is_file()


def test_what_is_usual_is_known_after_a_resume(workplace, monkeypatch):
    train("run", "train.max_steps=25", "train.eval_interval=99", "checkpoint.dir=kept").ok()
    assert load("kept/step-00000025.pt")["norms"] == [norm for _, norm in curve("run", "train/grad_norm")]
    spoil(monkeypatch, 100.0, 2)
    outcome = train(
        "run", "train.max_steps=28", "train.eval_interval=99", "checkpoint.dir=kept", "checkpoint.resume=auto"
    )
    assert outcome.ok().out.count("times the usual") == 1 and "at step 27," in outcome.out


def replayed(outcome) -> dict:
    return json.loads(Path(outcome.ok().out.splitlines()[-1].removeprefix("outputs in "), "replay.json").read_text())


def test_spike_is_recorded_and_its_batch_replayed_to_the_bit(workplace, monkeypatch):
    """Logged every 4 steps, so that the record is made when the loader is further on."""
    often = ("train.max_steps=28", "checkpoint.interval=1", "checkpoint.keep=9", "train.grad_accumulation=2")
    spoil(monkeypatch, 100.0, 49, 50)  # the two micro-batches of step 25
    outcome = train("run", *often, "train.log_interval=4", "train.eval_interval=99")
    (line,) = [line for line in outcome.ok().out.splitlines() if "times the usual" in line]
    file = re.search(r"python train.py (replay=\S+)", line).group(1)
    assert "at step 25," in line and file.endswith("run/replay/step-00000025.json")
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    result = replayed(run("train.py", file, "device=cpu"))
    recorded = json.loads(Path(file.removeprefix("replay=")).read_text())
    assert recorded["checkpoint"].endswith("step-00000024.pt")
    assert [100 * result[key] for key in ("loss", "grad_norm")] == pytest.approx(
        [recorded[key] for key in ("loss", "grad_norm")], rel=1e-6
    )
    by_others = replayed(run("train.py", file, "device=cpu", "checkpoint=run/checkpoints/step-00000020.pt"))
    assert by_others["loss"] != result["loss"] and by_others["checkpoint"].endswith("20.pt")
    shutil.rmtree("run/checkpoints")
    refused = run("train.py", file, "device=cpu")
    assert refused.code == 2 and "names no checkpoint that exists" in refused.err


def test_a_spike_that_the_disk_cannot_record_is_told_and_training_goes_on(workplace, monkeypatch):
    spoil(monkeypatch, 100.0, 25)
    Path("run").mkdir()
    Path("run/replay").write_text("in the way of the folder")
    outcome = train("run", "train.max_steps=28", "train.eval_interval=99").ok()
    assert "times the usual; the disk refused a record of it" in outcome.out


def test_what_is_recorded_is_replayed_as_asked(workplace, monkeypatch):
    """Activations as in the run; another precision where one is named; and not with eval_only."""
    spoil(monkeypatch, math.nan, 3)
    outcome = train("run", "train.activation_checkpointing=full")
    file = re.search(r"replay=\S+", outcome.err).group()
    seen, forward = set(), Block.forward

    def watched(block, *args):
        seen.add(block.activation_checkpointing)
        return forward(block, *args)

    monkeypatch.setattr(Block, "forward", watched)
    told = run("train.py", file, "device=cpu", "precision=bf16", "checkpoint=run/checkpoints")
    assert "CPU, bf16" in told.ok().out and seen == {"full"}
    refused = run("train.py", file, "eval_only=true")
    assert refused.code == 2 and "are two things to do" in refused.err


def test_two_runs_do_not_write_into_one_folder(workplace):
    train("whole", *EACH_5[:2]).ok()
    before = Path("whole/metrics.jsonl").read_bytes()
    for claim in ({Path("whole"): "hydra.run.dir"}, {Path("whole/checkpoints"): "checkpoint.dir"}):
        (setting,) = claim.values()
        resume = ("checkpoint.resume=auto", "checkpoint.dir=whole/checkpoints", "train.max_steps=30")
        with claimed(claim):
            outcome = train("whole", *resume)
        assert outcome.code == 2
        assert f"another run writes to {next(iter(claim)).resolve()}; wait for it" in outcome.err
        assert outcome.err.endswith(f"choose another {setting}\n")
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
    told = "torchrun has started the processes again, and this run begins as the first time"
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


# Forks train.py as often as its first argument says, kills it each time, and lets it finish at last. A kill comes up to
# 10 ms after one of the next calls of what makes a step, or of a part of writing a checkpoint.
KILLER = """
import glob, os, random, signal, sys, time
import torch
import train

times, arguments = int(sys.argv[1]), sys.argv[2:]

def fork(module, name):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        function = getattr(module, name)
        setattr(module, name, lambda *args, **kwargs: (os.write(writing, b"."), function(*args, **kwargs))[1])
        sys.argv[1:] = arguments
        train.launch(train.main, "config")
        os._exit(0)
    os.close(writing)
    return pid, reading

moments = [(train, "train_step"), (torch, "save"), (os, "fsync"), (os, "replace")]
for life in range(times):
    pid, calls = fork(*moments[life % len(moments)])
    for _ in range(random.randint(1, 3) + (life == 0)):
        os.read(calls, 1)
    while not glob.glob("killed/checkpoints/step-*.pt"):  # for all others to continue
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.01))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "it had ended"
    os.close(calls)
pid, _ = fork(*moments[0])
sys.exit(os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize("beside", ["true", "false"])
@pytest.mark.parametrize("times", [4, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_run_killed_again_and_again_ends_as_if_it_had_not_been(workplace, times, beside):
    """Whether its checkpoints are written beside training or while it waits."""
    last = 8 * times
    settings = (f"train.max_steps={last}", "checkpoint.interval=1", "model.dropout=0.2")
    settings += (f"checkpoint.asynchronous={beside}",)
    train("whole", *settings).ok()
    killed = (*settings, "hydra.run.dir=killed", "checkpoint.dir=killed/checkpoints", "checkpoint.resume=auto")
    process = start("-c", KILLER, str(times), *TINY, *killed)
    out, err = process.communicate(timeout=1000)
    assert process.returncode == 0 and "Traceback" not in err, err
    assert out.count("continuing after step") >= times // 2
    assert [step for step, *_ in curve("killed")] == list(range(1, last + 1))
    assert curve("killed", *LOSSES) == curve("whole", *LOSSES)
    ours, theirs = (load(f"{folder}/checkpoints/step-{last:08d}.pt") for folder in ("killed", "whole"))
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
    torch.testing.assert_close(ours["optimizer"], theirs["optimizer"], rtol=0, atol=0)
    assert not list(Path("killed/checkpoints").glob("*.partial"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("device", "steps", "interval"), [("cpu", 36_000, 1000), pytest.param("cuda", 10**7, 1000, marks=pytest.mark.gpu)]
)
def test_long_run_grows_neither_in_memory_nor_in_files_nor_in_time(workplace, monkeypatch, device, steps, interval):
    """Samples at the end of each evaluation: resident pages, open files, threads, bytes of tensors on the GPU, and the
    seconds since the last. On a CPU it takes as many steps, though small ones, as README's first run would in two hours
    at 0.2 s each; on a GPU it is told to end after eight minutes."""
    samples = []

    def sample() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        tensors = torch.cuda.memory_allocated() if device == "cuda" else 0
        files = len(os.listdir("/proc/self/fd"))
        samples.append((pages, files, threading.active_count(), tensors, time.monotonic()))

    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda *args: (sample(), save(*args))[1])
    small = ("model=gpt2-nano", "model.n_layer=4", "model.n_head=4", "model.n_embd=128", "train.sample_tokens=8")
    often = (f"train.eval_interval={interval}", f"checkpoint.interval={interval}", "train.log_interval=10")
    timer = threading.Timer(480, os.kill, (os.getpid(), signal.SIGTERM))
    if device == "cuda":
        timer.start()
    try:
        outcome = train("run", *small, *often, f"train.max_steps={steps}", f"device={device}")
    finally:
        timer.cancel()  # or it would end the tests
    assert outcome.code == (128 + signal.SIGTERM if device == "cuda" else 0), outcome.err
    pages, files, threads, tensors, clock = zip(*samples, strict=True)
    seconds = [after - before for before, after in itertools.pairwise(clock)]
    early, half = len(samples) // 8, len(samples) // 2
    pace = f"{median(seconds[early:half]):.2f} s, then {median(seconds[half:]):.2f} s, for {interval} steps"
    print(f"{len(samples)} samples; {pace}; {max(pages[early:half])} pages, then {max(pages[half:])}")
    print(f"{median(tensors[early:half])} bytes of tensors, then {median(tensors[half:])}")
    opened, running = (f"{max(x[:early])}, then {min(x[half:])} to {max(x[half:])}" for x in (files, threads))
    print(f"files {opened}; threads {running}")
    assert len(samples) >= 24  # so that three come before, of which the first may have more or less of everything
    # what leaks stays open, while a file in use makes one sample the larger
    assert min(files[half:]) <= max(files[:early]) and min(threads[half:]) <= max(threads[:early])
    # batches and figures on their way make some samples a few percent larger
    assert median(tensors[half:]) <= 1.005 * median(tensors[early:half])
    assert max(pages[half:]) < 1.02 * max(pages[early:half])
    assert median(seconds[half:]) < 1.25 * median(seconds[early:half])
