"""Jobs of submitit: what would be Slurm's, on this machine."""

from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import conf
from conf.schema import register
from tests.e2e import ROOT, TINY, curve, start

pytest_plugins = ["tests.e2e"]


def test_a_sweep_is_trained_by_submitits_processes_together(workplace):
    """By two, which are told their places by submitit."""
    submitit = ("-m", "hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2", "hydra.sweep.dir=sweep")
    sweep = start(str(ROOT / "train.py"), *submitit, *TINY, "train.max_steps=2")
    _, err = sweep.communicate(timeout=240)
    assert sweep.returncode == 0, err
    assert [step for step, *_ in curve("sweep/0_flash2")] == [1, 2]
    assert any("2 x CPU, fp32, ddp" in log.read_text() for log in Path("sweep").glob(".submitit/*/*_0_log.out"))


def test_slurm_gets_a_process_for_each_gpu():
    register()
    with initialize_config_dir(str(Path(conf.__file__).parent), version_base="1.3"):
        config = compose("config", ["hydra/launcher=slurm", "hydra.launcher.gpus_per_node=4"], return_hydra_config=True)
    launcher = OmegaConf.to_container(config.hydra.launcher, resolve=False)
    assert launcher["_target_"].endswith("SlurmLauncher") and launcher["tasks_per_node"] == "${.gpus_per_node}"
    assert config.hydra.launcher.tasks_per_node == 4
