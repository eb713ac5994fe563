"""The settings of a resumed run: the checkpoint gives them, and the command line changes them."""

import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from data.token_files import TokenWriter
from tests.e2e import ROOT, TINY, at_call, curve, load, logged, printed_commands, run, train
from trainer.checkpoint.files import write_file
from trainer.checkpoint.policy import Checkpoints
from trainer.distributed.world import join

pytest_plugins = ["tests.e2e"]
pytestmark = pytest.mark.usefixtures("workplace")

OWN = ("optimizer.lr=1e-3", "optimizer.min_lr=1e-4", "attention=local", "attention.window=16", "train.max_steps=6")
OWN += ("checkpoint.interval=3", "checkpoint.keep=9", "train.eval_interval=4")
LOSSES = ("train/loss", "train/lr", "val/loss")
AT_3 = 3 * 2 * 32  # tokens


def changes(folder: str) -> list[tuple]:
    found = [row for row in logged(folder) if "settings_changed" in row]
    return [(row["step"], row["tokens"], row["settings_changed"]) for row in found]


def test_the_printed_command_continues_the_run_with_its_settings(monkeypatch):
    """It can be pasted into a shell, also if the folder needs quotes. Nothing else has to be given again."""
    train("whole", *OWN).ok()
    folder = "odd/a=b, c"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", at_call(1, lambda: os.kill(os.getpid(), signal.SIGINT), Checkpoints.save))
        stopped = train(f'"{folder}"', *OWN)
    assert stopped.code == 130
    ((python, script, *overrides),) = printed_commands(stopped.out, "continue")
    assert python == "python" and Path(script).samefile(ROOT / "train.py")
    settings = OmegaConf.load(f"{folder}/config.yaml")
    outcome = run("train.py", *overrides).ok()
    assert curve(folder, *LOSSES) == curve("whole", *LOSSES)
    assert "since the checkpoint" not in outcome.out and not changes(folder)
    settings.checkpoint.resume = overrides[0].partition("=")[2].strip('"')
    assert OmegaConf.load(f"{folder}/config.yaml") == settings


def test_what_the_command_line_changes_is_told_and_recorded():
    train("run", *OWN).ok()
    from_3 = "checkpoint.resume=run/checkpoints/step-00000003.pt", "hydra.run.dir=run"
    outcome = run("train.py", *from_3, "checkpoint.dir=later", "optimizer.lr=4e-3", "attention=naive").ok()
    line = "attention.name local -> naive, optimizer.lr 0.001 -> 0.004"
    assert f"\nchanged     since the checkpoint: {line}\n" in outcome.out
    assert changes("run") == [(3, AT_3, {"attention.name": ["local", "naive"], "optimizer.lr": [0.001, 0.004]})]
    settings = Path("run/config.yaml").read_text()
    assert settings.startswith(f"# changed after step 3: {line}\n") and "\nattention:\n  name: naive\n" in settings
    # Another continuation of the same step takes the place of this one. A later one adds to it.
    run("train.py", *from_3, "checkpoint.dir=other", "train.batch_size=1", "train.max_steps=4").ok()
    assert changes("run") == [(3, AT_3, {"train.batch_size": [2, 1], "train.max_steps": [6, 4]})]
    same_data = "data=tokens", "data.dir=tokens", "data.tokenizer=byte"
    in_other = "checkpoint.resume=other", "checkpoint.dir=other", "hydra.run.dir=run"
    run("train.py", *in_other, *same_data, "train.max_steps=5").ok()
    assert changes("run")[1:] == [(4, AT_3 + 32, {"train.max_steps": [4, 5]})]
    notes = [line for line in Path("run/config.yaml").read_text().splitlines() if line.startswith("#")]
    first, second = "train.batch_size 2 -> 1, train.max_steps 6 -> 4", "train.max_steps 4 -> 5"
    assert notes == [f"# changed after step 3: {first}", f"# changed after step 4: {second}"]
    assert load("other/step-00000005.pt")["config"]["optimizer"]["lr"] == 1e-3


