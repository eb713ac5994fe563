"""The output folders of runs."""

from trainer.folders import link_latest


def test_outputs_latest_is_the_newest_run(tmp_path):
    for name in ("outputs/a", "outputs/b", "runs/c"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        link_latest(folder)
    assert (tmp_path / "outputs" / "latest").resolve() == tmp_path / "outputs" / "b"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["c"]
    link_latest(tmp_path / "outputs/latest")
    assert (tmp_path / "outputs" / "latest").resolve() == tmp_path / "outputs" / "b"
