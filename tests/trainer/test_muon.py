"""optimizer=muon: torch's Muon for the weight matrices of the blocks, AdamW for the rest."""

import copy
import math
from pathlib import Path

import pytest
import torch

from errors import UserError
from model.attention import NaiveConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from tests.e2e import curve, load, run, train
from tests.trainer.test_optimizer import UNSCALED, gradients_of, same, state_of, take_step
from trainer.muon import MuonConfig
from trainer.optimizer import OptimizerConfig, build_optimizer

pytest_plugins = ["tests.e2e"]

CONFIG = OptimizerConfig(
    name="muon", lr=0.01, weight_decay=0.2, muon=MuonConfig(lr=0.05, momentum=0.9, nesterov=False, ns_steps=4)
)
LOSSES = ("train/loss", "train/grad_norm", "train/lr", "val/loss")


@pytest.fixture
def model() -> GPT2:
    torch.manual_seed(0)
    shape = ModelConfig(n_layer=2, n_head=2, n_embd=32, context_length=8, vocab_size=65)
    return GPT2(shape, build_attention(NaiveConfig()))


def test_muon_takes_the_matrices_of_the_blocks_alone(model):
    names = {p: name for name, p in model.named_parameters()}
    decayed, others, hidden = ([names[p] for p in g["params"]] for g in build_optimizer(model, CONFIG).param_groups)
    matrices = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert hidden == [f"h.{layer}.{matrix}.weight" for layer in (0, 1) for matrix in matrices]
    assert decayed == ["wte.weight", "wpe.weight"]  # the head is tied to wte
    assert sorted(decayed + others + hidden) == sorted(names.values())


def test_steps_are_those_of_torchs_optimizers_at_their_own_rates(model):
    """The schedule is at half of its rate, so Muon's is half of its own too. The gradient is clipped as a whole."""
    twin = copy.deepcopy(model)
    hidden = [p for name, p in twin.named_parameters() if name.startswith("h.") and p.ndim == 2]
    tables, vectors = [twin.wte.weight, twin.wpe.weight], [p for p in twin.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(
        hidden, lr=0.025, momentum=0.9, nesterov=False, ns_steps=4, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
    )
    groups = {"params": tables, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}
    adamw = torch.optim.AdamW(groups, lr=0.005, betas=(0.9, 0.95), fused=True)
    optimizer = build_optimizer(model, CONFIG)
    for seed in range(3):
        gradients = gradients_of(model, seed)
        norm = take_step(model, optimizer, gradients, lr=0.005, grad_clip=1.0)
        for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
            parameter.grad = gradient / norm if parameter in set(hidden) else gradient
        adamw.grad_scale = norm
        muon.step()
        adamw.step()
    assert same(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("scaled", [False, True], ids=["without a scaler", "with the scaler of fp16"])
def test_a_gradient_that_is_not_finite_leaves_no_trace(model, scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else UNSCALED
    optimizer = build_optimizer(model, CONFIG)
    take_step(model, optimizer, gradients_of(model, seed=1), grad_clip=1.0, scaler=scaler)
    before = state_of(model, optimizer)
    broken = gradients_of(model, seed=2)
    broken[5].view(-1)[3] = math.nan
    assert not take_step(model, optimizer, broken, grad_clip=1.0, scaler=scaler).isfinite()
    assert same(state_of(model, optimizer), before)
    take_step(model, optimizer, gradients_of(model, seed=3), grad_clip=1.0, scaler=scaler)
    assert not same(state_of(model, optimizer), before)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_resumed_run_repeats_the_steps_bit_for_bit(workplace, asynchronous):
    options = "optimizer=muon", "optimizer.muon.lr=0.02", "checkpoint.interval=3", "checkpoint.keep=9"
    options += ("train.max_steps=6", "model.dropout=0.1", f"checkpoint.asynchronous={asynchronous}")
    train("whole", *options).ok()
    run("train.py", "checkpoint.resume=whole/checkpoints/step-00000003.pt", "hydra.run.dir=again").ok()
    assert curve("again", *LOSSES) == curve("whole", *LOSSES)[3:]
    ends = [load(Path(folder, "checkpoints/step-00000006.pt")) for folder in ("whole", "again")]
    states = [end["optimizer"]["state"] for end in ends]
    torch.testing.assert_close(ends[0]["model"], ends[1]["model"], rtol=0, atol=0)
    torch.testing.assert_close(*states, rtol=0, atol=0)
    moments = [set(of_one) for of_one in states[0].values()]
    assert moments.count({"momentum_buffer"}) == 8 and moments.count({"step", "exp_avg", "exp_avg_sq"}) == 20


def test_a_resumed_run_keeps_its_optimizer(workplace):
    train("run", "train.max_steps=1").ok()
    refused = run("train.py", "checkpoint.resume=run", "optimizer=muon")
    assert refused.code == 2 and "optimizer=muon cannot continue checkpoint.resume=run/" in refused.err
    assert "holds the moments of optimizer=adamw; set optimizer=adamw, or start a new run with" in refused.err


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", -1.0), ("momentum", 1.0), ("ns_steps", 0), ("ns_steps", 100), ("adjust_lr_fn", "none")],
    ids=str,
)
def test_an_impossible_setting_is_refused_by_name(key, value):
    with pytest.raises(UserError, match=f"optimizer.muon.{key}={value}"):
        MuonConfig(**{key: value})


def test_settings_without_effect_are_refused():
    with pytest.raises(UserError, match="optimizer=adamw does not use them; add optimizer=muon"):
        OptimizerConfig(muon=MuonConfig(lr=0.1))
    with pytest.raises(UserError, match="optimizer.muon.lr=0.1 follows the schedule of optimizer.lr=0; raise"):
        OptimizerConfig(name="muon", lr=0, muon=MuonConfig(lr=0.1))
