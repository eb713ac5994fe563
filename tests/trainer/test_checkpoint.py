import errno
import hashlib
import os
import pickle
import random
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.loader import TrainLoader
from errors import UserError
from model.attention import AttentionConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from tests.e2e import largest_file
from trainer import checkpoint
from trainer.checkpoint import (
    SEAL,
    SEAL_SIZE,
    CheckpointConfig,
    CheckpointError,
    Checkpoints,
    find,
    load,
    rng_state,
    set_rng_state,
)
from trainer.optimizer import OptimizerConfig, build_optimizer, optimizer_step
from trainer.sharded import ShardedCheckpoints
from trainer.state import TrainState, check_resumable

SHAPE = ModelConfig(n_layer=1, n_head=2, n_embd=32, context_length=8, vocab_size=65, dropout=0.1)


def small(step: int = 1, **more) -> dict:
    """What load takes for a checkpoint, without a model."""
    return {"model": {"w": torch.arange(1000.0)}, "model_config": {}, "tokenizer": "byte", "step": step} | more


@contextmanager
def training(seed: int, loader_seed: int = 5) -> Iterator[TrainState]:
    """A run of a small model with dropout on numbered tokens, with a scaled loss so that the scaler has a state."""
    torch.manual_seed(seed)
    model = GPT2(SHAPE, build_attention(AttentionConfig("naive"))).train()
    tokens = (np.arange(300) * 7 % 65).astype(np.uint16)
    with TrainLoader(
        tokens, batch_size=2, context_length=8, seed=loader_seed, device="cpu", vocab_size=65, name="train.bin"
    ) as loader:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        yield TrainState(model, build_optimizer(model, OptimizerConfig()), scaler, loader, "byte")


def advance(state: TrainState, steps: int) -> list[float]:
    """Trains and returns the losses."""
    losses = []
    for _ in range(steps):
        loss = state.model(*state.loader.next_batch())
        state.scaler.scale(loss).backward()
        optimizer_step(state.optimizer, state.scaler, 0.01, 1.0)
        state.step += 1
        losses.append(loss.item())
    return losses


def flat(value, path: str = "") -> dict[str, object]:
    """Every leaf of nested dicts and lists by its path; tensors as lists."""
    if isinstance(value, torch.Tensor):
        return {path: (value.dtype, value.tolist())}
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for name, item in items for key, leaf in flat(item, f"{path}/{name}").items()}
    return {path: value}


def test_a_resumed_run_has_the_same_state_and_continues_to_the_bit(tmp_path):
    with training(seed=1) as first:
        advance(first, 5)
        first.best_loss, first.skipped = 2.5, 3
        saved = flat(first.state_dict())
        Checkpoints(tmp_path, keep=1).save(first.step, first.state_dict())
        uninterrupted = advance(first, 4)
        final = flat(first.state_dict())
    with training(seed=2) as second:
        second.load_state_dict(load(tmp_path))
        assert flat(second.state_dict()) == saved
        assert advance(second, 4) == uninterrupted
        assert flat(second.state_dict()) == final
    groups = {path.split("/")[1] for path in saved}
    assert groups >= {"model", "model_config", "optimizer", "scaler", "loader", "tokenizer", "step", "best_loss", "rng"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"n_layer": 3}, "model.n_layer=3, but checkpoint.resume=this has 1; set model.n_layer=1"),
        ({"vocab_size": 99}, "set model.vocab_size=65"),
        ({"context_length": 9}, "is longer than the 8 positions of checkpoint.resume=this; set model.context_length=8"),
        ({"context_length": 7}, "set model.context_length=8"),
    ],
)
def test_a_run_of_another_shape_is_not_continued(change, sentence):
    state = small(model_config=vars(SHAPE), path="this")
    check_resumable(state, replace(SHAPE, dropout=0.0), "byte")
    with pytest.raises(UserError, match=sentence):
        check_resumable(state, replace(SHAPE, **change), "byte")


