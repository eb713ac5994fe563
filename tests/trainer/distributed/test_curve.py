"""Several processes train the same model as one process: on a CPU with gloo, on GPUs with NCCL."""

import pytest
import torch

from tests.e2e import train, write_tokens
from tests.several import GLOBAL, assert_same_curve, train_together


@pytest.mark.parametrize(
    ("processes", "device"),
    [
        pytest.param(2, "cpu", marks=pytest.mark.slow),
        *(pytest.param(number, "cuda", marks=pytest.mark.gpu) for number in (2, 4)),
    ],
)
def test_several_processes_train_the_same_model_as_one(tmp_path, monkeypatch, processes, device):
    if device == "cuda" and torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} CUDA devices")
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "tokens")
    settings = f"{GLOBAL} device={device} precision=fp32 attention=flash2 train.compile=false"
    train("alone", *settings.split()).ok()
    train_together(processes, f"ddp {settings}", f"fsdp {settings} parallel=fsdp")
    for folder in ("ddp", "fsdp"):
        assert_same_curve(tmp_path / folder, tmp_path / "alone")