def test_the_choice_of_the_runs_own_optimizer_keeps_its_settings():
    """It once gave the run the learning rate of the default model."""
    train("run", *OWN).ok()
    outcome = run("train.py", "checkpoint.resume=run", "hydra.run.dir=run", "optimizer=adamw", "train.max_steps=7").ok()
    assert "\nchanged     since the checkpoint: train.max_steps 6 -> 7\n" in outcome.out


def test_a_branch_of_a_run_with_a_checkpoint_folder_leaves_this_folder_alone(monkeypatch):
    """It once saved there, and replaced the best checkpoint of the first run."""
    train("run", *OWN, "checkpoint.dir=kept").ok()
    before = {path: path.read_bytes() for path in Path("kept").iterdir()}
    run("train.py", "checkpoint.resume=kept", "hydra.run.dir=branch", "train.max_steps=7").ok()
    assert {path: path.read_bytes() for path in Path("kept").iterdir()} == before
    assert Path("branch/checkpoints/step-00000007.pt").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", at_call(1, lambda: os.kill(os.getpid(), signal.SIGINT), Checkpoints.save))
        stopped = train("run", *OWN[:-3], "train.max_steps=9", "checkpoint.dir=kept", "checkpoint.resume=auto")
    ((_, _, *overrides),) = printed_commands(stopped.out, "continue")
    assert overrides[1:] == ["hydra.run.dir=run", "checkpoint.dir=kept"]


def test_a_run_that_wandb_refuses_keeps_its_config(monkeypatch):
    train("run", "train.max_steps=2").ok()
    before = Path("run/config.yaml").read_bytes()
    monkeypatch.setattr("trainer.loggers.wandb.server_problem", lambda settings: "no credentials; run `wandb login`")
    refused = train("run", "train.max_steps=2", "wandb.mode=online", "checkpoint.resume=auto")
    assert refused.code == 2 and "wandb.mode=online finds no credentials" in refused.err
    assert Path("run/config.yaml").read_bytes() == before and not list(Path("run").glob("*.previous*"))


def test_a_finished_run_is_not_given_settings_that_it_was_not_trained_with():
    """A sweep whose list of values got a new first value showed old curves under the names of other values."""
    again = "checkpoint.resume=auto"
    train("run").ok()
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    for changed, line in (
        ("optimizer.lr=5e-3", "optimizer.lr 0.01 -> 0.005"),
        ("attention=naive", "attention.name flash2 -> naive"),
        ("precision=bf16", "precision.name fp32 -> bf16"),
        ("train.seed=2", "train.seed 1337 -> 2"),
        ("data.document_mask=true", "data.document_mask false -> true"),
    ):
        refused = train("run", again, changed, "train.sample_tokens=9")
        assert refused.code == 2 and "step-00000005.pt has trained all train.max_steps=5 steps with" in refused.err
        assert f"other settings ({line}); raise train.max_steps" in refused.err
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    train("run", again).ok()
    beside = "train.sample_tokens=1", "train.eval_tokens=64", "checkpoint.keep=9", "parallel=none", "tensorboard=false"
    train("run", again, *beside).ok()
    train("run", again, "optimizer.lr=5e-3", "train.max_steps=6").ok()


