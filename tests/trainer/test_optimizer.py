import copy
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from errors import UserError
from kernels.adamw import triton_kernels
from model.attention import NaiveConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from trainer.optimizer import (
    AdamW,
    OptimizerConfig,
    build_optimizer,
    clip_gradients,
    learning_rate,
    schedule_remarks,
    set_learning_rate,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNSCALED = torch.amp.GradScaler("cpu", enabled=False)


@pytest.fixture
def model() -> GPT2:
    torch.manual_seed(0)
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, context_length=8, vocab_size=65)
    return GPT2(config, build_attention(NaiveConfig()))


def gradients_of(model: nn.Module, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn_like(p) for p in model.parameters()]


def take_step(model, optimizer, gradients, *, lr=0.01, grad_clip=0.0, scaler=UNSCALED) -> torch.Tensor:
    """Take an optimizer step with these gradients, multiplied by the loss scale as a backward pass does."""
    scale = scaler.scale(torch.ones((), device=gradients[0].device))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient * scale
    return step(optimizer, scaler, lr, grad_clip)


def step(optimizer, scaler, lr: float, grad_clip: float) -> torch.Tensor:
    """Take the step as train.train_step does, and return the gradient norm."""
    set_learning_rate(optimizer, lr)
    norm = clip_gradients(optimizer, scaler, grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm


def state_of(model, optimizer) -> list[torch.Tensor]:
    """Return weights, moments and step counts."""
    moments = (value for state in optimizer.state_dict()["state"].values() for value in state.values())
    return [tensor.clone() for tensor in (*model.state_dict().values(), *moments)]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_every_parameter_is_in_exactly_one_group(model):
    optimizer = build_optimizer(model, OptimizerConfig())
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_decay_shrinks_matrices_and_tables_alone(model):
    """If the gradient is zero, AdamW only decays: it multiplies by 1 - lr x weight_decay = 1 - 0.1 x 0.5."""
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    take_step(model, optimizer, [torch.zeros_like(p) for p in model.parameters()], lr=0.1)
    for name, parameter in model.named_parameters():
        decays = name.startswith(("wte", "wpe")) or ("c_" in name and name.endswith("weight"))
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if decays else 1), msg=name)


def test_two_steps_by_hand():
    """One weight at 1, beta1 0.5, beta2 0.75, no decay.

    Gradient 2 at lr 0.1:   m = 1, v = 1; unbiased 1 / 0.5 = 2 and 1 / 0.25 = 4;      1 - 0.1 x 2 / 2 = 0.9
    Gradient 0 at lr 0.01:  m = 0.5, v = 0.75; unbiased 0.5 / 0.75 and 0.75 / 0.4375; 0.9 - 0.01 x (2/3) / sqrt(12/7)
    """
    weight = nn.Linear(1, 1, bias=False)
    nn.init.ones_(weight.weight)
    optimizer = build_optimizer(weight, OptimizerConfig(beta1=0.5, beta2=0.75, weight_decay=0, eps=1e-30))
    take_step(weight, optimizer, [torch.tensor([[2.0]])], lr=0.1)
    assert weight.weight.item() == pytest.approx(0.9, rel=1e-6)
    assert weight.weight.grad is None
    take_step(weight, optimizer, [torch.tensor([[0.0]])], lr=0.01)
    assert weight.weight.item() == pytest.approx(0.9 - 0.01 * (2 / 3) / math.sqrt(12 / 7), rel=1e-6)


SCHEDULE = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=10, decay_steps=110)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.1),
        (4, 0.5),
        (9, 1.0),
        (10, 1.0),
        (35, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),
        (60, 0.55),
        (85, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2),
        (110, 0.1),
        (111, 0.1),
        (10**6, 0.1),
    ],
    ids=lambda value: f"{value:.2f}" if isinstance(value, float) else f"after {value} steps",
)
def test_the_schedule_by_hand(step, expected):
    """10 steps up to 1, then half a cosine over 100 steps down to 0.1."""
    assert learning_rate(step, SCHEDULE, max_steps=50) == pytest.approx(expected, rel=1e-12)


