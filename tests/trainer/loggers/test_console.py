import math
from contextlib import suppress

from rich.console import Console

from tests.helpers.consoles import plain_console, printed, terminal
from trainer.loggers.console import ConsoleLogger


def test_eta_is_the_recent_pace_times_the_steps_left():
    now, etas = [0.0], []
    log = ConsoleLogger(1000, console=plain_console(), clock=lambda: now[0])
    log.message = lambda line: etas.append(line.split("ETA ")[1])
    for step, seconds in ((1, 300), (10, 9), (20, 30)):  # the first step compiles, and step 20 is evaluated
        now[0] += seconds
        log.log(step, step, {"train/loss": 1.0})
    assert etas == ["-:--:--", "0:16:30", "0:33:32"]  # 990 steps at 9/9 s, 980 at 39/19
    for step in range(21, 121):  # The first of the recent 100 steps is then step 21.
        now[0] += 2.0
        log.log(step, step, {"train/loss": 1.0})
    assert etas[-1] == "0:29:20"  # 880 steps at 2 s
    log.log(120, 120, {"train/loss": 1.0})


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
    assert "step  50/100  ETA 0:00:00  loss  4.500" in text
    assert "\x1b[2Ksaved\n" in text  # the live line is erased, the message stands, the live line follows
    assert text.rindex("saved") < text.rindex("loss  4.500")
    assert text.endswith("\x1b[?25h")  # the cursor is back
