import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from errors import UserError
from tests import e2e
from tests.helpers import offline_wandb
from tests.helpers.consoles import plain_console, printed
from trainer.loggers import WandbConfig, complete, start_loggers
from trainer.loggers.wandb import WandbLogger

pytest_plugins = ["tests.e2e"]


def run_python(code: str, cwd: Path, **env: str) -> tuple[str, float]:
    """Run `code` for a user without wandb settings, credentials or proxies. Return all output, and the seconds."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and not k.lower().endswith("_proxy")}
    clean |= {"HOME": str(cwd), "PYTHONPATH": str(e2e.ROOT), "NETRC": str(cwd / ".netrc")} | env
    began = time.monotonic()
    # Keep stdin open like a terminal's, so that a prompt hangs.
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=cwd, env=clean, text=True, **pipes)
    try:
        status = process.wait(timeout=60)
    finally:
        process.kill()
    out, _ = process.communicate()
    assert status == 0, out
    return out, time.monotonic() - began


BAD = [("mode", "on"), ("project", ""), ("name", "n" * 129), ("group", "g" * 129), ("tags", ["a", "t" * 65])]


@pytest.mark.parametrize(("field", "value"), [*BAD, ("tags", [""])])
def test_bad_settings_are_refused(field, value):
    with pytest.raises(UserError, match=rf"wandb\.{field}"):
        WandbConfig(**{field: value})


def test_settings_then_the_environment_then_defaults(monkeypatch):
    given = WandbConfig(project="mine", tags=[])
    environment = {"MODE": "disabled", "PROJECT": "theirs", "TAGS": "a,b", "RUN_GROUP": "night", "NAME": ""}
    for name, value in environment.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    config, lines = complete(given, {"group": "sweep", "tags": ["sdpa"]})
    assert config == WandbConfig(mode="disabled", project="mine", group="night", tags=[])
    assert lines == [
        "WANDB_MODE=disabled is used",
        "WANDB_PROJECT=theirs is overridden by wandb.project",
        "WANDB_TAGS=a,b is overridden by wandb.tags",
        "WANDB_RUN_GROUP=night is used",
    ]
    config, _ = complete(WandbConfig(mode="online"), {"group": "sweep", "tags": ["sdpa"]})
    assert config == WandbConfig(mode="online", project="theirs", group="night", tags=["a", "b"])
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    with pytest.raises(UserError, match="WANDB_MODE=dryrun is unknown; choose one of online, offline, disabled"):
        complete(given, {})
    for name in environment:
        monkeypatch.delenv(f"WANDB_{name}")
    config, lines = complete(WandbConfig(), {"group": "sweep", "tags": ["sdpa"]})
    assert (config, lines) == (WandbConfig("offline", "gpt2-flash", None, "sweep", ["sdpa"]), [])


def test_packages_that_are_off_are_not_imported(tmp_path):
    code = """if True:
        import sys
        from pathlib import Path
        from trainer.loggers import WandbConfig, start_loggers
        with start_loggers(Path("out"), max_steps=2, wandb=WandbConfig(mode="disabled"), run_config={}) as loggers:
            loggers.log(1, 10, {"train/loss": 1.0})
        assert not {"wandb", "tensorboard", "trackio"} & sys.modules.keys()
        """
    run_python(code, tmp_path)
    assert not (tmp_path / "wandb").exists()


def test_offline_writes_a_run_below_the_output_folder_and_nowhere_else(tmp_path):
    code = """if True:
        from pathlib import Path
        from trainer.loggers import WandbConfig, start_loggers
        config = WandbConfig(tags=["a"])
        with start_loggers(Path("out"), max_steps=2, wandb=config, run_config={"train": {"seed": 1}}) as log:
            log.log(1, 10, {"train/loss": 1.0})
            log.log(1, 10, {"val/loss": float("nan")})
            log.log(2, 20, {"train/loss": 0.5})
        log.close()
        """
    out, seconds = run_python(code, tmp_path)
    (run,) = (tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/loss" in run.read_bytes()
    assert not (tmp_path / "wandb").exists()
    assert "wandb" not in out, "wandb talks on the console"
    assert seconds < 15


def test_an_offline_sweep_reads_back_as_it_was_logged(workplace):
    for job, attention in enumerate(("naive", "sdpa")):  # as the launcher starts the jobs of a sweep
        own = "hydra.mode=RUN", f"hydra.job.num={job}", f"attention={attention}", "wandb.mode=offline"
        e2e.train(f"sweeps/two/{job}_{attention}", *own).ok()
    naive, sdpa = (e2e.curve(f"sweeps/two/{job}", "train/loss") for job in ("0_naive", "1_sdpa"))
    assert naive == [(step, pytest.approx(loss, rel=1e-4)) for step, loss in sdpa]
    for folder, attention in (("sweeps/two/0_naive", "naive"), ("sweeps/two/1_sdpa", "sdpa")):
        kept = offline_wandb.read(folder)
        assert kept.history == e2e.rows(folder) and len(kept.history) == 5
        assert kept.group == "two" and kept.tags == [attention, "gpt2-nano", "tokens", "fp32"]
        assert kept.config["attention"]["name"] == attention and kept.config["model"]["context_length"] == 32
        assert kept.step_metrics == {"tokens": "", "step": "", "*": "tokens"}
    found = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", "--dry-run", *Path("sweeps").glob("two/*/wandb/offline-run-*")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Would sync 2 run(s)" in found.stderr


def test_the_users_group_and_tags_are_kept(workplace, monkeypatch):
    monkeypatch.setenv("WANDB_TAGS", "a,b")
    out = e2e.train("named", "wandb.mode=offline", "train.max_steps=1", "wandb.group=mine").ok().out
    named = offline_wandb.read("named")
    assert (named.group, named.tags) == ("mine", ["a", "b"]) and out.startswith("WANDB_TAGS=a,b is used\n")


def test_a_resumed_run_continues_its_run(workplace, monkeypatch):
    own = "wandb.mode=offline", "train.max_steps=4", "checkpoint.interval=2", "checkpoint.keep=9"
    e2e.train("run", *own).ok()
    resume = "checkpoint.resume=run/checkpoints/step-00000002.pt"
    monkeypatch.setenv("WANDB_RUN_ID", "other")  # The checkpoint's id wins.
    e2e.train("run", *own, resume, "checkpoint.dir=later", "train.max_steps=6").ok()
    first, second = offline_wandb.read_all("run")
    assert first.id == second.id == first.config["wandb"]["id"]
    assert [row["step"] for row in first.history + second.history] == [1, 2, 3, 4, 5, 6]
    assert second.history == e2e.rows("run")[4:]
    out = e2e.train("run", *own, resume, "checkpoint.dir=branch", "wandb.id=null").ok().out
    *_, branch = offline_wandb.read_all("run")
    assert branch.id == "other" and [row["step"] for row in branch.history] == [3, 4]
    assert "WANDB_RUN_ID=other is used\n" in out
    assert f"changed     since the checkpoint: wandb.id {first.id} -> other" in out


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_wandb_gets_the_id_to_continue(tmp_path, monkeypatch, mode):
    """In both modes: wandb stores `resume` in an offline run, and `wandb sync` reads it there."""
    given = []
    monkeypatch.setattr("wandb.init", lambda **options: given.append(options) or MagicMock())
    monkeypatch.setattr("trainer.loggers.wandb.server_problem", lambda settings: None)
    WandbLogger(WandbConfig(mode=mode, id="mine"), {}, tmp_path, print)
    (options,) = given
    assert (options["id"], options["resume"], options["settings"].mode) == ("mine", "allow", mode)


REFUSED_ONLINE = """if True:
    import os
    import time
    from pathlib import Path
    from errors import UserError
    from trainer.loggers import WandbConfig, start_loggers
    began = time.monotonic()
    try:
        start_loggers(Path("out"), max_steps=2, wandb=WandbConfig(mode="online"), run_config={})
    except UserError as error:
        assert time.monotonic() - began < 15
        print(error, flush=True)
    os._exit(0)  # wandb's own process can take 12 s to end
    """


def test_online_without_credentials_is_refused_without_a_prompt(tmp_path):
    out, _ = run_python(REFUSED_ONLINE, tmp_path)
    assert "wandb login" in out and "WANDB_API_KEY" in out and "wandb.mode=offline" in out
    assert len(out.splitlines()) == 1


def test_online_without_a_network_is_refused(tmp_path):
    url = "http://127.0.0.1:9"
    out, _ = run_python(REFUSED_ONLINE, tmp_path, WANDB_API_KEY="a" * 40, WANDB_BASE_URL=url)
    assert url in out and "wandb.mode=offline" in out
    assert len(out.splitlines()) == 1


def test_online_with_a_server_that_never_answers_is_refused(tmp_path):
    """The credentials are in the netrc file. The host accepts the connection and stays silent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / ".netrc").write_text(f"machine {host} login user password {'a' * 40}\n")
        out, _ = run_python(REFUSED_ONLINE, tmp_path, WANDB_BASE_URL=f"http://{host}")
    assert f"http://{host}" in out and "wandb.mode=offline" in out


