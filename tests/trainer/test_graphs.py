"""Micro-steps as CUDA graphs: when a run uses them, and on a GPU, that they compute what queued kernels compute."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import train as train_module
from conf.schema import Config, TrainConfig
from data.config import DataConfig
from errors import UserError
from model.attention import VARIANTS, build_attention
from model.gpt2 import GPT2, ModelConfig
from tests.e2e import curve, load, start, train
from trainer.distributed.world import World
from trainer.graphs import MicroStepGraphs, are_graphs_wanted, check_graphs
from trainer.precision import Compute, has_fp8
from trainer.state import TrainState

pytest_plugins = ["tests.e2e"]

SHAPE = 2, 256  # sequences, tokens of each
LOSSES = ("train/loss", "train/grad_norm", "train/lr", "val/loss")
CPU, GPU = Compute(torch.device("cpu"), torch.float32), Compute(torch.device("cuda"), torch.bfloat16)


def test_graphs_are_refused_where_there_are_none(workplace, monkeypatch):
    outcome = train("run", "train.cuda_graphs=true")
    assert (
        outcome.code == 2
        and "train.cuda_graphs=true needs one process with a GPU, not CPU, fp32; leave it out" in outcome.err
    )
    assert not Path("run/metrics.jsonl").exists()
    together = Compute(torch.device("cuda"), torch.bfloat16, World(rank=0, size=2, parallel="ddp"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    with pytest.raises(UserError, match=r"needs one process with a GPU, not 2 x H200 \(ddp\), bf16; leave it out"):
        check_graphs(TrainConfig(cuda_graphs=True), together)
    for compute in (CPU, together):
        check_graphs(TrainConfig(), compute)
        assert not are_graphs_wanted(TrainConfig(), compute)


@pytest.mark.parametrize(
    ("settings", "gib", "wanted"),
    [
        ({}, 40, True),
        ({}, 41, False),  # 39 GiB are left
        ({"compile": False}, 1, False),
        ({"activation_checkpointing": "full"}, 1, False),
        ({"activation_checkpointing": "selective"}, 40, True),
        ({"cuda_graphs": True, "compile": False}, 70, True),
        ({"cuda_graphs": False}, 1, False),
    ],
)
def test_graphs_are_the_default_for_what_is_compiled_and_leaves_as_much_memory(monkeypatch, settings, gib, wanted):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: gib * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((80 - gib) * 2**30, 80 * 2**30))
    assert are_graphs_wanted(TrainConfig(**settings), GPU) == wanted


def setting(attention: str, dropout: float = 0.0, documents: bool = False, compute: Compute = GPU) -> tuple:
    """Return a small model and the other arguments of train.micro_step."""
    torch.manual_seed(0)
    own = {"local": {"window": 100}, "block_sparse": {"pattern": "butterfly"}}.get(attention, {})
    config = Config(
        attention=VARIANTS[attention](**own),
        model=ModelConfig(n_layer=2, n_head=2, n_embd=128, context_length=SHAPE[1], vocab_size=512, dropout=dropout),
        data=DataConfig(name="tokens", dir="", tokenizer="byte", document_mask=documents),
        train=TrainConfig(batch_size=SHAPE[0], grad_accumulation=3),
    )
    model = GPT2(config.model, build_attention(config.attention)).to(compute.device)
    state = TrainState(model, torch.optim.SGD(model.parameters()), compute.grad_scaler(), None, "byte")
    return model, state, config, compute


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [tuple(torch.randint(256, (2, *SHAPE), device="cuda")) for _ in range(count)]


WAITS = """
import torch
from errors import UserError
from tests.trainer.test_graphs import SHAPE, batches, partial, setting, train_module
from trainer.graphs import MicroStepGraphs

model, *rest = setting("naive", dropout=0.2)
queued = partial(train_module.micro_step, model, *rest)
(batch,) = batches(1)
queued(*batch)
try:
    MicroStepGraphs(lambda *x: queued(*x) * torch.ones((), device="cuda").item(), model, SHAPE, accumulates=False)
except UserError as error:
    print(error)
"""


def results(run, model: GPT2, steps: list) -> list[torch.Tensor]:
    """Return the losses of the micro-steps and the gradients of each step, for all steps."""
    found = []
    for step in steps:
        found += [run(*batch).clone() for batch in step]
        found += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["naive", "sdpa", "fused_softmax", "flash1", "flash2", "local", "block_sparse"])
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
def test_replayed_micro_steps_give_the_losses_and_gradients_of_those_queued(attention, documents):
    """Two steps: one of three micro-steps, which accumulate gradients, and one of a single micro-step."""
    model, *rest = setting(attention, documents=documents)
    queued = partial(train_module.micro_step, model, *rest)
    steps = [batches(3), batches(1)]
    expected = results(queued, model, steps)
    replayed = MicroStepGraphs(queued, model, SHAPE, accumulates=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    for ours, theirs in zip(results(replayed, model, steps), expected, strict=True):
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm()  # the sums have another order


@pytest.mark.gpu
def test_replayed_dropout_draws_anew_as_the_generator_has_it():
    model, *rest = setting("flash2", dropout=0.2)
    queued = partial(train_module.micro_step, model, *rest)
    (batch,) = batches(1)
    queued(*batch)
    replayed = MicroStepGraphs(queued, model, SHAPE, accumulates=True)
    torch.manual_seed(1)
    expected = [queued(*batch).item() for _ in range(3)]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    assert [replayed(*batch).item() for _ in range(3)] == pytest.approx(expected, rel=1e-4)
    assert len({round(loss, 3) for loss in expected}) == 3


@pytest.mark.gpu
def test_a_micro_step_that_waits_for_the_device_is_refused(tmp_path):
    """Use a process of its own, because torch's stream and generator stay in a failed capture."""
    (tmp_path / "waits.py").write_text(WAITS)
    process = start(str(tmp_path / "waits.py"))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    expected = r"a training step cannot be captured as a CUDA graph \(.*captur.*\); set train.cuda_graphs=false"
    assert re.search(expected, out)


@pytest.mark.gpu
@pytest.mark.parametrize(("compiled", "precision"), [("false", "auto"), ("true", "auto"), ("true", "fp8")])
def test_a_run_by_graphs_is_the_run_without_and_continues_bit_for_bit(workplace, compiled, precision):
    if precision == "fp8" and not has_fp8(torch.device("cuda")):
        pytest.skip("needs a GPU with FP8")
    options = (f"precision={precision}",)
    options += ("device=cuda", f"train.compile={compiled}", "train.deterministic=true", "attention.deterministic=true")
    options += ("attention=flash2", "train.grad_accumulation=2", "model.dropout=0.2", "checkpoint.interval=10")
    options += ("train.max_steps=20",)
    train("queued", *options, "train.cuda_graphs=false").ok()
    whole = train("whole", *options, "train.cuda_graphs=true").ok()
    assert "the next ones are CUDA graphs" in whole.out
    cut = (*options, "train.cuda_graphs=true", "checkpoint.resume=whole/checkpoints/step-00000010.pt")
    train("continued", *cut).ok()
    assert curve("queued", *LOSSES) == curve("whole", *LOSSES)
    assert curve("continued", *LOSSES) == curve("whole", *LOSSES)[-len(curve("continued")) :]
    queued, whole, continued = (
        load(max(Path(folder, "checkpoints").glob("step-*"))) for folder in ("queued", "whole", "continued")
    )
    for other in (queued, continued):
        torch.testing.assert_close(other["model"], whole["model"], rtol=0, atol=0)
        assert other["fp8_scales"] == whole["fp8_scales"]