def test_without_decay_steps_the_cosine_ends_with_training():
    config = OptimizerConfig(lr=1.0, min_lr=0.0, warmup_steps=0)
    assert [learning_rate(step, config, max_steps=4) for step in (0, 2, 4, 5)] == pytest.approx([1, 0.5, 0, 0])


def test_the_cosine_ends_at_a_tenth_unless_told_otherwise():
    """A rate for fine-tuning was refused, because it was below the fixed min_lr for training from scratch."""
    assert learning_rate(200, OptimizerConfig(lr=3e-5), max_steps=200) == pytest.approx(3e-6)
    assert learning_rate(200, OptimizerConfig(lr=0.0), max_steps=200) == 0


@pytest.mark.parametrize(("grad_clip", "norm"), [(1.0, 1.0), (4.0, 4.0), (10.0, 5.0), (0.0, 5.0)])
def test_the_gradient_is_clipped_as_a_whole(grad_clip, norm):
    """The gradients are 3 and 4, so their norm is 5. The first moment is a tenth of the clipped gradient."""
    pair = nn.Linear(1, 1)
    optimizer = build_optimizer(pair, OptimizerConfig(beta1=0.9))
    gradients = [torch.tensor([[3.0]]), torch.tensor([4.0])]
    assert take_step(pair, optimizer, gradients, grad_clip=grad_clip).item() == pytest.approx(5)
    moments = [optimizer.state[p]["exp_avg"].item() for p in pair.parameters()]
    assert moments == pytest.approx([0.1 * 0.6 * norm, 0.1 * 0.8 * norm], rel=1e-5)


