import math
import re
from contextlib import suppress

import pytest
from rich.console import Console

from tests.helpers.consoles import plain_console, printed, terminal
from trainer.evaluation import perplexity
from trainer.loggers.console import ConsoleLogger


def test_eta_is_the_recent_pace_times_the_steps_left():
    now, etas = [0.0], []
    log = ConsoleLogger(1000, console=plain_console(), clock=lambda: now[0])
    log._print_row = lambda row: etas.append(row.split()[-1])
    for step, seconds in ((1, 300), (10, 9), (20, 30)):  # the first step compiles, and step 20 is evaluated
        now[0] += seconds
        log.log(step, step, {"train/loss": 1.0})
    assert etas == ["-", "0:16:30", "0:33:32"]  # 990 steps at 9/9 s, 980 at 39/19
    for step in range(21, 121):  # The first of the recent 100 steps is then step 21.
        now[0] += 2.0
        log.log(step, step, {"train/loss": 1.0})
    assert etas[-1] == "0:29:20"  # 880 steps at 2 s
    log.log(120, 120, {"train/loss": 1.0})


FULL = {
    "train/loss": 3.412,
    "train/perplexity": 30.32,
    "train/lr": 3e-4,
    "perf/tokens_per_second": 512_345.0,
    "perf/tflops": 437.4,
    "perf/mfu": 0.442,
    "memory/peak_allocated_gib": 21.23,
}


def test_the_table():
    now = [0.0]
    console = plain_console()
    log = ConsoleLogger(600, console=console, clock=lambda: now[0])
    log.log(60, 1, {"train/loss": 10.95, "train/perplexity": 56954.0})
    now[0] = 622.5
    log.log(120, 2, {"val/loss": 3.39, "val/perplexity": 29.67} | FULL)
    assert printed(console) == [
        "         step     loss perplexity  tokens/s  TFLOP/s    MFU peak GiB       ETA",
        "train  60/600  10.9500     57,000                                            -",
        "val   120/600   3.3900       29.7",
        "train 120/600   3.4120       30.3   512,000      437  44.2%     21.2   1:23:00",
    ]


def test_an_unknown_peak_has_no_column():
    console = plain_console()
    rows = {key: value for key, value in FULL.items() if key != "perf/mfu"}
    ConsoleLogger(600, has_mfu=False, console=console).log(1, 1, rows)
    header, row = printed(console)
    assert "MFU" not in header and len(row) == len(header)


@pytest.mark.parametrize("max_steps", [9, 1200, 10**8])
@pytest.mark.parametrize(
    ("loss", "speed", "tflops", "memory"),
    [
        (math.nan, 0.00123, 1e-9, 0.0001),
        (12345.6, 1e10, 12_345.0, 1234.0),
        (1e30, 140_000.0, 0.0000123, 135.3),
        (30.0, 3_615_000.0, 1437.0, 79.9),
    ],
)
def test_rows_of_tiny_and_huge_numbers_are_aligned_and_fit(max_steps, loss, speed, tflops, memory):
    now = [0.0]
    console = plain_console()
    log = ConsoleLogger(max_steps, console=console, clock=lambda: now[0])
    log.log(1, 1, FULL)
    now[0] = 3.2e6 / max_steps
    numbers = {"train/loss": loss, "train/perplexity": perplexity(loss), "perf/tokens_per_second": speed}
    numbers |= {"perf/tflops": tflops, "perf/mfu": 1.0, "memory/peak_allocated_gib": memory}
    log.log(2, 2, numbers | {"val/loss": loss, "val/perplexity": perplexity(loss)})
    header, usual, evaluation, row = printed(console)
    ends = [match.end() for match in re.finditer(r"peak GiB|\S+", header)]
    assert len(row) <= 100 and len(usual) <= 100
    for line in (usual, row):
        assert [match.end() for match in re.finditer(r"\S+", line)][1:] == ends
    assert [match.end() for match in re.finditer(r"\S+", evaluation)][1:] == ends[:3]


def test_the_header_comes_again():
    console = plain_console()
    log = ConsoleLogger(100, console=console)
    for step in range(1, 42):
        log.log(step, step, {"train/loss": 1.0})
    assert [number for number, line in enumerate(printed(console)) if "loss" in line] == [0, 21, 42]


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
    with suppress(OSError):  # from flushing the file
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
    assert re.search(r"train  50/100   4\.5000 .* 0:00:00 .*━", text)
    assert "\x1b[2Ksaved\n" in text  # the live line is erased, the message stands, the live line follows
    assert text.rindex("saved") < text.rindex("4.5000")
    assert text.endswith("\x1b[?25h")  # the cursor is back


def test_a_summary_stands_below_the_last_live_line():
    console = terminal()
    log = ConsoleLogger(100, console=console)
    log.log(100, 1, {"train/loss": 9.0})
    log.summary("finished")
    assert console.file.getvalue().endswith("finished\n") and "\x1b[?25h" in console.file.getvalue()


def test_a_file_gets_no_control_codes():
    console = plain_console()
    log = ConsoleLogger(9, console=console)
    log.log(9, 9, FULL)
    log.summary("finished")
    assert console.file.getvalue().replace("\n", "").isprintable()
