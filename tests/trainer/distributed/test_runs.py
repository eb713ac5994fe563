"""Several processes on one machine, with gloo on its CPU or NCCL on its GPUs, train the same model as one process."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from errors import UserError
from tests import several
from tests.e2e import curve, load, printed_commands, rows, run, train, write_tokens
from tests.several import (
    GLOBAL,
    LOSSES,
    SINGLE_NODE,
    assert_same_curve,
    ended,
    torchrun,
    train_on_two_nodes,
    train_together,
)
from trainer.checkpoint.folder import find
from trainer.checkpoint.load import load as load_checkpoint

pytest_plugins = ["tests.e2e"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Yield the folder of the runs, with one and with several processes. Few launches take less time."""
    folder, resume = tmp_path_factory.mktemp("runs"), "checkpoint.resume={}/checkpoints/step-00000003"
    after_fsdp = f"{GLOBAL} {resume.format('fsdp')}"
    each_2 = f"{GLOBAL} parallel=fsdp checkpoint.interval=2 train.eval_interval=6"
    dropping = f"{GLOBAL} model.dropout=0.2 checkpoint.asynchronous=true"
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
            f"ddp_after_fsdp {after_fsdp} parallel=ddp",
            f"terminated {GLOBAL} parallel=fsdp checkpoint.interval=100",
            f"late {GLOBAL} parallel=fsdp train.sample_tokens=5",
            f"slow {each_2}",
            f"full {each_2} checkpoint.on_error=continue",
            f"stopped {each_2}",
            f"unreadable {GLOBAL} parallel=fsdp",
            f"slow_unreadable {GLOBAL}",
            f"dropping_ddp {dropping}",
            f"dropping_ddp_resumed {dropping} {resume.format('dropping_ddp')}.pt",
            f"dropping_fsdp {dropping} parallel=fsdp",
            f"dropping_fsdp_resumed {dropping} parallel=fsdp {resume.format('dropping_fsdp')}",
            f"ddp_after_unreadable {GLOBAL} parallel=ddp checkpoint.resume=unreadable/checkpoints/step-00000004",
        )
        train_on_two_nodes(
            2,
            f"four {GLOBAL}",
            f"fsdp_after_fsdp {after_fsdp} parallel=fsdp",
            f"hsdp_after_fsdp {after_fsdp} parallel=hsdp train.sample_tokens=5",
        )
        alone = train("alone_after_dropping", *f"{dropping} {resume.format('dropping_ddp')}.pt".split()).ok()
        Path("alone_after_dropping/out.txt").write_text(alone.out)
        train("alone_after_fsdp", *after_fsdp.split(), "parallel=none").ok()
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


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_same_number_of_processes_continues_to_the_bit_with_dropout(runs, parallel):
    resumed = f"dropping_{parallel}_resumed"
    assert curve(runs / resumed, *LOSSES) == curve(runs / f"dropping_{parallel}", *LOSSES)[3:]
    ours, theirs = (load_checkpoint(runs / folder) for folder in (resumed, f"dropping_{parallel}"))
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
    ours, theirs = ([of_one["torch"] for of_one in state["rng"]] for state in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert len(ours) == 2 and not torch.equal(*ours)
    assert "processes, this run has" not in (runs / resumed / "out.txt").read_text()


def test_another_number_of_processes_is_told_what_differs(runs):
    told = (runs / "alone_after_dropping" / "out.txt").read_text()
    sentence = "the checkpoint is of 2 processes, this run has 1: the batches of a step stay the same, but sums"
    assert sentence in " ".join(told.split())


def test_the_first_process_alone_logs_and_saves(runs):
    """On two nodes too. A step has 16 sequences of 32 tokens."""
    for folder in ("ddp", "four"):
        logged = rows(runs / folder)
        assert [(row["step"], row["tokens"]) for row in logged] == [(step, step * 16 * 32) for step in range(1, 7)]
        assert load(runs / folder / "checkpoints" / "step-00000006.pt")["loader"]["position"] == 6 * 16


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [
        ("locked", "another run writes to locked"),
        ("nowhere", "nowhere"),
        ("refused", "cannot be written (No space left on device)"),
    ],
)
def test_what_the_first_process_refuses_the_others_refuse_too(runs, folder, sentence):
    """Otherwise the other processes would wait for the first one."""
    code, *_, error = (runs / folder / "out.txt").read_text().splitlines()
    assert code == "2" and error.startswith("error: ") and sentence in error


def test_what_one_process_lacks_for_a_sample_leaves_it_out_in_all(runs):
    code, *lines = (runs / "wordless" / "out.txt").read_text().splitlines()
    assert code == "0" and "no sample: no byte" in lines


def test_blocks_that_are_compiled_one_by_one_sample_too(runs):
    code, *lines = (runs / "compiled" / "out.txt").read_text().splitlines()
    assert code == "0" and "a sample:" in lines


def test_a_signal_to_one_process_stops_all_after_the_same_step(runs):
    """The processes end when the checkpoint, which is written in the background, is complete."""
    assert [step for step, *_ in curve(runs / "terminated")] == [1, 2, 3]
    assert load_checkpoint(runs / "terminated")["step"] == 3
    code, *lines = (runs / "terminated" / "out.txt").read_text().splitlines()
    path = find(runs / "terminated")
    (saved,) = [number for number, line in enumerate(lines) if line.startswith(f"saved {path.relative_to(runs)} in ")]
    (last,) = [number for number, line in enumerate(lines) if line.startswith("stopped     SIGTERM after step 3, ")]
    assert code == "143" and saved < last
    (words,) = printed_commands("\n".join(lines), "continue")
    places = [f"checkpoint.resume={path}", f"hydra.run.dir={runs / 'terminated'}"]
    assert words[:2] == ["torchrun", "--nproc_per_node=2"] and words[2].endswith("train.py")
    assert [word.replace("=", f"={runs}/") if f"={runs}" not in word else word for word in words[3:]] == places


