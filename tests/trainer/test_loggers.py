import io
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from errors import UserError
from tests import e2e, offline_wandb
from trainer import loggers
from trainer.loggers import ConsoleLogger, JsonlLogger, Pace, WandbConfig, WandbLogger, start_loggers

pytest_plugins = ["tests.e2e"]

ROOT = Path(__file__).parents[2]
OFF = WandbConfig(mode="disabled")


def rows(path: Path) -> list[dict]:
    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=no_constant) for line in path.read_text().splitlines()]


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=80)


def terminal() -> Console:
    return Console(file=io.StringIO(), width=200, force_terminal=True, force_interactive=True, color_system=None)


def printed(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()


def run_python(code: str, cwd: Path, **env: str) -> tuple[str, float]:
    """Runs `code` for a user without wandb settings, credentials or proxies; returns all output, and seconds."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and not k.lower().endswith("_proxy")}
    clean |= {"HOME": str(cwd), "PYTHONPATH": str(ROOT), "NETRC": str(cwd / ".netrc")} | env
    began = time.monotonic()
    # A stdin that stays open, as a terminal's would: a prompt hangs instead of reading the end of file.
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=cwd, env=clean, text=True, **pipes)
    try:
        process.wait(timeout=60)
    finally:
        process.kill()
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return out, time.monotonic() - began


# metrics.jsonl


def test_rows_are_on_disk_at_once(tmp_path):
    log = JsonlLogger(tmp_path / "new" / "metrics.jsonl")
    log.log(10, 5120, {"train/loss": 3.5})
    assert rows(log.path) == [{"step": 10, "tokens": 5120, "train/loss": 3.5}]


def test_what_is_not_finite_keeps_its_key_as_null(tmp_path):
    log = JsonlLogger(tmp_path / "metrics.jsonl")
    log.log(1, 2, {"train/loss": math.nan, "train/perplexity": math.inf, "train/lr": 0.1})
    assert rows(log.path) == [{"step": 1, "tokens": 2, "train/loss": None, "train/perplexity": None, "train/lr": 0.1}]


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path):
    log = JsonlLogger(tmp_path / "metrics.jsonl")
    for step in (10, 20, 30):
        log.log(step, step, {})
    log.truncate_after(20)
    log.log(30, 31, {})
    assert [(row["step"], row["tokens"]) for row in rows(log.path)] == [(10, 10), (20, 20), (30, 31)]
    assert list(tmp_path.iterdir()) == [log.path]


@pytest.mark.parametrize("torn", ['{"step": 20, "tok', '{"step": 2', "{", "2", "\0\0\0"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "tokens": 10}\n' + torn)
    log = JsonlLogger(path)
    log.log(20, 20, {})
    assert [row["step"] for row in rows(path)] == [10, 20]


def test_rows_that_a_full_disk_refuses_are_told_once_and_written_later(tmp_path):
    told = []
    log = JsonlLogger(tmp_path / "metrics.jsonl", on_failure=told.append)
    log.log(1, 10, {"train/loss": 3.5})
    with e2e.largest_file(log.path.stat().st_size + 5):  # half a row fits
        for step in (2, 3):
            log.log(step, 10 * step, {"train/loss": 3.5})
    assert len(told) == 1 and "metrics.jsonl cannot be written (File too large)" in told[0]
    log.log(4, 40, {})
    assert [row["step"] for row in rows(log.path)] == [1, 2, 3, 4]


def test_a_file_deleted_under_the_run_is_told_and_begun_anew(tmp_path):
    told = []
    log = JsonlLogger(tmp_path / "run" / "metrics.jsonl", on_failure=told.append)
    log.log(1, 10, {})
    shutil.rmtree(tmp_path / "run")
    for step in (2, 3):
        log.log(step, 10 * step, {})
    assert len(told) == 1 and "metrics.jsonl was deleted" in told[0]
    assert [row["step"] for row in rows(log.path)] == [2, 3]
    shutil.rmtree(tmp_path / "run")
    log.close()
    assert not (tmp_path / "run").exists()


def test_rows_still_waiting_at_the_end_are_written_or_told(tmp_path):
    told = []
    for name in ("room", "full"):
        log = JsonlLogger(tmp_path / name, on_failure=told.append)
        with e2e.largest_file(5):
            log.log(1, 10, {})
            log.log(2, 20, {})
            if name == "full":
                log.close()
        log.close()
    assert [row["step"] for row in rows(tmp_path / "room")] == [1, 2]
    assert len(told) == 3 and "full lacks its last 2 rows (File too large); make room before the next run" in told[2]


# Console


def test_eta_is_the_recent_pace_times_what_is_left():
    now = [0.0]
    pace = Pace(window=3, clock=lambda: now[0])
    assert pace.seconds_for(100) is None
    now[0] = 300.0  # the first step compiled for five minutes
    pace.mark(1)
    assert pace.seconds_for(100) is None
    now[0] += 9.0
    pace.mark(10)
    assert pace.seconds_for(100) == pytest.approx(100)
    now[0] += 30.0  # ten steps and an evaluation
    pace.mark(20)
    assert pace.seconds_for(190) == pytest.approx(39 / 19 * 190)
    now[0] += 10.0
    pace.mark(30)  # the window forgets step 1
    assert pace.seconds_for(100) == pytest.approx(40 / 20 * 100)


def test_a_plain_line():
    now = [0.0]
    console = plain_console()
    log = ConsoleLogger(600, console=console, clock=lambda: now[0])
    log.log(60, 1, {"train/loss": 10.95})
    now[0] = 622.5
    log.log(
        120,
        2,
        {
            "train/loss": 3.412,
            "train/perplexity": 30.32,
            "train/lr": 3e-4,
            "train/grad_norm": 0.4,
            "perf/tokens_per_second": 512_345.0,
            "perf/tflops": 437.4,
            "perf/mfu": 0.442,
            "memory/peak_allocated_gib": 21.23,
        },
    )
    assert printed(console) == [
        "step  60/600  loss 10.950  ETA -:--:--",
        "step 120/600  loss  3.412  ppl    30.3  lr 3.0e-04  512k tok/s   437 TFLOP/s  MFU 44%   21.2 GiB  ETA 1:23:00",
    ]


def test_the_widest_plain_line_fits_120_columns():
    now = [0.0]
    console = plain_console()
    log = ConsoleLogger(600_000, console=console, clock=lambda: now[0])
    log.log(1, 1, {})
    now[0] = 0.8  # times 599,998 steps: 479,998 s
    widest = {"train/loss": 11.003, "train/perplexity": math.exp(11.003), "train/lr": 3e-4, "perf/mfu": 0.44}
    widest |= {"perf/tokens_per_second": 3_615_000, "perf/tflops": 1437.0, "memory/peak_allocated_gib": 135.3}
    log.log(2, 2, widest)
    (line,) = printed(console)
    assert line.endswith("ETA 133:19:58"), line
    assert len(line) < 120


def test_a_slow_device_and_a_diverged_loss_still_read():
    console = plain_console()
    log = ConsoleLogger(9, console=console)
    log.log(1, 1, {"train/loss": math.nan, "train/perplexity": math.inf, "perf/tflops": 0.0512})
    log.log(2, 2, {"train/loss": 30.0, "train/perplexity": math.exp(30), "perf/tokens_per_second": 9512.0})
    first, second = printed(console)
    assert "loss    nan  ppl     inf  0.05 TFLOP/s" in first
    assert "ppl 1.1e+13  9.5k tok/s" in second


def test_evaluation_has_a_line_of_its_own():
    console = plain_console()
    ConsoleLogger(600, console=console).log(60, 1, {"val/loss": 3.39, "val/perplexity": 29.67, "train/loss": 3.4})
    assert printed(console)[0] == "step  60/600  val loss  3.390  val ppl    29.7"
    assert printed(console)[1].startswith("step  60/600  loss  3.400")


def test_messages_are_printed_as_they_are():
    console = plain_console()
    text = "loaded [bold]/data/train.bin[/bold] :smile: " + "x" * 100
    ConsoleLogger(1, console=console).message(text)
    assert printed(console) == [text]


def test_a_full_disk_under_stdout_does_not_stop_training():
    full = open("/dev/full", "w")  # noqa: SIM115 (closing it fails, being full)
    log = ConsoleLogger(10, console=Console(file=full))
    log.message("saved")
    log.log(1, 1, {"train/loss": 9.0})
    log.close()
    with suppress(OSError):  # of what the file still holds
        full.close()


def test_a_terminal_shows_a_live_line_with_messages_above_it():
    console = terminal()
    log = ConsoleLogger(100, console=console)
    log.log(1, 1, {"train/loss": 9.0})
    log.log(50, 2, {"train/loss": 4.5})
    log.message("saved")
    log.close()
    log.close()
    text = console.file.getvalue()
    assert "step  50/100  ETA 0:00:00  loss  4.500" in text
    assert "\x1b[2Ksaved\n" in text  # the live line is erased, the message stands, the live line follows
    assert text.rindex("saved") < text.rindex("loss  4.500")
    assert text.endswith("\x1b[?25h")  # the cursor is back


# wandb


@pytest.mark.parametrize(("field", "value"), [("mode", "on"), ("project", "")])
def test_bad_settings_are_refused(field, value):
    with pytest.raises(UserError, match=rf"wandb\.{field}"):
        WandbConfig(**{field: value})


def test_disabled_does_not_import_wandb(tmp_path):
    code = """if True:
        import sys
        from trainer.loggers import WandbConfig, start_loggers
        with start_loggers("out", max_steps=2, wandb=WandbConfig(mode="disabled"), run_config={}) as loggers:
            loggers.log(1, 10, {"train/loss": 1.0})
        assert "wandb" not in sys.modules
        """
    run_python(code, tmp_path)
    assert not (tmp_path / "wandb").exists()


def test_offline_writes_a_run_below_the_output_folder_and_nowhere_else(tmp_path):
    code = """if True:
        from trainer.loggers import WandbConfig, start_loggers
        with start_loggers("out", max_steps=2, wandb=WandbConfig(tags=["a"]), run_config={"train": {"seed": 1}}) as log:
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
    sweep = ("-m", "attention=naive,sdpa", "hydra.sweep.dir=sweeps/two")
    e2e.run("train.py", *sweep, *e2e.TINY, "wandb.mode=offline").ok()
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


def test_a_group_and_tags_of_the_users_own_are_left_as_they_are(workplace):
    e2e.train("named", "wandb.mode=offline", "train.max_steps=1", "wandb.group=mine", "wandb.tags=[]").ok()
    e2e.train("alone", "wandb.mode=offline", "train.max_steps=1", "wandb.tags=[a,b]").ok()
    named, alone = offline_wandb.read("named"), offline_wandb.read("alone")
    assert (named.group, named.tags, alone.group, alone.tags) == ("mine", [], "", ["a", "b"])


REFUSED_ONLINE = """if True:
    from errors import UserError
    from trainer.loggers import WandbConfig, start_loggers
    try:
        start_loggers("out", max_steps=2, wandb=WandbConfig(mode="online"), run_config={})
    except UserError as error:
        print(error)
    """


def test_online_without_credentials_is_refused_without_a_prompt(tmp_path):
    out, seconds = run_python(REFUSED_ONLINE, tmp_path)
    assert "wandb login" in out and "WANDB_API_KEY" in out and "wandb.mode=offline" in out
    assert len(out.splitlines()) == 1
    assert seconds < 15


def test_online_without_a_network_is_refused(tmp_path):
    url = "http://127.0.0.1:9"
    out, seconds = run_python(REFUSED_ONLINE, tmp_path, WANDB_API_KEY="a" * 40, WANDB_BASE_URL=url)
    assert url in out and "wandb.mode=offline" in out
    assert len(out.splitlines()) == 1
    assert seconds < 15


def test_online_with_a_server_that_never_answers_is_refused(tmp_path):
    """Credentials from the netrc file, and a host that takes the connection and stays silent: a captive network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / ".netrc").write_text(f"machine {host} login user password {'a' * 40}\n")
        out, seconds = run_python(REFUSED_ONLINE, tmp_path, WANDB_BASE_URL=f"http://{host}")
    assert f"no answer from http://{host}" in out
    assert seconds < 15


@pytest.mark.parametrize("server", ["https://.example.com", "nothing", "http://[::1", "ftp://"])
def test_what_is_no_address_of_a_server_does_not_answer(server):
    assert not loggers._answers(server)


class BrokenRun:
    def __init__(self):
        self.calls = []

    def log(self, *_, **__):
        self.calls.append("log")
        raise ConnectionResetError("gone\nwith a long trace")

    def finish(self, *_, **__):
        self.calls.append("finish")
        raise ConnectionResetError("gone\nwith a long trace")


def test_a_wandb_that_breaks_is_announced_once_and_left_alone(tmp_path, monkeypatch):
    broken, console = BrokenRun(), plain_console()
    monkeypatch.setattr("trainer.loggers._start_wandb_run", lambda *_: broken)
    with start_loggers(tmp_path, max_steps=9, wandb=WandbConfig(), run_config={}, console=console) as loggers:
        for step in (1, 2, 3):
            loggers.log(step, step, {"train/loss": 1.0})
    assert broken.calls == ["log", "finish"]
    assert [line for line in printed(console) if "wandb" in line] == [
        "wandb failed and is off from here on; metrics.jsonl goes on (ConnectionResetError: gone); what it has not "
        f"sent, wandb sync {tmp_path}/wandb/*run-* sends"
    ]
    assert len(rows(tmp_path / "metrics.jsonl")) == 3


def test_after_a_failure_the_next_job_of_a_sweep_has_a_run_of_its_own(tmp_path):
    """Left alone, wandb would give it the one that failed."""
    code = """if True:
        from trainer.loggers import WandbConfig, WandbLogger
        first = WandbLogger(WandbConfig(), {}, "first")
        first.log(1, 10, {"train/loss": 1.0})
        first.log(2, 20, {3: object()})
        second = WandbLogger(WandbConfig(), {}, "second")
        second.log(1, 10, {"train/loss": 2.0})
        second.close()
        """
    out, _ = run_python(code, tmp_path)
    assert out.count("wandb failed and is off") == 1
    (first,), (second,) = (offline_wandb.read(tmp_path / name).history for name in ("first", "second"))
    assert (first["train/loss"], second["train/loss"]) == (1.0, 2.0)


def test_a_wandb_that_breaks_at_the_end_is_announced_too(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.loggers._start_wandb_run", lambda *_: BrokenRun())
    said = []
    log = WandbLogger(WandbConfig(), {}, tmp_path, on_failure=said.append)
    log.close()
    log.close()
    assert len(said) == 1


# All of them


def test_a_new_run_in_an_old_folder_starts_a_new_file_and_keeps_the_old(tmp_path):
    for step in (1, 2):
        with start_loggers(tmp_path, max_steps=9, wandb=OFF, run_config={}, console=plain_console()) as loggers:
            loggers.log(step, step, {})
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [2]
    assert [row["step"] for row in rows(tmp_path / "metrics.previous.jsonl")] == [1]


def test_a_resumed_run_continues_the_file(tmp_path):
    for resumed_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        with start_loggers(
            tmp_path, max_steps=9, wandb=OFF, run_config={}, resumed_step=resumed_step, console=plain_console()
        ) as loggers:
            for step in steps:
                loggers.log(step, 10 * steps[0], {})
    assert [(row["step"], row["tokens"]) for row in rows(tmp_path / "metrics.jsonl")] == [
        (1, 10),
        (2, 10),
        (3, 30),
        (4, 30),
    ]


def test_everything_is_closed_after_a_failure_and_wandb_told_of_it(tmp_path, monkeypatch):
    exit_codes = []

    class Run:
        def log(self, *_, **__): ...

        def finish(self, exit_code):
            exit_codes.append(exit_code)

    monkeypatch.setattr("trainer.loggers._start_wandb_run", lambda *_: Run())
    console = terminal()
    with (
        pytest.raises(KeyboardInterrupt),
        start_loggers(tmp_path, max_steps=9, wandb=WandbConfig(), run_config={}, console=console) as loggers,
    ):
        loggers.log(1, 1, {"train/loss": 1.0})
        raise KeyboardInterrupt
    loggers.close()
    assert exit_codes == [1]
    assert console.file.getvalue().endswith("\x1b[?25h")
