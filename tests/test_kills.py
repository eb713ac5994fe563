"""Runs that are killed many times, and long runs."""

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from statistics import median

import pytest
import torch

from tests.e2e import TINY, curve, load, start, train
from trainer.checkpoint.policy import Checkpoints

pytest_plugins = ["tests.e2e"]

pytestmark = pytest.mark.slow
LOSSES = ("train/loss", "train/grad_norm", "val/loss")


# Forks train.py as often as its first argument says, kills it each time, and lets the last one finish. A kill comes up
# to 10 ms after one of the next calls of train_step, or of a function that writes a checkpoint.
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
        train.launch(train.main, "config", typed=False)
        os._exit(0)
    os.close(writing)
    return pid, reading

moments = [(train, "train_step"), (torch, "save"), (os, "fsync"), (os, "replace")]
for life in range(times):
    pid, calls = fork(*moments[life % len(moments)])
    for _ in range(random.randint(1, 3) + (life == 0)):
        os.read(calls, 1)
    while not glob.glob("killed/checkpoints/step-*.pt"):  # The other runs continue from it.
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.01))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "the run had ended before the kill"
    os.close(calls)
pid, _ = fork(*moments[0])
sys.exit(os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize("beside", ["true", "false"])
@pytest.mark.parametrize("times", [4, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_run_killed_again_and_again_ends_as_if_it_had_not_been(workplace, times, beside):
    """The run writes its checkpoints in the background (`beside`), or waits for them."""
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


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("device", "steps", "interval"), [("cpu", 36_000, 1000), pytest.param("cuda", 10**7, 1000, marks=pytest.mark.gpu)]
)
def test_long_run_grows_neither_in_memory_nor_in_files_nor_in_time(workplace, monkeypatch, device, steps, interval):
    """Take a sample at each checkpoint: resident pages, open files, threads, bytes of tensors on the GPU, and the time.
    On a CPU the run takes 36,000 small steps: README's first run would take them in two hours at 0.2 s each. On a GPU
    it ends after eight minutes."""
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
        timer.cancel()  # It would end the tests.
    assert outcome.code == (128 + signal.SIGTERM if device == "cuda" else 0), outcome.err
    pages, files, threads, tensors, clock = zip(*samples, strict=True)
    seconds = [after - before for before, after in itertools.pairwise(clock)]
    early, half = len(samples) // 8, len(samples) // 2
    pace = f"{median(seconds[early:half]):.2f} s, then {median(seconds[half:]):.2f} s, for {interval} steps"
    print(f"{len(samples)} samples; {pace}; {max(pages[early:half])} pages, then {max(pages[half:])}")
    print(f"{median(tensors[early:half])} bytes of tensors, then {median(tensors[half:])}")
    opened, running = (f"{max(x[:early])}, then {min(x[half:])} to {max(x[half:])}" for x in (files, threads))
    print(f"files {opened}; threads {running}")
    assert len(samples) >= 24  # at least three before `early`; the first may have more or less of everything
    # Leaked files stay open, so compare minima: a file in use makes single samples larger.
    assert min(files[half:]) <= max(files[:early]) and min(threads[half:]) <= max(threads[:early])
    # Batches and metrics that are still in use make some samples a few percent larger.
    assert median(tensors[half:]) <= 1.005 * median(tensors[early:half])
    assert max(pages[half:]) < 1.02 * max(pages[early:half])
    assert median(seconds[half:]) < 1.25 * median(seconds[early:half])