def test_a_signal_to_one_process_after_the_last_step_stops_all(runs):
    """Otherwise the other process would wait for this one to sample."""
    assert [step for step, *_ in curve(runs / "late")] == [1, 2, 3, 4, 5, 6]
    code, *lines = (runs / "late" / "out.txt").read_text().splitlines()
    assert code == "143" and any(line.startswith("stopped     SIGTERM after step 6, ") for line in lines)
    assert "a sample:" not in lines


@pytest.mark.parametrize("folder", ["unreadable", "slow_unreadable"])
def test_tokens_that_one_process_cannot_read_stop_all_and_no_step_is_lost(runs, folder):
    """No process reports the state as saved too early; tests/several.py checks that."""
    code, *lines = (runs / folder / "out.txt").read_text().splitlines()
    saved = find(runs / folder)
    sentence = f"error: train.bin can no longer be read; put it back as it was. The state is saved in {saved}."
    assert code == "2" and lines[-1] == sentence and saved.stem == "step-00000004"


def test_training_goes_on_while_a_checkpoint_is_written(runs):
    """The writer waits until step 4 begins, and the next save, after step 4, waits for the writer.

    Step 4 itself may end before or after the writing. The run of `slow` checks that the checkpoint is complete when the
    run reports it.
    """
    code, *lines = (runs / "slow" / "out.txt").read_text().splitlines()
    told = [line.split()[1] for line in lines if line.startswith(("train", "saved"))]
    expected = ["1/6", "2/6", "3/6", "slow/checkpoints/step-00000002", "5/6"]
    assert code == "0" and [word for word in told if word in expected] == expected
    assert_same_curve(runs / "slow", runs / "full")


@pytest.mark.parametrize(
    ("folder", "expected", "goes_on", "left"),
    [
        (
            "full",
            "0",
            "; training continues (checkpoint.on_error=continue)",
            ["best", "step-00000002", "step-00000006"],
        ),
        ("stopped", "2", "", ["step-00000002"]),
    ],
)
def test_a_full_disk_of_one_process_is_told_and_leaves_the_earlier_checkpoint(runs, folder, expected, goes_on, left):
    code, *lines = (runs / folder / "out.txt").read_text().splitlines()
    (told,) = [line.removeprefix("error: ") for line in lines if "cannot be written" in line]
    kept = runs / folder / "checkpoints"
    assert code == expected and told == (
        f"{kept}/step-00000004 cannot be written (File too large); free some space, then continue with "
        f"checkpoint.resume={folder}/checkpoints/step-00000002 hydra.run.dir={folder}{goes_on}"
    )
    assert sorted(path.name for path in kept.iterdir()) == left


@pytest.fixture(scope="module")
def as_file(runs) -> Path:
    """Return the folder of a run of one process that resumed the end of `fsdp`: it only wrote the state as a file."""
    train("as_file", *GLOBAL.split(), f"checkpoint.resume={find('fsdp')}", "parallel=none").ok()
    return runs / "as_file"


def test_split_weights_are_those_of_a_file(runs, as_file):
    """With two processes, and with four processes that hold each part twice."""
    ours, theirs = load_checkpoint(runs / "fsdp"), load(find(as_file))
    for key in ("model", "optimizer"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0)
    assert ours.keys() - {"path"} == theirs.keys()
    ours, theirs = load_checkpoint(runs / "hsdp_after_fsdp"), load(find(runs / "alone"))
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
    assert refused.code == 2 and "fsdp/checkpoints/step-00000006 is past step 0" in refused.err


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda newest: flip(newest / "part-00001.safetensors"), "part-00001.safetensors does not match its checksum"),
        (lambda newest: os.truncate(newest / "part-00000.safetensors", 9), "part-00000.safetensors does not match"),
        (
            lambda newest: (newest / "part-00001.safetensors").unlink(),
            "is not a readable checkpoint .part-00001.safetensors: No such file",
        ),
        (
            lambda newest: shutil.copy(newest / "part-00001.safetensors", newest / "more.safetensors"),
            "more.safetensors",
        ),
        (
            lambda newest: (newest / "rest.pt").unlink(),
            "rest.pt is not a readable checkpoint .No such file",
        ),
        (lambda newest: flip(newest / "rest.pt"), "rest.pt is not a readable checkpoint .*checksum"),
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
        load_checkpoint(newest)
    told = []
    assert load_checkpoint(tmp_path, tell=told.append)["step"] == 3
    (line,) = told
    assert re.search(f"{newest}.*{sentence}", line) and line.endswith(f"using {before} instead")


def test_a_killed_process_is_started_again_and_nothing_is_lost(runs):
    """A process is killed while it writes a checkpoint. torchrun restarts the run from the checkpoint before."""
    each_2 = f"{GLOBAL} parallel=fsdp checkpoint.interval=2 checkpoint.dir=kept checkpoint.resume=auto"
    job = torchrun(2, several.__file__, f"killed {each_2}", options=(*SINGLE_NODE, "--max-restarts=1"))
    _, err = ended(job)
    assert job.returncode == 0, err
    # Only a kill leads to a restart. torchrun's log names the process that it found dead first, perhaps the other one.
    assert "continuing after step 3," in (runs / "killed" / "out.txt").read_text()
    assert_same_curve(runs / "killed", runs / "alone")
    assert sorted(path.name for path in (runs / "kept").iterdir()) == ["best", "step-00000004", "step-00000006"]
