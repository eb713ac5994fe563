"""Whole runs of train.py on a CPU: the files they write, and how they stop and continue."""

import math
import os
import random
import re
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from conf.schema import Config, TrainConfig
from data import tokenizers
from errors import UserError
from model.attention import Flash2Config, NaiveConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from tests.e2e import ROOT, TINY, at_call, curve, load, printed_commands, rows, run, start, train, wait_for_step
from trainer import evaluation, graphs
from trainer.build import compile_model
from trainer.checkpoint.folder import find
from trainer.checkpoint.policy import Checkpoints
from trainer.checkpoint.single import SingleFileStore
from trainer.meters import ThroughputMeter
from trainer.precision import Compute

pytest_plugins = ["tests.e2e"]

LOSSES = ("train/loss", "train/perplexity", "train/grad_norm", "train/lr", "val/loss", "val/perplexity")
DEMANDING = ("train.max_steps=40", "train.grad_accumulation=2", "model.dropout=0.2", "checkpoint.interval=10")
# train.py, but so slow after step 23 that a test can end it before its checkpoint of step 30.
SLOW_TRAINER = """
import time, train
quick_step = train.train_step
train.train_step = lambda *args: (time.sleep(2 if args[2].step in (23, 24) else 0), quick_step(*args))[1]
train.launch(train.main, "config", typed=False)
"""


def scramble_generators() -> None:
    torch.manual_seed(random.randrange(2**32))
    np.random.seed(random.randrange(2**32))


def assert_same_run(one: str, other: str) -> None:
    assert [step for step, *_ in curve(one)] == list(range(1, 41))
    assert curve(one, *LOSSES) == curve(other, *LOSSES)
    for name in ("step-00000040.pt", "best.pt"):
        ours, theirs = (load(Path(folder, "checkpoints", name)) for folder in (one, other))
        assert ours["config"]["train"]["max_steps"] == 40
        assert ours["step"] == theirs["step"] and ours["best_loss"] == theirs["best_loss"]
        torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
        torch.testing.assert_close(ours["optimizer"], theirs["optimizer"], rtol=0, atol=0)
        assert torch.equal(ours["rng"][0]["torch"], theirs["rng"][0]["torch"])


