import importlib.util
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.e2e import rows, train
from tests.helpers.consoles import plain_console, terminal
from trainer.loggers import WandbConfig, start_loggers

pytest_plugins = ["tests.e2e"]
OFF = WandbConfig(mode="disabled")


def test_a_new_run_in_an_old_folder_keeps_the_old_files(tmp_path):
    for step in (1, 2, 3):
        with start_loggers(tmp_path, max_steps=9, wandb=OFF, run_config={}, console=plain_console()) as loggers:
            loggers.log(step, step, {})
    for name, step in (("metrics", 3), ("metrics.previous-2", 2), ("metrics.previous", 1)):
        assert f'"step": {step}' in (tmp_path / f"{name}.jsonl").read_text()


def test_a_new_run_in_the_folder_of_another_keeps_the_settings_of_both(workplace):
    for places, rate in (("checkpoint.dir=first", 1e-2), ("checkpoint.dir=second", 2e-2)):
        train("run", "train.max_steps=1", places, f"optimizer.lr={rate}").ok()
    assert OmegaConf.load("run/config.previous.yaml").optimizer.lr == 1e-2
    assert OmegaConf.load("run/config.yaml").optimizer.lr == 2e-2


def test_a_resumed_run_continues_the_file(tmp_path):
    for resumed_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        with start_loggers(
            tmp_path, max_steps=9, wandb=OFF, run_config={}, resumed_step=resumed_step, console=plain_console()
        ) as loggers:
            for step in steps:
                loggers.log(step, 10 * steps[0], {})
    assert [(row["step"], row["tokens"]) for row in rows(tmp_path)] == [(1, 10), (2, 10), (3, 30), (4, 30)]


def test_all_loggers_are_closed_after_a_failure(tmp_path, monkeypatch):
    exit_codes = []

    class Run:
        def log(self, *_, **__): ...

        def finish(self, exit_code):
            exit_codes.append(exit_code)

    monkeypatch.setattr("trainer.loggers.wandb._start_run", lambda *_: Run())
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


@pytest.mark.parametrize("setting", ["tensorboard=true", "wandb.backend=trackio"])
def test_a_missing_package_is_refused_before_a_folder_changes(workplace, monkeypatch, setting):
    train("run", "train.max_steps=1").ok()
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    find, package = importlib.util.find_spec, setting.replace("=true", "").split("=")[-1]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    refused = train("run", "wandb.mode=offline", setting)
    assert refused.code == 2 and refused.out == ""
    assert refused.err == f'error: {setting} needs the package {package}; run pip install -e ".[{package}]"\n'
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