def test_a_run_does_not_move_to_another_device_or_precision_by_itself(monkeypatch):
    """A job that was put back into the queue went on in fp32 on the CPU of a machine whose driver had failed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    automatic = [setting for setting in TINY if setting != "device=cpu"]
    run("train.py", *automatic, "device=auto", "hydra.run.dir=run").ok()
    path, again = Path("run/checkpoints/step-00000005.pt"), ("checkpoint.resume=auto", "train.max_steps=6")
    state = load(path)
    assert (state["config"]["device"], state["config"]["precision"]) == ("cpu", {"name": "fp32"})
    on_gpu = state["config"] | {"device": "cuda", "precision": {"name": "bf16"}}
    write_file(path, state | {"config": on_gpu})
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    refused = run("train.py", *again, "hydra.run.dir=run")
    assert refused.code == 2 and refused.err.startswith("error: device=cuda finds no GPU; set device=cpu")
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    moved = run("train.py", *again, "hydra.run.dir=run", "device=auto", "precision=auto").ok().out
    assert "device cuda -> cpu" in moved and "precision.name bf16 -> fp32" in moved
    of_older_version = load(path)["config"] | {"device": "auto", "precision": {"name": "auto"}}
    write_file(path, load(path) | {"config": of_older_version})
    assert "device" not in run("train.py", f"checkpoint.resume={path}", "hydra.run.dir=other").ok().out


def test_a_setting_that_the_checkpoint_does_not_know_had_its_default():
    """A finished run of a version before attention.deterministic was refused: null -> false."""
    train("run").ok()
    path, again = Path("run/checkpoints/step-00000005.pt"), "checkpoint.resume=auto"
    older = load(path)
    for group, key in (("attention", "deterministic"), ("optimizer", "eps"), ("data", "document_mask")):
        del older["config"][group][key]
    write_file(path, older)
    assert "since the checkpoint" not in train("run", again).ok().out
    for changed, line in (
        ("attention.deterministic=true", "attention.deterministic false -> true"),
        ("optimizer.eps=1e-6", "optimizer.eps 1e-08 -> 1e-06"),
        ("data.document_mask=true", "data.document_mask false -> true"),
        ("attention=local", "attention.name flash2 -> local"),
        ("attention=sdpa", "attention.name flash2 -> sdpa"),
    ):
        refused = train("run", again, changed)
        assert refused.code == 2 and f"with other settings ({line}); raise train.max_steps" in refused.err


def test_other_evaluations_begin_a_new_best():
    """No later loss was below the best one of a few easy tokens, so best.pt was never written again."""
    often = "train.eval_interval=2", "checkpoint.resume=auto"
    train("run", *often, "train.eval_tokens=64", "train.max_steps=4").ok()
    last, best = Path("run/checkpoints/step-00000004.pt"), Path("run/checkpoints/best.pt")
    write_file(last, load(last) | {"best_loss": 0.1, "best_step": 2})
    told = "train.eval_tokens 64 -> 256: the best validation loss so far (0.1000 at step 2) does not compare"
    finished = train("run", *often, "train.eval_tokens=256", "train.max_steps=4").ok()
    assert told in " ".join(finished.out.split()) and load(last)["best_loss"] == 0.1, "no evaluation has followed"
    more = train("run", *often, "train.eval_tokens=256", "train.max_steps=6").ok()
    assert told in " ".join(more.out.split()) and re.search(r"\nloss +best validation \S+ \(.+\) at step 6,", more.out)
    assert load(best)["step"] == load(best)["best_step"] == 6 and load(best)["best_loss"] > 0.1
    write_file(last.with_stem("step-00000006"), load(best) | {"best_loss": 0.1})
    same = train("run", *often, "train.eval_tokens=256", "train.max_steps=8").ok()
    assert "best validation 0.1000" in same.out and load(best)["step"] == 6, "the evaluations are the same"
    masked = train("run", *often, "train.eval_tokens=256", "train.max_steps=10", "data.document_mask=true").ok()
    assert "data.document_mask false -> true: the best" in masked.out and load(best)["step"] == 10


@pytest.mark.parametrize(
    ("own", "given"),
    [
        ("train.batch_size=4", "train.global_batch_size=12"),
        ("optimizer.lr=1e-2", "optimizer.min_lr=5e-3"),
        ("optimizer=muon", "optimizer.muon.momentum=0.9"),
        ("model.n_head=3 model.n_embd=96", "model.n_kv_head=3"),
    ],
)
def test_what_the_command_line_changes_must_fit_the_checkpoint_and_not_the_defaults(own, given):
    """train.global_batch_size=12 was refused because it is not a multiple of the default batch size, 8."""
    train("run", *own.split()).ok()
    outcome = run("train.py", "checkpoint.resume=auto", "hydra.run.dir=run", "train.max_steps=6", given).ok()
    assert set(changes("run")[0][2]) == {given.partition("=")[0], "train.max_steps"}, outcome.out


def test_a_wrong_setting_is_refused_before_anything_is_written():
    train("run").ok()
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    resume = "checkpoint.resume=auto", "hydra.run.dir=run", "train.max_steps=6"
    for given, sentence in (
        ("optimizer.min_lr=2e-2", "optimizer.min_lr=0.02 is above optimizer.lr=0.01; lower min_lr or raise lr"),
        ("train.global_batch_size=3", "train.global_batch_size=3 is not a multiple of train.batch_size=2; set"),
        ("checkpoint.interval=0", "checkpoint.interval=0 is out of range"),
        ("wandb.mode=sometimes", "wandb.mode=sometimes is unknown"),
        ("data=tokens", "data.dir has no value; give data.dir=..."),
    ):
        refused = run("train.py", *resume, given)
        assert refused.code == 2 and not refused.out
        assert refused.err.startswith(f"error: {sentence}") and len(refused.err.splitlines()) == 1, refused.err
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    for given in ("train.eval_interval=0", "optimizer.min_lr=2e-2"):  # a new run
        refused = train("new", "checkpoint.resume=auto", given)
        assert refused.code == 2 and refused.err.startswith(f"error: {given.partition('=')[0]}=")
    assert not Path("new").exists()


def test_other_pretrained_weights_are_refused_because_the_checkpoint_has_the_weights():
    """The run printed that model.pretrained had changed, and continued with the checkpoint's weights."""
    train("first").ok()
    begin = "model.pretrained=first", "checkpoint.resume=auto"
    train("tuned", *begin).ok()
    longer = "checkpoint.resume=auto", "train.max_steps=6"
    for folder, given in (("tuned", "tuned"), ("first", "nosuch")):
        refused = run("train.py", *longer, f"hydra.run.dir={folder}", f"model.pretrained={given}")
        sentence = f"model.pretrained={given} has no effect on a resumed run; leave it out, or start a new run in"
        assert refused.code == 2 and refused.err == f"error: {sentence} another folder\n"
    train("tuned", *begin, "train.max_steps=6").ok()
    assert [row[2] for row in changes("tuned")] == [{"train.max_steps": [5, 6]}]
    run("train.py", *longer, "hydra.run.dir=tuned", "train.max_steps=7").ok()


