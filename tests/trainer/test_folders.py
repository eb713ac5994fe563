"""The output folders of runs."""

from pathlib import Path

import pytest

from tests.e2e import largest_file
from trainer.folders import link_latest, write_text


def test_a_text_replaces_a_file_only_as_a_whole(tmp_path):
    file, link = tmp_path / "record.json", tmp_path / "link.json"
    write_text(file, "old\n")
    link.symlink_to(file)
    for path in (file, link, tmp_path / "new.json"):
        with largest_file(100), pytest.raises(OSError, match="File too large"):
            write_text(path, "long" * 1000)
    assert file.read_text() == "old\n" and {path.name for path in tmp_path.iterdir()} == {"record.json", "link.json"}
    write_text(link, "λ\n")
    assert file.read_text(encoding="utf-8") == "λ\n" and link.is_symlink()


def test_outputs_latest_is_the_newest_run(tmp_path):
    for name in ("outputs/a", "outputs/b", "runs/c"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        link_latest(folder, print)
    assert (tmp_path / "outputs" / "latest").resolve() == tmp_path / "outputs" / "b"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["c"]
    link_latest(tmp_path / "outputs/latest", print)
    assert (tmp_path / "outputs" / "latest").resolve() == tmp_path / "outputs" / "b"


def test_a_folder_in_the_place_of_outputs_latest_is_told(tmp_path, monkeypatch):
    """As after a copy that followed the link: sample.py checkpoint=outputs/latest went on with the old run."""
    monkeypatch.chdir(tmp_path)
    told, latest = [], Path("outputs/latest")
    latest.mkdir(parents=True)
    Path("outputs/new").mkdir()
    link_latest(Path("outputs/new"), told.append)
    assert told == ["note        outputs/latest is a folder, not a link to the newest run; delete or rename it"]
    assert sorted(path.name for path in Path("outputs").iterdir()) == ["latest", "new"]
    link_latest(latest, told.append)  # a run that has this name
    latest.rmdir()
    link_latest(Path("outputs/new"), told.append)
    assert latest.resolve().name == "new" and len(told) == 1