def test_run_killed_with_sigkill_continues_bit_for_bit(workplace):
    killed = (*TINY, *DEMANDING, "attention=flash2", "hydra.run.dir=killed", "checkpoint.resume=auto")
    train("whole", *DEMANDING, "attention=flash2").ok()
    process = start("-c", SLOW_TRAINER, *killed)
    wait_for_step(23, "killed", process)
    process.kill()
    process.communicate()
    assert sorted(path.name for path in Path("killed/checkpoints").glob("step-*")) == [
        "step-00000010.pt",
        "step-00000020.pt",
    ]
    # Add the files that a kill during writing leaves.
    Path("killed/checkpoints/step-00000030.partial").write_bytes(b"PK")
    with open("killed/metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 24, "tok')
    scramble_generators()
    assert "continuing after step 20" in run("train.py", *killed).ok().out
    assert_same_run("killed", "whole")


@pytest.mark.gpu
def test_run_killed_on_the_gpu_continues_bit_for_bit_in_deterministic_mode(workplace):
    """Each run is a process of its own, because cuBLAS reads its setting when it starts."""

    def begin(folder: str) -> Popen:
        settings = (*TINY, *DEMANDING, "device=cuda", "train.deterministic=true", f"hydra.run.dir={folder}")
        resume = (f"checkpoint.dir={folder}/checkpoints", "checkpoint.resume=auto")
        return start("-c", SLOW_TRAINER, *settings, *resume)

    killed, whole = begin("killed"), begin("whole")
    wait_for_step(23, "killed", killed)
    killed.kill()
    killed.communicate()
    for process in (begin("killed"), whole):
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
    assert_same_run("killed", "whole")


@pytest.mark.gpu
def test_what_was_compiled_is_taken_from_the_disk_at_the_next_start(tmp_path, monkeypatch):
    """torch did not cache a graph with an autograd.Function, so a warm start traced everything again."""
    from torch._dynamo.utils import counters  # takes seconds to import

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    shape = ModelConfig(n_layer=2, n_head=2, n_embd=64, context_length=64, vocab_size=64)
    ids = torch.zeros(2, 64, dtype=torch.long, device="cuda")
    for _ in ("cold", "warm"):
        torch._dynamo.reset()
        model = GPT2(shape, build_attention(Flash2Config())).cuda()
        compute = Compute(ids.device, torch.bfloat16)
        with compute.autocast():
            compile_model(model, TrainConfig(), compute)(ids, ids).backward()
    assert counters["aot_autograd"]["autograd_cache_hit"] == counters["aot_autograd"]["autograd_cache_miss"] == 1


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_run_that_broke_off_continues_bit_for_bit(workplace, monkeypatch, attention):
    train("whole", *DEMANDING, f"attention={attention}").ok()
    broken = ("broken", *DEMANDING, f"attention={attention}", "checkpoint.dir=broken/checkpoints")
    broken += ("checkpoint.resume=auto",)

    def pull_the_plug():
        raise ArithmeticError

    with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(Checkpoints, "save", at_call(3, pull_the_plug, Checkpoints.save))
        train(*broken)
    assert curve("broken")[-1] == (30,)
    scramble_generators()
    train(*broken).ok()
    assert_same_run("broken", "whole")
    ended = train(*broken).ok()  # there is nothing left to do
    assert "this run ended with step 40; to train on, raise train.max_steps=40" in ended.out
    assert_same_run("broken", "whole")


def test_sigterm_and_sigint_save_a_checkpoint_and_say_how_to_continue(workplace):
    signals = {"terminated": signal.SIGTERM, "interrupted": signal.SIGINT}
    # No evaluation is due: the resumed run would repeat an evaluation that the signal prevents, in a row of its own.
    no_evaluation = "train.eval_interval=1000000"
    endless = (*TINY, "train.max_steps=1000000", no_evaluation)
    processes = {name: start(str(ROOT / "train.py"), *endless, f"hydra.run.dir={name}") for name in signals}
    for name, number in signals.items():
        wait_for_step(3, name, processes[name])
        processes[name].send_signal(number)
        out, err = processes[name].communicate(timeout=60)
        assert processes[name].returncode == 128 + number
        assert "Traceback" not in out + err
        step = re.search(rf"^stopped +{number.name} after step (\d+), ", out, re.MULTILINE)[1]
        ((_, _, remedy, _),) = printed_commands(out, "continue")
        assert curve(name) == [(i,) for i in range(1, int(step) + 1)]
        train(name, no_evaluation, remedy, f"train.max_steps={int(step) + 2}").ok()
        assert curve(name) == [(i,) for i in range(1, int(step) + 3)]


def test_a_checkpoint_follows_the_row_of_its_step(workplace, monkeypatch):
    """A kill after best.pt once lost the row of its step. A run that resumes from best.pt does not repeat the step."""
    save, before = SingleFileStore.save, {}

    def recorded(self, state: dict, best: bool = False) -> Path:
        before[state["step"], best] = [step for step, loss in curve("run", "val/loss") if loss]
        return save(self, state, best=best)

    monkeypatch.setattr(SingleFileStore, "save", recorded)
    train("run", "train.max_steps=4", "train.eval_interval=2", "checkpoint.interval=2").ok()
    assert before == {(2, True): [2], (2, False): [2], (4, True): [2, 4], (4, False): [2, 4]}


@pytest.mark.parametrize("interval", [5, 16])
@pytest.mark.parametrize("moment", ["evaluation", "saving"])
def test_signal_between_steps_loses_no_step(workplace, monkeypatch, moment, interval):
    """A signal during an evaluation, or while a checkpoint is written, ends the run like a signal during a step.

    The evaluation follows step 12, so there is an older checkpoint with an interval of 5 and none with one of 16.
    """
    method = {"evaluation": "save_if_best", "saving": "save"}[moment]
    terminate = at_call(1, lambda: os.kill(os.getpid(), signal.SIGTERM), getattr(Checkpoints, method))
    monkeypatch.setattr(Checkpoints, method, terminate)
    outcome = train("run", "train.max_steps=60", "train.eval_interval=12", f"checkpoint.interval={interval}")
    assert outcome.code == 128 + signal.SIGTERM
    stopped = curve("run")[-1][0]
    assert stopped < 20
    ((_, _, resume, _),) = printed_commands(outcome.out, "continue")
    newest = Path(resume.removeprefix("checkpoint.resume="))
    assert newest.name == f"step-{stopped:08d}.pt" and load(newest)["step"] == stopped


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "infinite"])
def test_loss_that_is_not_finite_stops_the_run_with_finite_weights_saved(workplace, monkeypatch, value):
    forward, calls = GPT2.forward, 0

    def spoilt(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        return forward(self, *args, **kwargs) * (value if calls == 7 else 1)

    monkeypatch.setattr(GPT2, "forward", spoilt)
    outcome = train("run", "train.max_steps=40", "train.log_interval=3")
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) == 1
    assert f"the loss was {value}" in outcome.err and "at step 7;" in outcome.err and "optimizer.lr" in outcome.err
    path = Path(re.search(r"\S+step-\d+\.pt", outcome.err).group())
    state = load(path)
    assert all(weight.isfinite().all() for weight in state["model"].values())
    for moments in state["optimizer"]["state"].values():
        assert all(value.isfinite().all() for value in moments.values())
    monkeypatch.undo()
    os.chdir(workplace)
    train("run", f"checkpoint.resume={path}", "train.max_steps=12").ok()
    assert curve("run")[-1] == (12,)