@pytest.mark.parametrize("source", [None, "first"])
def test_a_resumed_run_keeps_the_source_of_its_weights(source):
    """model.pretrained=null was a changed setting. After that, the line that began the run was refused."""
    train("first").ok()
    begin = (f"model.pretrained={source}",) if source else ()
    train("run", *begin).ok()
    again, null = ("hydra.run.dir=run", "checkpoint.resume=auto"), "model.pretrained=null"
    run("train.py", *again, null).ok()
    run("train.py", *again, null, "train.max_steps=6").ok()
    run("train.py", *again, "model=gpt2-nano", *TINY[:4], "train.max_steps=7").ok()
    train("run", *again, *begin, "train.max_steps=8").ok()
    assert [row[2] for row in changes("run")] == [{"train.max_steps": [step, step + 1]} for step in (5, 6, 7)]
    assert load("run/checkpoints/step-00000008.pt")["config"]["model"]["pretrained"] == source


@pytest.mark.parametrize(
    "choice",
    [
        "experiment=heir",
        "experiment=[base]",
        "experiment=overriding",
        "experiment=launching",
        "experiment=listed",
        "optimizer/of@optimizer=gpt2",
    ],
)
def test_every_form_of_a_choice_starts_a_run_and_continues_it(choice):
    """A Slurm job that is put back into the queue has the same command line."""
    recipes = {
        "base": "optimizer: {warmup_steps: 3}",
        "heir": "defaults: [base, _self_]\nmodel: {dropout: 0.1}\nhydra: {job: {name: heir}}",
        "overriding": "defaults: [{override /optimizer/of@optimizer: gpt2}, {override /data: tokens}]",
        "launching": "defaults: [{override /hydra/job_logging: default}]\nhydra: {job: {name: mine}}",
        "listed": "defaults: [/experiment/base, _self_]\ntrain: {seed: 5}",
    }
    folder = Path("mine/experiment")
    folder.mkdir(parents=True)
    for name, text in recipes.items():
        (folder / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    line = "--config-dir=mine", choice, *TINY, "hydra.run.dir=run", "checkpoint.resume=auto"
    run("train.py", *line, "train.max_steps=2").ok()
    run("train.py", *line, "train.max_steps=3").ok()
    assert [row[2] for row in changes("run")] == [{"train.max_steps": [2, 3]}]


def test_an_experiment_changes_what_its_file_sets(tmp_path):
    train("run", *OWN, "data.document_mask=true").ok()
    (tmp_path / "mine/experiment").mkdir(parents=True)
    recipe = "# @package _global_\ndefaults:\n  - override /attention: sdpa\ntrain:\n  max_steps: 7\n"
    (tmp_path / "mine/experiment/longer.yaml").write_text(recipe)
    outcome = run("train.py", "--config-dir=mine", "experiment=longer", "checkpoint.resume=run", "hydra.run.dir=run")
    assert "attention.name local -> sdpa" in outcome.ok().out and "train.max_steps 6 -> 7" in outcome.out
    assert load("run/checkpoints/step-00000007.pt")["config"]["data"]["document_mask"] is True


def test_only_the_command_line_names_code_to_import(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("def attend(q, k, v, *, causal, scale):\n    return q + k + v\n")
    custom = "attention=custom", "attention.function=mine:attend"
    train("run", *custom).ok()
    resume = "checkpoint.resume=run", "train.max_steps=6", "hydra.run.dir=run"
    refused = run("train.py", *resume)
    assert refused.code == 2 and "must not name code to import; give attention=custom attention.fu" in refused.err
    assert "attention.name custom -> naive" in run("train.py", *resume, "attention=naive", "checkpoint.dir=x").ok().out
    assert "since the checkpoint: train.max_steps 5 -> 6\n" in run("train.py", *resume, *custom).ok().out


def test_as_many_other_tokens_do_not_continue_a_run():
    """The position in the tokens means nothing in a file of other content. Only the number of tokens was compared."""
    for folder, text in (("one", b"1 + 1 = 2\n"), ("other", b"2 + 2 = 4\n")):
        with TokenWriter(Path(folder), {"name": "text"}) as writer:
            for split in ("train", "val"):
                writer.write(split, np.frombuffer(text * 50, np.uint8).astype("<u2").tobytes(), 1)
            writer.finish("byte")
    train("run", "data.dir=one").ok()
    before = Path("run/metrics.jsonl").read_bytes()
    longer = "checkpoint.resume=run", "hydra.run.dir=run", "train.max_steps=6"
    refused = run("train.py", *longer, "data.dir=other")
    assert refused.code == 2 and "other/train.bin has other tokens (sha256 " in refused.err
    assert len(refused.err.splitlines()) == 1 and Path("run/metrics.jsonl").read_bytes() == before
    Path("one").rename("moved")
    run("train.py", *longer, "data.dir=moved").ok()


def test_tokens_of_another_tokenizer_are_refused_with_the_checkpoints():
    """The sentence was about model.vocab_size, which the user had not set: it came from the checkpoint."""
    train("run").ok()
    shutil.copytree("tokens", "other")
    again = "checkpoint.resume=auto", "hydra.run.dir=run", "train.max_steps=6"
    (sentence,) = run("train.py", *again, "data=tokens", "data.dir=other").err.splitlines()
    source = Path("run/checkpoints/step-00000005.pt").absolute()
    problem = f"checkpoint.resume={source} was trained on byte tokens, not on gpt2 tokens"
    assert sentence == f"error: {problem}; choose data of the byte tokenizer"


def test_a_new_run_does_not_replace_the_best_checkpoint_of_an_old_run():
    """A run that was killed before its first regular checkpoint leaves only best.pt."""
    settings = "train.eval_interval=5", "checkpoint.interval=4"
    train("run", *settings).ok()
    last, fourth = (Path(f"run/checkpoints/step-0000000{step}.pt") for step in (5, 4))
    last.unlink()
    assert "continuing after step 4" in train("run", *settings, "checkpoint.resume=auto").ok().out
    last.unlink()
    fourth.unlink()
    best = Path("run/checkpoints/best.pt")
    before = best.read_bytes()
    for place in (("run",), ("new", "checkpoint.dir=run/checkpoints")):
        refused = train(*place, *settings, "train.seed=2")
        assert refused.code == 2 and "best.pt is past step 0, from which this run starts; continue" in refused.err
    assert best.read_bytes() == before and not Path("new").exists()
    train("run", *settings, "checkpoint.resume=auto", "train.max_steps=6").ok()


def test_a_folder_that_another_run_used_until_now_is_refused(monkeypatch):
    """The other run ends after this run has looked for a checkpoint, and before this run locks the folder."""
    train("other").ok()
    copy = partial(shutil.copytree, "other", "run", dirs_exist_ok=True)
    monkeypatch.setattr("trainer.distributed.world.join", at_call(1, copy, join))
    refused = train("run", "train.max_steps=3")
    assert refused.code == 2 and "step-00000005.pt is past step 0" in refused.err
    assert Path("run/metrics.jsonl").read_bytes() == Path("other/metrics.jsonl").read_bytes()


def test_a_resumed_run_does_not_replace_the_checkpoints_of_another_run():
    """Its later steps made the other run's checkpoints outdated, which were deleted."""
    for folder, steps in (("other", 4), ("run", 5)):
        train(folder, f"train.max_steps={steps}", "checkpoint.interval=2", "train.eval_interval=2").ok()
    before = {path: path.read_bytes() for path in Path("other").rglob("*") if path.is_file()}
    resumed = "checkpoint.resume=run", "train.max_steps=9"
    for place in (("hydra.run.dir=other",), ("hydra.run.dir=new", "checkpoint.dir=other/checkpoints")):
        refused = run("train.py", *resumed, *place)
        assert (
            refused.code == 2 and "other/checkpoints has checkpoints of another run (step-00000004.pt)" in refused.err
        )
        assert "run/checkpoints/step-00000005.pt is not among them; continue the other run with" in refused.err
    assert {path: path.read_bytes() for path in Path("other").rglob("*") if path.is_file()} == before
    for path in Path("other/checkpoints").glob("step-*"):
        path.unlink()
    assert "of another run (best.pt)" in run("train.py", *resumed, "hydra.run.dir=other").err
    Path("link").symlink_to("run")
    run("train.py", "checkpoint.resume=link/checkpoints", "train.max_steps=6", "hydra.run.dir=run").ok()
    Path("link.pt").symlink_to("run/checkpoints/step-00000006.pt")
    run("train.py", "checkpoint.resume=link.pt", "train.max_steps=7", "hydra.run.dir=run").ok()


def test_a_branch_begins_its_own_best_and_keeps_what_another_run_left_in_its_folder():
    train("a", *OWN).ok()
    train("b", *OWN, "checkpoint.dir=elsewhere", "train.seed=7").ok()
    left = {name: Path(f"b/{name}").read_text() for name in ("metrics.jsonl", "config.yaml")}
    branch = "checkpoint.resume=a/checkpoints/step-00000006.pt", "hydra.run.dir=b", "checkpoint.dir=b/checkpoints"
    outcome = run("train.py", *branch, "train.max_steps=8", "optimizer.lr=10", "optimizer.min_lr=10").ok()
    best, before = load("b/checkpoints/best.pt"), load("a/checkpoints/best.pt")
    assert best["best_step"] == 8 and best["best_loss"] > before["best_loss"]
    assert f"best validation {best['best_loss']:.4f}" in outcome.out and min(row["step"] for row in logged("b")) == 6
    assert {name: Path("b", name.replace(".", ".previous.")).read_text() for name in left} == left


def test_the_settings_of_a_checkpoint_are_not_evaluated():
    train("run", "train.max_steps=1").ok()
    state = load("run/checkpoints/step-00000001.pt")
    state["config"]["wandb"]["name"] = "${oc.env:HOME}"
    write_file(Path("altered/step-00000001.pt"), state)
    refused = run("train.py", "checkpoint.resume=altered")
    assert refused.code == 2 and "altered/step-00000001.pt is not from this version of the trainer" in refused.err
