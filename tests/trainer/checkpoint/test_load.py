"""Reading checkpoints: damaged, foreign and hostile files, and the newest complete one of a folder."""

import errno
import hashlib
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from errors import UserError
from tests.trainer.checkpoint.states import small
from trainer.checkpoint import files
from trainer.checkpoint.files import SEAL
from trainer.checkpoint.folder import find, newest_before, newest_complete_after
from trainer.checkpoint.load import check_shared, load
from trainer.checkpoint.single import SingleFileStore
from trainer.distributed.world import ALONE, World


def test_the_newest_by_step_is_found_in_its_folder_and_in_that_of_its_run(tmp_path):
    checkpoints = SingleFileStore(tmp_path / "checkpoints", keep=9)
    paths = [checkpoints.save(small(step)) for step in (90, 200, 1000)]
    os.utime(paths[-1], (0, 0))
    for stray in ("step-00009999.partial", "step-00009999.pt.bak", "step-99999.pt"):
        (checkpoints.folder / stray).write_bytes(b"")
    assert find(tmp_path) == find(checkpoints.folder) == find(str(paths[-1])) == paths[-1]
    assert find(paths[0]) == paths[0]
    assert find(tmp_path / "nothing") is None


def test_processes_that_find_different_checkpoints_do_not_start(monkeypatch):
    check_shared(None, ALONE)
    monkeypatch.setattr(World, "from_first", lambda world, value: "a/step-00000005.pt")
    second = World(rank=1, size=2, parallel="ddp")
    check_shared({"path": "a/step-00000005.pt"}, second)
    for state, own in (({"path": "a/step-00000003.pt"}, "a/step-00000003.pt"), (None, "None")):
        with pytest.raises(UserError, match=f"is {own} in process 1, but a/step-00000005.pt in the first process; put"):
            check_shared(state, second)


def test_a_batch_is_run_again_by_weights_from_before_its_step(tmp_path):
    checkpoints = SingleFileStore(tmp_path, keep=9)
    assert newest_before(tmp_path, 10) is None
    older, newer = (checkpoints.save(small(step)) for step in (5, 10))
    assert [newest_before(tmp_path, step) for step in (11, 10, 6)] == [newer, older, older]
    assert newest_before(tmp_path, 5) == older, "if no checkpoint is from before"


def test_a_folder_without_checkpoints_is_refused_with_the_setting_to_change(tmp_path):
    with pytest.raises(UserError, match=f"checkpoint.resume={tmp_path} is neither .* give a step-"):
        load(tmp_path, key="checkpoint.resume")


def test_the_best_is_continued_if_no_other_is_whole(tmp_path, monkeypatch):
    """A run that was killed before its first interval has only best.pt. A new run must not replace it."""
    checkpoints, told = SingleFileStore(tmp_path, keep=9), []
    best = checkpoints.save(small(7), best=True)
    assert load(tmp_path)["step"] == 7 and find(tmp_path) == best
    assert newest_complete_after(tmp_path, 0, with_best=True) == best
    assert newest_complete_after(tmp_path, 0, with_best=False) is None
    first, second = (checkpoints.save(small(step)) for step in (10, 20))
    assert load(tmp_path)["step"] == 20 and newest_before(tmp_path, 11) == first
    assert newest_complete_after(tmp_path, 0, with_best=True) == second
    first.write_bytes(b"")
    read = files._digest

    def fails(file, size):
        if Path(file.name) == second:
            raise OSError(errno.EIO, "Input/output error")
        return read(file, size)

    monkeypatch.setattr(files, "_digest", fails)
    assert load(tmp_path, tell=told.append)["step"] == 7
    assert f"{second} is not a readable checkpoint (Input/output error)" in told[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    return SingleFileStore(tmp_path_factory.mktemp("whole"), keep=1).save(small()).read_bytes()


@given(share=st.floats(0, 1, exclude_max=True))
@example(share=0.99999)
@settings(deadline=None, max_examples=60)
def test_a_file_cut_anywhere_is_refused_by_name(whole, tmp_path_factory, share):
    path = tmp_path_factory.getbasetemp() / "step-00000007.pt"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=f"{path.name} is not a readable checkpoint"):
        load(path)


@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(deadline=None, max_examples=60)
def test_a_file_with_any_bit_flipped_is_refused_by_name(whole, tmp_path_factory, share, bit):
    path, flipped = tmp_path_factory.getbasetemp() / "step-00000008.pt", bytearray(whole)
    flipped[int(share * len(whole))] ^= 1 << bit
    path.write_bytes(flipped)
    with pytest.raises(UserError, match=f"{path.name} is not a readable checkpoint .*checksum"):
        load(path)


def test_the_newest_whole_checkpoint_of_a_folder_is_taken_and_the_others_told(tmp_path):
    checkpoints, told = SingleFileStore(tmp_path, keep=9), []
    first, second, third = (checkpoints.save(small(step)) for step in (10, 20, 30))
    second.write_bytes(second.read_bytes()[:-100])
    third.write_bytes(third.read_bytes().replace(b"byte", b"Byte"))
    assert load(tmp_path, tell=told.append)["step"] == 10
    (line,) = told
    assert re.search(rf"{third} .*does not match.*, {second} .*cut off.*; using {first} instead", line)
    assert newest_complete_after(tmp_path, 10, with_best=True) is None  # damaged checkpoints do not count
    first.write_bytes(b"")
    with pytest.raises(UserError, match=f"{third} .*{second} .*{first} .*give another one with resume="):
        load(tmp_path, key="resume")


def seal(path: Path) -> Path:
    """Add the seal of our checkpoints to a foreign file."""
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
    with pytest.raises(UserError, match="foreign.pt is not a readable checkpoint .*another program wrote it"):
        load(path)
    with pytest.raises(UserError, match="foreign.pt is not a checkpoint of this trainer; give another one"):
        load(seal(path), key="resume")


@pytest.mark.parametrize("content", [b"", b"a text\n" * 100, bytes(1000)], ids=["empty", "text", "zeros"])
def test_a_foreign_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "foreign.pt"
    path.write_bytes(content)
    for refused in (path, seal(path)):
        with pytest.raises(UserError, match="foreign.pt is not a readable checkpoint"):
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
    with pytest.raises(UserError, match="not a readable checkpoint .*Weights only load failed"):
        load(seal(path))
    assert not folder.exists()
