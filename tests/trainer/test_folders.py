"""The output folders of runs."""

from pathlib import Path

from trainer.folders import link_latest


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
