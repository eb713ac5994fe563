"""Writing checkpoint files: full disks, kills, and which files stay."""

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from errors import UserError
from tests.e2e import largest_file
from tests.trainer.checkpoint.states import small
from trainer.checkpoint.config import CheckpointConfig
from trainer.checkpoint.files import SEAL_SIZE, CheckpointError
from trainer.checkpoint.folder import find
from trainer.checkpoint.load import load
from trainer.checkpoint.sharded import ShardedStore
from trainer.checkpoint.single import SingleFileStore


def fail(*args):
    raise OSError(errno.ENOSPC, "no space left on device")


def assert_saving_fails_and_changes_nothing(checkpoints: SingleFileStore, reason: str, state: dict) -> None:
    before = {path: path.read_bytes() for path in checkpoints.folder.iterdir()}
    remedy = f"free some space, then continue with checkpoint.resume={find(checkpoints.folder)}"
    for save in (lambda: checkpoints.save(state | {"step": 1}), lambda: checkpoints.save(state | {"step": 2})):
        with pytest.raises(CheckpointError, match=f"{re.escape(reason)}.*; {re.escape(remedy)}"):
            save()
    with pytest.raises(CheckpointError, match=f"best.pt cannot be written .*{re.escape(reason)}"):
        checkpoints.save(state, best=True)
    assert {path: path.read_bytes() for path in checkpoints.folder.iterdir()} == before


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_earlier_files_as_they_were(tmp_path, monkeypatch, step):
    checkpoints = SingleFileStore(tmp_path, keep=1)
    checkpoints.save(small(1))
    checkpoints.save(small(0), best=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        assert_saving_fails_and_changes_nothing(checkpoints, "no space", small(9))
    checkpoints.save(small(2))
    assert load(tmp_path)["step"] == 2


def test_a_power_failure_leaves_no_name_without_its_content_and_undoes_no_name(tmp_path, monkeypatch):
    """The disk gets the content before the name, and the name before anything else happens."""
    events, fsync, replace = [], os.fsync, os.replace

    def recorded_fsync(file: int) -> None:
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{file}"))))
        fsync(file)

    def recorded_replace(old: Path, new: Path) -> None:
        events.append(("name", Path(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    path = SingleFileStore(tmp_path, keep=1).save(small(1))
    assert events == [("fsync", path.with_suffix(".partial")), ("name", path), ("fsync", tmp_path)]
    events.clear()
    sharded(tmp_path)._name(partial_of(tmp_path, 6, b""), tmp_path / "step-00000006", is_best=True)
    assert events == [("fsync", tmp_path), ("name", tmp_path / "best"), ("fsync", tmp_path)]


@pytest.mark.parametrize("missing", ["all", "most", "the seal", "a byte"])
def test_a_disk_that_fills_up_leaves_the_earlier_files_as_they_were(tmp_path, missing):
    checkpoints = SingleFileStore(tmp_path, keep=1)
    checkpoints.save(small(1))
    # best.pt is the smallest file: torch's archives repeat their names.
    size = checkpoints.save(small(0), best=True).stat().st_size
    room = {"all": 0, "most": size // 3, "the seal": size - SEAL_SIZE, "a byte": size - 1}[missing]
    with largest_file(room):
        assert_saving_fails_and_changes_nothing(checkpoints, "File too large", small(9))
    checkpoints.save(small(2))
    assert load(tmp_path)["step"] == 2


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Mount a file system of 64 KiB."""
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
    checkpoints = SingleFileStore(small_disk, keep=2)
    checkpoints.save(small(1))
    assert_saving_fails_and_changes_nothing(checkpoints, "No space left on device", small(9, more=torch.zeros(20_000)))
    checkpoints.save(small(2))
    assert load(small_disk)["step"] == 2


def test_the_newest_stay_and_the_best_besides(tmp_path):
    checkpoints = SingleFileStore(tmp_path / "run" / "checkpoints", keep=2)
    for step in (5, 10, 100, 1000):
        checkpoints.save(small(step))
        if step == 10:
            checkpoints.save(small(step), best=True)
            (checkpoints.folder / "step-00000099.partial").write_bytes(b"PK")  # of a killed run
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names == ["best.pt", "step-00000100.pt", "step-00001000.pt"]
    assert load(checkpoints.folder / "best.pt")["step"] == 10
    checkpoints.save(small(1000), best=True)
    assert load(checkpoints.folder / "best.pt")["step"] == 1000


def test_the_best_that_is_the_newest_too_is_written_once(tmp_path, monkeypatch):
    """Without hard links, it is written twice. Later saves change neither file."""
    checkpoints = SingleFileStore(tmp_path, keep=3)
    best = checkpoints.save(small(5), best=True)
    for _ in range(2):
        assert checkpoints.save(small(5)).samefile(best)
    monkeypatch.setattr(os, "link", fail)
    checkpoints.save(small(6), best=True)
    sixth = checkpoints.save(small(6))
    checkpoints.save(small(7))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.pt", *(f"step-0000000{step}.pt" for step in (5, 6, 7))]
    assert not sixth.samefile(best) and [load(path)["step"] for path in (best, sixth)] == [6, 6]


def test_a_folder_that_a_kill_left_does_not_block_a_file(tmp_path):
    """The killed run had split weights; the run that continues has one process."""
    (tmp_path / "step-00000006.partial").mkdir()
    (tmp_path / "step-00000006.partial" / "part-00000.safetensors").write_bytes(b"")
    assert SingleFileStore(tmp_path, keep=1).save(small(6)) == find(tmp_path)


def test_what_a_kill_between_naming_and_renaming_left_is_not_written_into(tmp_path):
    """The leftover file is a second name of best.pt."""
    checkpoints = SingleFileStore(tmp_path, keep=3)
    best = checkpoints.save(small(5), best=True)
    os.link(best, tmp_path / "step-00000006.partial")
    before = best.read_bytes()
    with largest_file(1000), pytest.raises(CheckpointError):
        checkpoints.save(small(6))
    assert best.read_bytes() == before
    checkpoints.save(small(6))
    assert best.read_bytes() == before and load(tmp_path)["step"] == 6


def test_an_old_checkpoint_that_cannot_be_deleted_is_told_and_no_save_fails(tmp_path, monkeypatch):
    checkpoints, told = SingleFileStore(tmp_path, keep=1), []
    first = checkpoints.save(small(1))
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **of: fail() if path == first else unlink(path, **of))
    checkpoints.tell = told.append
    for step in (2, 3):
        assert load(checkpoints.save(small(step)))["step"] == step
    assert len(told) == 2 and f"{first} is outdated and cannot be deleted (" in told[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.pt", "step-00000003.pt"]


def test_folders_go_as_files_do_and_the_one_that_best_links_to_stays(tmp_path):
    """The folders are checkpoints of a run with split weights, which continues with files."""
    checkpoints = SingleFileStore(tmp_path, keep=2)
    unfinished = "step-00000035.partial", "step-00000009.old.partial"
    for name in ("step-00000010", "step-00000020", "step-00000030", *unfinished):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-00000.safetensors").write_bytes(b"")
    (tmp_path / "best").symlink_to("step-00000010")
    checkpoints.save(small(40))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best", "step-00000010", "step-00000030", "step-00000040.pt"]
    checkpoints.save(small(40), best=True)
    checkpoints.save(small(50))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.pt", "step-00000040.pt", "step-00000050.pt"]


def test_a_copy_of_a_run_has_a_folder_for_the_link_to_the_best_which_gives_way(tmp_path):
    """`cp -rL` copies the link as a folder. The next best checkpoint once ended the run there."""
    best = tmp_path / "best"
    best.mkdir()
    (best / "rest.pt").write_bytes(b"")
    SingleFileStore(tmp_path, keep=2).save(small(5), best=True)
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]
    (tmp_path / "best.pt").unlink()
    best.mkdir()
    (best / "rest.pt").write_bytes(b"")
    sharded(tmp_path)._name(partial_of(tmp_path, 6, b"new"), tmp_path / "step-00000006", is_best=True)
    assert best.is_symlink() and best.resolve() == tmp_path / "step-00000006"


def test_files_of_the_user_beside_the_checkpoints_stay(tmp_path):
    """The folder of checkpoints can be one that holds more, such as other runs, of which one is named best."""
    names = "best/metrics.jsonl", "film.partial", "old.partial/a", "notes.before", "notes"
    users = [tmp_path / name for name in names]
    for path in users:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    store = SingleFileStore(tmp_path, keep=1)
    store.save(small(5), best=True)
    store.save(small(6))
    store.save(small(7))
    assert all(path.exists() for path in users) and (tmp_path / "best.pt").exists()
    with pytest.raises(OSError, match="directory"):  # a store with sharded weights needs the name
        sharded(tmp_path)._name(partial_of(tmp_path, 8, b"new"), tmp_path / "step-00000008", is_best=True)
    assert all(path.exists() for path in users)


def test_a_kill_between_two_names_leaves_a_checkpoint(tmp_path, monkeypatch):
    """A new folder replaces an old one. Once, for a moment, neither had the name of a checkpoint."""
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


def sharded(folder: Path) -> ShardedStore:
    """Return a store that can only rename folders, because it has no process group."""
    checkpoints = ShardedStore.__new__(ShardedStore)
    SingleFileStore.__init__(checkpoints, folder, keep=2)
    return checkpoints


def partial_of(folder: Path, step: int, content: bytes) -> Path:
    """Return a checkpoint folder that does not have its final name yet."""
    path = folder / f"step-{step:08d}.partial"
    path.mkdir(exist_ok=True)
    (path / "rest.pt").write_bytes(content)
    return path


def test_what_was_just_saved_stays_in_a_folder_that_has_later_steps(tmp_path):
    """A run that starts again or goes back in an old folder must not delete each of its own new checkpoints."""
    old = SingleFileStore(tmp_path, keep=2)
    for step in (400, 500):
        old.save(small(step))
    assert SingleFileStore(tmp_path, keep=2).save(small(100)).exists()


@pytest.mark.parametrize(("key", "value"), [("interval", 0), ("keep", 0), ("keep", -1)])
def test_an_impossible_setting_is_refused_by_name(key, value):
    with pytest.raises(UserError, match=f"checkpoint.{key}={value} is out of range; give at least 1"):
        CheckpointConfig(**{key: value})


def test_an_unknown_answer_to_a_full_disk_is_refused():
    with pytest.raises(UserError, match="checkpoint.on_error=ignore is unknown; choose one of stop, continue"):
        CheckpointConfig(on_error="ignore")