def test_the_loss_scale_is_taken_out_before_clipping():
    pair = nn.Linear(1, 1)
    optimizer = build_optimizer(pair, OptimizerConfig(beta1=0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gradients = [torch.tensor([[3.0]]), torch.tensor([4.0])]
    assert take_step(pair, optimizer, gradients, grad_clip=1.0, scaler=scaler).item() == pytest.approx(5)
    assert optimizer.state[pair.weight]["exp_avg"].item() == pytest.approx(0.06, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["without a scaler", "with the scaler of fp16"])
@pytest.mark.parametrize("grad_clip", [0.0, 1.0], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("at_first", [True, False], ids=["at the first step", "at a later step"])
def test_a_gradient_that_is_not_finite_leaves_no_trace(model, bad, scaled, grad_clip, at_first):
    """Only one of two equal runs gets such a gradient. After the next step, both are equal bit for bit."""
    twin = copy.deepcopy(model)
    runs = []
    for net in (model, twin):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        runs.append((net, build_optimizer(net, OptimizerConfig()), scaler))

    def step(run, gradients) -> torch.Tensor:
        net, optimizer, scaler = run
        return take_step(net, optimizer, gradients, grad_clip=grad_clip, scaler=scaler)

    if not at_first:
        for run in runs:
            step(run, gradients_of(model, seed=1))
    before = [p.detach().clone() for p in model.parameters()]
    broken = gradients_of(model, seed=2)
    broken[5].view(-1)[3] = bad
    assert not step(runs[0], broken).isfinite()
    assert same(list(model.parameters()), before)
    if not at_first:
        assert same(state_of(*runs[0][:2]), state_of(*runs[1][:2]))
    assert runs[0][2].get_scale() == (512.0 if scaled else 1.0)
    for run in runs:
        step(run, gradients_of(model, seed=3))
    assert same(state_of(*runs[0][:2]), state_of(*runs[1][:2]))
    assert not same(list(model.parameters()), before)


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True], ids=["without a scaler", "with the scaler of fp16"])
def test_steps_on_a_gpu_are_those_of_torchs_fused_adamw(model, scaled, monkeypatch):
    """The gradient of step 2 is not finite. Before step 4, the state is saved and loaded."""
    launches, adamw_ = [], triton_kernels.adamw_
    monkeypatch.setattr(triton_kernels, "adamw_", lambda *args, **config: launches.append(adamw_(*args, **config)))
    nets = [model.cuda(), copy.deepcopy(model)]
    kinds = AdamW, torch.optim.AdamW
    optimizers = [build_optimizer(net, OptimizerConfig(), kind) for net, kind in zip(nets, kinds, strict=True)]
    scalers = [torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=scaled) for _ in nets]
    for seed in range(6):
        if seed == 4:
            optimizers[0] = build_optimizer(nets[0], OptimizerConfig())
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        gradients = [gradient.cuda() for gradient in gradients_of(model, seed)]
        gradients[5].view(-1)[3] = math.inf if seed == 2 else 0.0
        for net, optimizer, scaler in zip(nets, optimizers, scalers, strict=True):
            take_step(net, optimizer, gradients, grad_clip=1.0, scaler=scaler)
    assert len(launches) == 2 * 6  # one for each of two groups
    for ours, theirs in zip(*(state_of(*pair) for pair in zip(nets, optimizers, strict=True)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Return a device mesh of this process alone."""
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def test_the_kernel_steps_weights_that_are_split(model, mesh):
    """Without a GPU, the kernel runs in the interpreter. So the test calls it past the choice of device."""
    nets = [model.to(DEVICE), copy.deepcopy(model)]
    kinds = AdamW, torch.optim.AdamW
    for net in nets:
        fully_shard(net, mesh=mesh)
    optimizers = [build_optimizer(net, OptimizerConfig(), kind) for net, kind in zip(nets, kinds, strict=True)]
    tokens = torch.randint(65, (2, 8), device=DEVICE)
    optimizers[0].step = torch.no_grad()(lambda: [*map(optimizers[0]._step_of, optimizers[0].param_groups)])
    for _ in range(3):
        for net in nets:
            net(tokens, tokens).backward()
        for ours, theirs in zip(*(net.parameters() for net in nets), strict=True):
            theirs.grad.copy_(ours.grad)  # gradients of the keys' biases are rounding errors, which AdamW magnifies
        norms = [step(optimizer, UNSCALED, 0.01, 0.1) for optimizer in optimizers]
        torch.testing.assert_close(*norms)
    for ours, theirs in zip(*(state_of(*pair) for pair in zip(nets, optimizers, strict=True)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", -1e-4),
        ("lr", math.nan),
        ("lr", math.inf),
        ("min_lr", -1.0),
        ("warmup_steps", -1),
        ("decay_steps", 0),
        ("decay_steps", -5),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("beta2", math.nan),
        ("eps", 0),
        ("weight_decay", -0.1),
        ("grad_clip", -1.0),
    ],
    ids=str,
)
def test_an_impossible_setting_is_refused_by_name(key, value):
    with pytest.raises(UserError, match=f"optimizer.{key}={value}"):
        OptimizerConfig(**{key: value})


def test_a_decay_upwards_is_refused():
    with pytest.raises(UserError, match="optimizer.min_lr=0.01 is above optimizer.lr=0.001"):
        OptimizerConfig(lr=1e-3, min_lr=1e-2)


@pytest.mark.parametrize(
    ("settings", "step", "max_steps", "words"),
    [
        ({}, 0, 10, None),
        ({"warmup_steps": 10}, 0, 10, None),
        ({"warmup_steps": 40}, 0, 10, "warmup_steps=40 exceeds train.max_steps=10: the learning rate ends at 0.25 and"),
        ({"decay_steps": 3, "warmup_steps": 3}, 0, 10, "decay_steps=3 is not above optimizer.warmup_steps=3: the"),
        ({}, 5, 10, None),
        ({}, 10, 10, None),
        ({}, 10, 40, "the learning rate jumps from 0.13 at step 10 to 0.91 at step 11, because"),
        ({"decay_steps": 10}, 10, 40, None),
        ({"lr": 2.0}, 5, 10, "the learning rate jumps from 0.87 at step 5 to 1.4 at step 6"),
    ],
)
def test_schedules_that_never_peak_or_that_jump_are_told(settings, step, max_steps, words):
    """Until `step`, the run had the schedule `old` over 10 steps."""
    old = OptimizerConfig(lr=1.0, warmup_steps=2)
    new = OptimizerConfig(**({"lr": 1.0, "warmup_steps": 2} | settings))
    told = list(schedule_remarks(step, learning_rate(step - 1, old, 10), new, max_steps))
    assert len(told) == (words is not None) and all(words in sentence for sentence in told), told