def test_a_variable_that_wandb_refuses_is_named(tmp_path):
    """wandb's error begins "1 validation error for Settings"."""
    code = REFUSED_ONLINE.replace('mode="online"', 'mode="offline"')
    out, _ = run_python(code, tmp_path, WANDB_BASE_URL="my-server")
    assert "offline cannot start a run (wandb's setting base_url: Input should be a valid URL, " in out
    assert len(out.splitlines()) == 1 and "fix the cause, or set wandb.mode=disabled" in out


class BrokenRun:
    def __init__(self):
        self.calls = []

    def log(self, *_, **__):
        self.calls.append("log")
        raise ConnectionResetError("gone\nwith a long trace")

    def finish(self, *_, **__):
        self.calls.append("finish")
        raise ConnectionResetError("gone\nwith a long trace")


def test_a_wandb_failure_is_reported_once(tmp_path, monkeypatch):
    broken, console = BrokenRun(), plain_console()
    monkeypatch.setattr("trainer.loggers.wandb._start_run", lambda *_: broken)
    with start_loggers(tmp_path, max_steps=9, wandb=WandbConfig(), run_config={}, console=console) as loggers:
        for step in (1, 2, 3):
            loggers.log(step, step, {"train/loss": 1.0})
    assert broken.calls == ["log"]
    assert [line for line in printed(console) if "wandb" in line] == [
        "wandb failed and is off from here on (ConnectionResetError: gone); metrics.jsonl goes on, and "
        f"`wandb sync {tmp_path}/wandb/*run-*` uploads what is missing"
    ]
    assert len(e2e.rows(tmp_path)) == 3


def test_a_process_ends_normally_after_wandb_failed(tmp_path):
    code = """if True:
        from pathlib import Path
        from trainer.loggers.wandb import WandbConfig, WandbLogger
        log = WandbLogger(WandbConfig(mode="offline"), {}, Path("out"), print)
        log.log(1, 10, {"train/loss": 1.0})
        log.log(2, 20, {3: object()})
        log.log(3, 30, {"train/loss": 2.0})
        log.close()
        """
    out, _ = run_python(code, tmp_path)
    assert out.startswith("wandb failed and is off from here on (TypeError") and len(out.splitlines()) == 1
    (row,) = offline_wandb.read(tmp_path / "out").history
    assert row["train/loss"] == 1.0


def test_a_wandb_failure_at_the_end_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.loggers.wandb._start_run", lambda *_: BrokenRun())
    said = []
    log = WandbLogger(WandbConfig(mode="offline"), {}, tmp_path, on_failure=said.append)
    log.close()
    log.close()
    assert len(said) == 1