def test_a_run_on_other_tokens_is_not_continued():
    with pytest.raises(UserError, match="trained on byte tokens, not on gpt2"):
        check_resumable(small(model_config=vars(SHAPE), path="this"), SHAPE, "gpt2")


def fail(*args):
    raise OSError(errno.ENOSPC, "no space left on device")


def assert_saving_fails_and_changes_nothing(checkpoints: Checkpoints, reason: str, state: dict) -> None:
    before = {path: path.read_bytes() for path in checkpoints.folder.iterdir()}
    remedy = f"make room, and continue with checkpoint.resume={find(checkpoints.folder)}"
    for save in (lambda: checkpoints.save(1, state), lambda: checkpoints.save(2, state)):
        with pytest.raises(CheckpointError, match=f"{re.escape(reason)}.*; {re.escape(remedy)}"):
            save()
    with pytest.raises(CheckpointError, match=f"best.pt could not be written .*{re.escape(reason)}"):
        checkpoints.save_best(state)
    assert {path: path.read_bytes() for path in checkpoints.folder.iterdir()} == before


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_earlier_files_as_they_were(tmp_path, monkeypatch, step):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, small(1))
    checkpoints.save_best(small(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        assert_saving_fails_and_changes_nothing(checkpoints, "no space", small(9))
    checkpoints.save(2, small(2))
    assert load(tmp_path)["step"] == 2


@pytest.mark.parametrize("missing", ["all", "most", "the seal", "a byte"])
def test_a_disk_that_fills_up_leaves_the_earlier_files_as_they_were(tmp_path, missing):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, small(1))
    size = checkpoints.save_best(small(0)).stat().st_size  # the least: torch's archives repeat their names
    room = {"all": 0, "most": size // 3, "the seal": size - SEAL_SIZE, "a byte": size - 1}[missing]
    with largest_file(room):
        assert_saving_fails_and_changes_nothing(checkpoints, "File too large", small(9))
    checkpoints.save(2, small(2))
    assert load(tmp_path)["step"] == 2


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of its own, of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here ({mounted.stderr.strip()})")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_file_system_leaves_the_earlier_files_as_they_were(small_disk):
    checkpoints = Checkpoints(small_disk, keep=2)
    checkpoints.save(1, small(1))
    assert_saving_fails_and_changes_nothing(checkpoints, "No space left on device", small(9, more=torch.zeros(20_000)))
    checkpoints.save(2, small(2))
    assert load(small_disk)["step"] == 2


def test_the_newest_stay_and_the_best_besides(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=2)
    for step in (5, 10, 100, 1000):
        checkpoints.save(step, small(step))
        if step == 10:
            checkpoints.save_best(small(step))
            (checkpoints.folder / "step-00000099.partial").write_bytes(b"PK")  # of a killed run
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names == ["best.pt", "step-00000100.pt", "step-00001000.pt"]
    assert load(checkpoints.folder / "best.pt")["step"] == 10
    checkpoints.save_best(small(1000))
    assert load(checkpoints.folder / "best.pt")["step"] == 1000


def test_the_best_that_is_the_newest_too_is_written_once(tmp_path, monkeypatch):
    """And where the disk knows no second names, twice; what is written later touches neither."""
    checkpoints = Checkpoints(tmp_path, keep=3)
    best = checkpoints.save_best(small(5))
    for _ in range(2):
        assert checkpoints.save(5, small(5)).samefile(best)
    monkeypatch.setattr(os, "link", fail)
    checkpoints.save_best(small(6))
    sixth = checkpoints.save(6, small(6))
    checkpoints.save(7, small(7))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.pt", *(f"step-0000000{step}.pt" for step in (5, 6, 7))]
    assert not sixth.samefile(best) and [load(path)["step"] for path in (best, sixth)] == [6, 6]


def test_what_a_kill_left_of_a_folder_is_in_no_files_way(tmp_path):
    """Of a run whose weights were split, and which goes on as one."""
    (tmp_path / "step-00000006.partial").mkdir()
    (tmp_path / "step-00000006.partial" / "part-00000.safetensors").write_bytes(b"")
    assert Checkpoints(tmp_path, keep=1).save(6, small(6)) == find(tmp_path)


def test_what_a_kill_between_naming_and_renaming_left_is_not_written_into(tmp_path):
    """It is another name of best.pt."""
    checkpoints = Checkpoints(tmp_path, keep=3)
    best = checkpoints.save_best(small(5))
    os.link(best, tmp_path / "step-00000006.partial")
    before = best.read_bytes()
    with largest_file(1000), pytest.raises(CheckpointError):
        checkpoints.save(6, small(6))
    assert best.read_bytes() == before
    checkpoints.save(6, small(6))
    assert best.read_bytes() == before and load(tmp_path)["step"] == 6


def test_an_old_checkpoint_that_cannot_be_deleted_is_told_once_and_no_save_fails(tmp_path, monkeypatch):
    checkpoints, told = Checkpoints(tmp_path, keep=1), []
    first = checkpoints.save(1, small(1))
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **of: fail() if path == first else unlink(path, **of))
    with checkpoints.saving(told.append):
        for step in (2, 3):
            assert load(checkpoints.save(step, small(step)))["step"] == step
    assert len(told) == 1 and f"{first} is outdated and cannot be deleted (" in told[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.pt", "step-00000003.pt"]


def test_folders_go_as_files_do_and_the_one_that_best_links_to_stays(tmp_path):
    """Those of runs whose weights were split, and which go on as files."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for name in ("step-00000010", "step-00000020", "step-00000030", "step-00000035.partial", "step-9.old.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-00000.safetensors").write_bytes(b"")
    (tmp_path / "best").symlink_to("step-00000010")
    checkpoints.save(40, small(40))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best", "step-00000010", "step-00000030", "step-00000040.pt"]
    checkpoints.save_best(small(40))
    checkpoints.save(50, small(50))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.pt", "step-00000040.pt", "step-00000050.pt"]


def test_a_copy_of_a_run_has_a_folder_for_the_link_to_the_best_which_gives_way(tmp_path):
    """As cp -rL leaves it: the next best one ended the run."""
    best = tmp_path / "best"
    best.mkdir()
    (best / "rest.pt").write_bytes(b"")
    Checkpoints(tmp_path, keep=2).save_best(small(5))
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]
    (tmp_path / "best.pt").unlink()
    best.mkdir()
    sharded(tmp_path)._name(partial_of(tmp_path, 6, b"new"), tmp_path / "step-00000006", is_best=True)
    assert best.is_symlink() and best.resolve() == tmp_path / "step-00000006"


def test_a_kill_between_two_names_leaves_a_checkpoint(tmp_path, monkeypatch):
    """A folder that is written anew: the one before had no name that counts until the other had it."""
    path, rename = tmp_path / "step-00000006", os.rename
    partial_of(tmp_path, 6, b"old").rename(path)

    def killed(source, target):
        if source.suffix == ".partial":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", killed)
        sharded(tmp_path)._name(partial_of(tmp_path, 6, b"new"), path, is_best=False)
    assert (find(tmp_path) / "rest.pt").read_bytes() == b"old"
    checkpoints = sharded(tmp_path)
    for content in (b"newer", b"newest"):
        checkpoints._name(partial_of(tmp_path, 6, content), path, is_best=False)
        assert find(tmp_path) == path and (path / "rest.pt").read_bytes() == content
    checkpoints.prune(6)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


def sharded(folder: Path) -> ShardedCheckpoints:
    """Those of a run, which here only give names: of a process that has no others to talk to."""
    checkpoints = ShardedCheckpoints.__new__(ShardedCheckpoints)
    Checkpoints.__init__(checkpoints, folder, keep=2)
    return checkpoints


def partial_of(folder: Path, step: int, content: bytes) -> Path:
    """What a folder is before it has its name."""
    path = folder / f"step-{step:08d}.partial"
    path.mkdir(exist_ok=True)
    (path / "rest.pt").write_bytes(content)
    return path


def test_what_was_just_saved_stays_in_a_folder_that_has_later_steps(tmp_path):
    """A run that starts again, or goes back, in an old folder must not delete each of its own checkpoints at once."""
    old = Checkpoints(tmp_path, keep=2)
    for step in (400, 500):
        old.save(step, small(step))
    assert Checkpoints(tmp_path, keep=2).save(100, small(100)).exists()


def test_the_newest_by_step_is_found_in_its_folder_and_in_that_of_its_run(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=9)
    paths = [checkpoints.save(step, small(step)) for step in (90, 200, 1000)]
    os.utime(paths[-1], (0, 0))
    for stray in ("step-00009999.partial", "step-00009999.pt.bak", "step-99999.pt"):
        (checkpoints.folder / stray).write_bytes(b"")
    assert find(tmp_path) == find(checkpoints.folder) == find(str(paths[-1])) == paths[-1]
    assert find(paths[0]) == paths[0]
    assert find(tmp_path / "nothing") is None


def test_a_batch_is_run_again_by_weights_from_before_its_step(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=9)
    assert checkpoints.before(10) is None
    older, newer = (checkpoints.save(step, small(step)) for step in (5, 10))
    assert [checkpoints.before(step) for step in (11, 10, 6)] == [newer, older, older]
    assert checkpoints.before(5) == older, "where there is none from before"


def test_no_checkpoint_is_refused_with_the_setting_to_change(tmp_path):
    with pytest.raises(UserError, match=f"checkpoint.resume={tmp_path} is neither .* give a step-"):
        load(tmp_path, key="checkpoint.resume")


def test_the_best_is_continued_where_no_other_is_whole(tmp_path, monkeypatch):
    """A run killed before its first interval has no other; and it does not count as later than a run that starts."""
    checkpoints, told = Checkpoints(tmp_path, keep=9), []
    best = checkpoints.save_best(small(7))
    assert load(tmp_path)["step"] == 7 and find(tmp_path) == best
    checkpoints.refuse_later_than(0)
    first, second = (checkpoints.save(step, small(step)) for step in (10, 20))
    assert load(tmp_path)["step"] == 20 and checkpoints.before(11) == first
    first.write_bytes(b"")
    read = checkpoint._digest

    def fails(file, size):
        if Path(file.name) == second:
            raise OSError(errno.EIO, "Input/output error")
        return read(file, size)

    monkeypatch.setattr(checkpoint, "_digest", fails)
    assert load(tmp_path, tell=told.append)["step"] == 7
    assert f"{second} is no readable checkpoint (it cannot be read: Input/output error)" in told[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    return Checkpoints(tmp_path_factory.mktemp("whole"), keep=1).save(1, small()).read_bytes()


@given(share=st.floats(0, 1, exclude_max=True))
@example(share=0.99999)
@settings(deadline=None, max_examples=60)
def test_a_file_cut_anywhere_is_refused_by_name(whole, tmp_path_factory, share):
    path = tmp_path_factory.getbasetemp() / "step-00000007.pt"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=f"{path.name} is no readable checkpoint"):
        load(path)


@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(deadline=None, max_examples=60)
def test_a_file_with_any_bit_flipped_is_refused_by_name(whole, tmp_path_factory, share, bit):
    path, flipped = tmp_path_factory.getbasetemp() / "step-00000008.pt", bytearray(whole)
    flipped[int(share * len(whole))] ^= 1 << bit
    path.write_bytes(flipped)
    with pytest.raises(UserError, match=f"{path.name} is no readable checkpoint .*checksum"):
        load(path)


def test_the_newest_whole_checkpoint_of_a_folder_is_taken_and_the_others_told(tmp_path):
    checkpoints, told = Checkpoints(tmp_path, keep=9), []
    first, second, third = (checkpoints.save(step, small(step)) for step in (10, 20, 30))
    second.write_bytes(second.read_bytes()[:-100])
    third.write_bytes(third.read_bytes().replace(b"byte", b"Byte"))
    assert load(tmp_path, tell=told.append)["step"] == 10
    (line,) = told
    assert re.search(rf"{third} .*does not match.*; {second} .*cut off.*; {first} is taken instead", line)
    Checkpoints(tmp_path, keep=9).refuse_later_than(10)  # what is damaged is in nobody's way
    first.write_bytes(b"")
    with pytest.raises(UserError, match=f"{third} .*{second} .*{first} .*give another with resume="):
        load(tmp_path, key="resume")


def seal(path: Path) -> Path:
    """A foreign file with what ends one of ours."""
    content = path.read_bytes()
    path.write_bytes(content + SEAL + hashlib.sha256(content).digest())
    return path


@pytest.mark.parametrize(
    "content",
    [[1, 2], torch.zeros(3), {"model": {}, "step": 1}, {"weights": torch.zeros(3)}],
    ids=["a list", "a tensor", "half the keys", "other keys"],
)
def test_a_foreign_file_of_torch_is_refused_by_name(tmp_path, content):
    path = tmp_path / "foreign.pt"
    torch.save(content, path)
    with pytest.raises(UserError, match="foreign.pt is no readable checkpoint .*not of this trainer"):
        load(path)
    with pytest.raises(UserError, match="foreign.pt is not a checkpoint of this trainer; give another with resume="):
        load(seal(path), key="resume")


@pytest.mark.parametrize("content", [b"", b"a text\n" * 100, bytes(1000)], ids=["empty", "text", "zeros"])
def test_a_foreign_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "foreign.pt"
    path.write_bytes(content)
    for refused in (path, seal(path)):
        with pytest.raises(UserError, match="foreign.pt is no readable checkpoint"):
            load(refused)


class Intruder:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize(
    "write",
    [torch.save, lambda state, path: path.write_bytes(pickle.dumps(state, protocol=2))],
    ids=["written by torch.save", "written by pickle"],
)
@pytest.mark.parametrize("name", ["step-00000001.pt", "step-00000001/rest.pt"])
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path, write, name):
    path, folder = tmp_path / name, tmp_path / "intruded"
    path.parent.mkdir(exist_ok=True)
    write(small(rng=Intruder(folder)), path)
    with pytest.raises(UserError, match="no readable checkpoint .*Weights only load failed"):
        load(seal(path))
    assert not folder.exists()


def draws() -> list[float]:
    """From every generator; the odd number of normal draws leaves one of a pair behind."""
    python = [random.random(), *(random.gauss(0, 1) for _ in range(3))]
    numpy = [np.random.random(), *np.random.standard_normal(3)]
    return [*python, *numpy, *torch.randn(3).tolist(), torch.rand(()).item()]


def test_the_draws_after_a_restored_state_are_those_after_the_saved_one(tmp_path):
    before = rng_state()
    try:
        draws()
        Checkpoints(tmp_path, keep=1).save(1, small(rng=rng_state()))
        expected = draws()
        assert draws() != expected
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        set_rng_state(load(tmp_path)["rng"])
        assert draws() == expected
    finally:
        set_rng_state(before)


@pytest.mark.parametrize(("key", "value"), [("interval", 0), ("keep", 0), ("keep", -1)])
def test_an_impossible_setting_is_refused_by_name(key, value):
    with pytest.raises(UserError, match=f"checkpoint.{key}={value} must be at least 1"):
        CheckpointConfig(**{key: value})


def test_an_unknown_answer_to_a_full_disk_is_refused():
    with pytest.raises(UserError, match="checkpoint.on_error=ignore is unknown; choose stop or continue"):
        CheckpointConfig(on_error="ignore")