@pytest.mark.parametrize("interval", [1, 100])
@pytest.mark.parametrize("beside", ["true", "false"])
def test_weights_that_are_not_finite_are_not_saved_as_if_they_were(workplace, interval, beside):
    """A step with this learning rate makes weights infinite, and the loss of the next step NaN."""
    assert train("run", "train.max_steps=4", "checkpoint.interval=2").ok()
    resume = ("train.max_steps=9", "checkpoint.resume=run/checkpoints", "optimizer.lr=1e300")
    outcome = train("run", *resume, f"checkpoint.interval={interval}", f"checkpoint.asynchronous={beside}")
    assert outcome.code == 2
    sentence = r"the weights are not finite after step [56] and are not saved; lower optimizer\.lr, and continue with"
    advice = r"checkpoint\.resume=run/checkpoints/step-00000004\.pt hydra\.run\.dir=run"
    assert re.search(f"{sentence} {advice}", outcome.err)
    assert sorted(path.name for path in Path("run/checkpoints").glob("step-*")) == [
        "step-00000002.pt",
        "step-00000004.pt",
    ]


def test_metrics_are_those_of_the_design(workplace):
    outcome = train("run", "train.max_steps=21", "train.grad_accumulation=2", "train.log_interval=2").ok()
    assert "\noutput      run\n" in outcome.out
    logged = rows("run")
    assert [row["step"] for row in logged] == [*range(2, 21, 2), 21]
    training = {"train/loss", "train/perplexity", "train/lr", "train/grad_norm"}
    performance = {"perf/tokens_per_second", "perf/step_ms", "perf/tflops", "perf/tflops_causal"}
    performance |= {"perf/data_wait_fraction", "memory/peak_rss_gib"}
    for row in logged:
        evaluation = {"val/loss", "val/perplexity"} if row["step"] in (10, 20, 21) else set()
        assert row.keys() == {"step", "tokens"} | training | performance | evaluation
        assert row["tokens"] == row["step"] * 2 * 2 * 32
        for split in ("train", "val"):
            if f"{split}/loss" in row:
                assert row[f"{split}/perplexity"] == pytest.approx(math.exp(row[f"{split}/loss"]))
        assert 0 < row["perf/tflops_causal"] < row["perf/tflops"]
        assert 0 <= row["perf/data_wait_fraction"] <= 1
    assert logged[-1]["train/loss"] < logged[0]["train/loss"] - 0.5
    assert logged[0]["train/lr"] == pytest.approx(1e-2 * 2 / 5)


