"""trackio's database gets the rows of metrics.jsonl."""

import json
import socket
import sqlite3
import sys
from pathlib import Path

import pytest

from tests import e2e

pytest_plugins = ["tests.e2e"]
OWN = ("wandb.backend=trackio", "wandb.mode=offline", "train.max_steps=6", "checkpoint.interval=3", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Path:
    """Yield the database of the project gpt2-flash. trackio reads the name of its folder when it is imported."""
    assert "trackio" not in sys.modules
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        yield folder / "gpt2-flash.db"


@pytest.fixture(autouse=True)
def connections(monkeypatch) -> list:
    """Return the addresses that this process connects to. A token lets trackio ask for the account."""
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    addresses = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: addresses.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: addresses.append(host))
    return addresses


def read(database: Path) -> dict[str, list[dict]]:
    """Return the rows of each run by its name. trackio writes NaN as a text, and its own step beside the metrics."""
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, run_id, step, metrics FROM metrics ORDER BY id").fetchall()
    names = {run_id: name for name, run_id, *_ in rows}
    assert len(set(names.values())) == len(names), "two runs have one name"
    return {name: [{"step": row[2]} | json.loads(row[3]) for row in rows if row[0] == name] for name in names.values()}


def test_a_resumed_run_continues_its_run_without_a_network(workplace, database, connections):
    out = e2e.train("run", *OWN, "wandb.name=mine", "wandb.group=night").ok().out
    ((name, first),) = read(database).items()
    assert first == e2e.rows("run") and len(first) == 6 and "rackio" not in out
    assert name == "mine-" + e2e.load("run/checkpoints/step-00000003.pt")["config"]["wandb"]["id"]
    with sqlite3.connect(database) as connection:
        ((text,),) = connection.execute("SELECT config FROM configs").fetchall()
    config = json.loads(text)
    assert (config["_Group"], config["attention"]["name"]) == ("night", "flash2")
    assert config["tags"] == ["flash2", "gpt2-nano", "tokens", "fp32"]
    resume = "checkpoint.resume=run/checkpoints/step-00000003.pt"
    e2e.train("run", *OWN, resume, "checkpoint.dir=later", "train.max_steps=8").ok()
    runs = read(database)
    assert runs.keys() == {name}
    assert [row["step"] for row in runs[name]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert runs[name][:6] == first and runs[name][6:] == e2e.rows("run")[6:]
    e2e.train("branch", *OWN, resume, "wandb.id=branch").ok()
    assert [row["step"] for row in read(database)["mine-branch"]] == [4, 5, 6]
    assert connections == []


def test_a_variable_that_lets_trackio_upload_is_refused(workplace, monkeypatch):
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    refused = e2e.train("run", *OWN)
    assert refused.code == 2 and "TRACKIO_SPACE_ID=me/space" in refused.err and not Path("run").exists()
    e2e.train("run", *OWN, "wandb.mode=disabled").ok()


def test_a_folder_that_trackio_cannot_write_is_refused(workplace, monkeypatch):
    """trackio lost all metrics, and only a warning at the end said so."""
    monkeypatch.setenv("TRACKIO_DIR", "/dev/null/database")
    refused = e2e.train("run", *OWN)
    sentence = "error: TRACKIO_DIR=/dev/null/database is not writable (Not a directory); choose another folder\n"
    assert (refused.code, refused.err) == (2, sentence) and not Path("run").exists()
