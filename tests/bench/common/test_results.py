"""The environment of a results file."""

import subprocess

from bench.common import results
from bench.common.results import environment, short_commit


def test_edits_since_the_commit_count_as_another_commit(tmp_path, monkeypatch):
    """Otherwise a table that is continued after an edit has rows of both versions under one commit."""

    def git(*words: str) -> str:
        author = "-c", "user.name=a", "-c", "user.email=a@b"
        return subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    kernel, page = tmp_path / "kernel.py", tmp_path / "page.md"
    kernel.write_text("tile = 64\n")
    page.write_text("a page\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "begin")
    head = git("rev-parse", "HEAD").strip()
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    page.write_text("another page\n")
    assert environment()["commit"] == head and short_commit(head) == head[:12]
    commits = []
    for tile in (128, 256):
        kernel.write_text(f"tile = {tile}\n")
        commits.append(environment()["commit"])
    assert len({head, *commits}) == 3 and all(commit.startswith(f"{head}+") for commit in commits)
    assert short_commit(commits[0]) == f"{head[:12]}{commits[0].removeprefix(head)}"