def test_timing_leaves_out_evaluation_checkpoints_and_the_capture_of_graphs(workplace, monkeypatch):
    """Each of them takes 1000 s on the meter's clock."""
    skipped_s = 0

    def slow(function):
        def skip_time(*args, **kwargs):
            nonlocal skipped_s
            skipped_s += 1000
            return function(*args, **kwargs)

        return skip_time

    monkeypatch.setitem(ThroughputMeter.__init__.__kwdefaults__, "clock", lambda: time.perf_counter() + skipped_s)
    monkeypatch.setattr(Checkpoints, "save", slow(Checkpoints.save))
    monkeypatch.setattr(evaluation, "validation_batches", slow(evaluation.validation_batches))
    monkeypatch.setattr(graphs, "capture", slow(graphs.capture))
    train("run", "train.max_steps=8", "train.log_interval=4", "train.eval_interval=3", "checkpoint.interval=6").ok()
    assert skipped_s == 6000
    assert all(row["perf/step_ms"] < 100_000 for row in rows("run") if "perf/step_ms" in row)


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_validation_has_the_shape_of_a_micro_step(monkeypatch, processes):
    """Validation then fits the memory of training, and torch.compile sees one batch shape."""
    shape = ModelConfig(n_layer=1, n_head=2, n_embd=32, context_length=4, vocab_size=65)
    asked = []

    def batches(tokens, *, batch_size, **options):
        asked.append(batch_size)
        return iter([tuple(torch.zeros(2, batch_size, 4, dtype=torch.int64))])

    monkeypatch.setattr(evaluation, "validation_batches", batches)
    world = SimpleNamespace(size=processes, rank=0, sum=lambda x: x, agreed=lambda act: act())
    compute = SimpleNamespace(world=world, device=torch.device("cpu"), autocast=nullcontext)
    model, tokens = (
        GPT2(shape, build_attention(NaiveConfig())),
        SimpleNamespace(val=None, dir=Path(), tokenizer="byte"),
    )
    options = {"document_mask": False, "is_stopped": lambda: False}
    metrics = evaluation.validate(model, tokens, shape, TrainConfig(batch_size=8), compute, **options)
    assert asked == [8 // processes] and math.isfinite(metrics["val/loss"])


def test_saved_configuration_is_the_one_that_ran(workplace, trained):
    train("run", "train.max_steps=1", "model.dropout=0.1", "wandb.tags=[a,b]", "precision=bf16").ok()
    saved = OmegaConf.to_object(OmegaConf.merge(Config(attention=Flash2Config()), OmegaConf.load("run/config.yaml")))
    assert isinstance(saved, Config)
    assert (saved.model.n_embd, saved.model.dropout, saved.train.max_steps) == (32, 0.1, 1)
    assert (saved.attention.name, saved.precision.name, saved.wandb.tags) == ("flash2", "bf16", ["a", "b"])
    assert saved.optimizer.lr == 1e-2 and saved.data.dir == "tokens" and saved.device == "cpu"
    OmegaConf.save(OmegaConf.structured(saved), "again.yaml")
    assert Path("again.yaml").read_text() == Path("run/config.yaml").read_text()


def test_accumulated_gradients_give_the_same_losses_as_a_larger_batch(workplace):
    train("large", "train.max_steps=15", "train.batch_size=4").ok()
    train("small", "train.max_steps=15", "train.batch_size=2", "train.grad_accumulation=2").ok()
    train("global", "train.max_steps=15", "train.batch_size=2", "train.global_batch_size=4").ok()
    for (_, *large), (_, *small) in zip(curve("large", *LOSSES[:3]), curve("small", *LOSSES[:3]), strict=True):
        assert small == pytest.approx(large, rel=1e-4)
    assert curve("global", *LOSSES) == curve("small", *LOSSES)


def test_validation_tokens_and_dropout_are_the_same_at_every_evaluation(workplace):
    """With a learning rate of zero, only other tokens or dropout could change the validation loss."""
    frozen = ("optimizer.lr=0", "optimizer.min_lr=0", "model.dropout=0.3", "train.eval_interval=2")
    train("run", *frozen, "train.max_steps=8", "train.eval_tokens=100").ok()
    evaluations = [row["val/loss"] for row in rows("run") if "val/loss" in row]
    assert len(evaluations) == 4 and len(set(evaluations)) == 1
    assert len({row["train/loss"] for row in rows("run")}) == 8
    train("larger_batches", *frozen, "train.max_steps=2", "train.eval_tokens=100", "train.batch_size=4").ok()
    assert rows("larger_batches")[-1]["val/loss"] == pytest.approx(rows("run")[-1]["val/loss"], rel=1e-5)


def test_newest_checkpoints_and_the_best_are_kept(workplace, monkeypatch):
    settings = ("train.max_steps=24", "train.eval_interval=6", "checkpoint.interval=5", "checkpoint.keep=3")
    train("run", *settings, "checkpoint.dir=elsewhere", "optimizer.lr=0.3").ok()
    assert sorted(path.name for path in Path("elsewhere").iterdir()) == [
        "best.pt",
        *(f"step-{step:08d}.pt" for step in (15, 20, 24)),
    ]
    losses = {row["step"]: row["val/loss"] for row in rows("run") if "val/loss" in row}
    best = load("elsewhere/best.pt")
    assert losses.keys() == {6, 12, 18, 24}
    assert (best["step"], best["best_loss"]) == min(losses.items(), key=lambda item: item[1])


def test_run_started_afresh_in_an_old_folder_is_refused(workplace):
    """Such a run took the old run's later steps for the newest, and deleted each new checkpoint as soon as written."""
    train("run", "train.max_steps=30", "checkpoint.interval=10").ok()
    before = Path("run/metrics.jsonl").read_bytes()
    outcome = train("run", "train.max_steps=20", "checkpoint.interval=10", "data.dir=missing")
    assert outcome.code == 2 and "step-00000030.pt is past step 0" in outcome.err, "before the data are prepared"
    outcome = train("run", "train.max_steps=40", "checkpoint.resume=run/checkpoints/step-00000020.pt")
    assert outcome.code == 2 and "choose another hydra.run.dir or checkpoint.dir" in outcome.err
    assert Path("run/metrics.jsonl").read_bytes() == before and find("run").name == "step-00000030.pt"


def test_run_without_gpt2s_vocabulary_still_ends_well(workplace, monkeypatch):
    """Only the sample at the end needs the vocabulary, which a machine without a network may lack."""

    def offline(self):
        raise UserError("GPT-2's vocabulary is not cached and could not be downloaded")

    monkeypatch.setattr(tokenizers.GPT2Tokenizer, "__init__", offline)
    outcome = train("run", "data.tokenizer=gpt2", "train.max_steps=2", "train.sample_tokens=5")
    assert outcome.code == 0, outcome.err
    assert "no sample: GPT-2's vocabulary" in outcome.out and "\nfinished    2 steps, " in outcome.out


def test_bare_nanogpt_files_train_with_gpt2s_vocabulary(workplace):
    """The token files have no meta.json, like nanoGPT's, and the tokenizer is nanoGPT's."""
    assert sorted(path.name for path in Path("tokens").iterdir()) == ["train.bin", "val.bin"]
    train("run", "data.tokenizer=gpt2", "train.max_steps=2").ok()
    assert load("run/checkpoints/step-00000002.pt")["model_config"]["vocab_size"] == 50257
    assert rows("run")[0]["train/loss"] == pytest.approx(math.log(50257), rel=0.05)


def test_a_resumed_run_goes_by_its_own_settings(workplace):
    train("run", "train.max_steps=3", "checkpoint.dir=kept").ok()
    later = "checkpoint.dir=kept", "checkpoint.resume=auto", "train.batch_size=4"
    train("again", "optimizer.weight_decay=0.5", "optimizer.beta2=0.5", *later).ok()
    groups = load("kept/step-00000005.pt")["optimizer"]["param_groups"]
    assert {(group["weight_decay"], group["betas"]) for group in groups} == {(0.5, (0.9, 0.5)), (0.0, (0.9, 0.5))}
    tokens = {row["step"]: row["tokens"] for row in rows("again")}
    assert tokens == {4: (3 * 2 + 4) * 32, 5: (3 * 2 + 8) * 32}
    refused = train("more", "train.max_steps=4", *later)
    assert refused.code == 2 and "is at step 5, past train.max_steps=4" in refused.err


def test_pretrained_weights_are_where_training_starts(workplace, trained, exported):
    train("run", f"model.pretrained={exported}", "optimizer.lr=0", "optimizer.min_lr=0", "train.max_steps=1").ok()
    before, after = ([row["val/loss"] for row in rows(folder) if "val/loss" in row][-1] for folder in (trained, "run"))
    assert after == pytest.approx(before, rel=1e-5)


def test_a_resumed_run_does_without_what_it_once_started_from(workplace, exported):
    shutil.copytree(exported, "start")
    first = ("model.pretrained=start", "checkpoint.dir=kept", "train.max_steps=2")
    train("run", *first).ok()
    shutil.rmtree("start")
    train("more", *first[:2], "train.max_steps=3", "checkpoint.resume=auto").ok()
    assert [row["step"] for row in rows("more")] == [3]
    refused = train("none", "model.pretrained=start")
    assert refused.code == 2 and "model.pretrained=start is not a folder" in refused.err


def test_prepared_text_trains(workplace):
    Path("texts").mkdir()
    for i in range(40):
        Path(f"texts/{i}.txt").write_text(f"{i} green bottles hanging on the wall. " * 10)
    source = ("data=text", "data.source=texts/*.txt", "data.dir=bottles", "data.tokenizer=byte")
    prepared = run("data/prepare.py", *source, "data.val_fraction=0.2").ok()
    assert "40 documents" in prepared.out
    train("run", "data.dir=bottles", "train.max_steps=10").ok()
    assert rows("run")[-1]["train/loss"] < rows("run")[0]["train/loss"] - 0.5


def test_documents_apart_train_alike_by_every_attention(workplace):
    """Lines are documents. All attentions give one curve, and it differs from the curve without the mask."""
    for path in (workplace / "tokens").iterdir():
        tokens = np.fromfile(path, dtype="<u2")
        np.where(tokens == ord("\n"), 256, tokens).astype("<u2").tofile(path)
    curves = {}
    for attention, masked in (("naive", True), ("sdpa", True), ("flash2", True), ("flash2", False)):
        folder = f"{attention}-{masked}"
        train(folder, f"attention={attention}", f"data.document_mask={masked}").ok()
        curves[attention, masked] = [loss for _, *losses in curve(folder, "train/loss", "val/loss") for loss in losses]
    expected = pytest.approx(curves.pop(("naive", True)), abs=1e-4)
    assert [curve == expected for curve in curves.values()] == [True, True, False]


def test_built_in_corpus_trains_and_ends_with_a_sample(workplace):
    short = ("train.max_steps=3", "train.eval_tokens=1024", "train.batch_size=2", "wandb.mode=disabled", "device=cpu")
    outcome = run("train.py", "model=gpt2-nano", *short).ok()
    assert len(outcome.out.partition("\na sample:\n")[2]) > 50
    folder = Path("outputs/latest").resolve()
    assert f"\noutput      outputs/{folder.name}\n" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 100
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "config.yaml", "metrics.jsonl"]
    assert Path("tokens/stdlib/meta.json").is_file()


def test_a_run_that_wandb_refuses_is_not_the_latest(workplace, monkeypatch):
    def refuse(*_, **__):
        raise UserError("wandb.mode=online cannot start a run")

    monkeypatch.setattr("trainer.build.start_loggers", refuse)
    assert run("train.py", "model=gpt2-nano", "train.max_steps=3", "device=cpu").code == 2
    assert not Path("outputs/latest").exists()
