"""The scales of FP8 training: they follow the peaks of the tensors, and they are part of a run's state."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.linear import FIRST_PEAKS, Linear
from trainer.distributed.world import World
from trainer.scales import FORGET, FORMATS, HEADROOM, SMALLEST_PEAK, ScaleUpdates, largest_of

ROLES = list(FORMATS)


def layers(count: int = 1, largest_weight: float = 0.5) -> nn.ModuleList:
    model = nn.ModuleList(Linear(16, 16, fp8=True) for _ in range(count))
    for layer in model:
        nn.init.constant_(layer.weight, largest_weight)
    return model


def observe(layer: Linear, **largest: float) -> None:
    """Write the statistics of a tensor, as kernels do."""
    for role, number in largest.items():
        getattr(layer.scales, f"{role}_statistics")[0] = number


def scales_of(model: nn.ModuleList) -> list[list[float]]:
    return [[getattr(layer.scales, f"{role}_scale").item() for role in ROLES] for layer in model]


def wanted(peak: float, role: str) -> float:
    """Return the smallest power of two that puts twice the peak inside the format's range."""
    return 2.0 ** math.ceil(math.log2(HEADROOM * peak / torch.finfo(FORMATS[role]).max))


def test_the_first_scales_suit_the_weights_and_usual_activations_and_gradients():
    model = layers(2)
    nn.init.constant_(model[1].weight, -8.0)
    ScaleUpdates(model)
    peaks = [FIRST_PEAKS | {"weight": weight} for weight in (0.5, 8.0)]
    assert scales_of(model) == [[wanted(of_layer[role], role) for role in ROLES] for of_layer in peaks]
    assert all(math.frexp(scale)[0] == 0.5 for layer in scales_of(model) for scale in layer), "powers of two are exact"


def test_scales_grow_at_once_and_shrink_by_a_sixteenth_a_step():
    model = layers()
    updates, (layer,) = ScaleUpdates(model), model
    peak = 1000.0
    observe(layer, input=peak, gradient=1e-6)
    updates.update()
    scale = layer.scales.input_scale.item()
    assert layer.scales.gradient_scale == wanted(1e-6, "gradient"), "the first step's peak replaces the guess"
    assert scale == wanted(peak, "input") and HEADROOM * peak / scale <= 448 < 2 * HEADROOM * peak / scale
    assert not layer.scales.input_statistics.any(), "the next step begins with empty statistics"
    for _ in range(40):
        peak = max(FORGET * peak, 100.0)
        observe(layer, input=100.0)
        updates.update()
        assert updates.peaks[0].item() == pytest.approx(peak) and layer.scales.input_scale == wanted(peak, "input")
    assert layer.scales.input_scale == wanted(100.0, "input") < scale


@pytest.mark.parametrize("number", [math.nan, math.inf, 0.0], ids=str)
def test_a_step_that_is_not_finite_and_a_tensor_of_zeros_leave_their_scale(number):
    model = layers(2)
    updates, before = ScaleUpdates(model), scales_of(model)
    observe(model[0], gradient=number)
    observe(model[1], gradient=1.0)
    updates.update()
    after = scales_of(model)
    assert after[0] == before[0] and after[1][2] == wanted(1.0, "gradient") != before[1][2]


@pytest.mark.parametrize("peak", [2.0**-149, 2.0**-60, 3.4e38])
def test_no_scale_leaves_the_range_of_fp32(peak):
    """The reciprocals are normal numbers, and so are the products of scales of small tensors."""
    model = layers(largest_weight=0.0)
    updates, (layer,) = ScaleUpdates(model), model
    updates.peaks.zero_()
    observe(layer, **dict.fromkeys(ROLES, peak))
    updates.update()
    scales = torch.tensor(scales_of(model)[0])
    assert scales.tolist() == [wanted(max(SMALLEST_PEAK, peak), role) for role in ROLES]
    smallest = torch.finfo(torch.float32).tiny
    assert (1 / scales >= smallest).all() and (peak > 1 or (scales.min() * scales >= smallest).all())


def test_a_process_without_rows_of_a_weight_has_no_say_in_its_scale():
    assert largest_of(torch.empty(0, 16)) == 0 and largest_of(torch.tensor([[1.0, -3.0]])) == 3


def test_metrics_are_the_last_steps_largest_numbers_of_all_layers():
    model = layers(3)
    updates = ScaleUpdates(model)
    for number, layer in enumerate(model):
        observe(layer, input=number, weight=5 - number, gradient=0.25)
        layer.scales.gradient_statistics[1:] = torch.tensor([0.08 * number, 4.0])
    updates.update()
    found = updates.metrics()
    assert found == {
        "fp8/amax_input": 2.0,
        "fp8/amax_weight": 5.0,
        "fp8/amax_gradient": 0.25,
        "fp8/underflow_input": 0.0,
        "fp8/underflow_weight": 0.0,
        "fp8/underflow_gradient": pytest.approx(0.04),
    }
    assert ScaleUpdates(nn.Linear(16, 16)).metrics() == {}


def test_the_state_restores_the_scales_and_a_state_without_them_begins_with_the_loaded_weights():
    model, other = layers(2), layers(2)
    updates, others = ScaleUpdates(model), ScaleUpdates(other)
    for steps in range(3):
        observe(model[1], input=3.0**steps, gradient=1e-7)
        updates.update()
    others.load_state_dict(updates.state_dict())
    assert scales_of(other) == scales_of(model) and torch.equal(others.peaks, updates.peaks)
    for layer in other:
        nn.init.constant_(layer.weight, 3.0)  # the weights of a run without FP8
    others.load_state_dict(ScaleUpdates(nn.Linear(16, 16)).state_dict())
    assert scales_of(other) == [[wanted((FIRST_PEAKS | {"weight": 3.0})[role], role) for role in ROLES]] * 2


def test_all_processes_take_the_largest_numbers_of_all(monkeypatch):
    """Two processes take turns: each sees the maximum with the numbers of the other."""
    models = layers(), layers(largest_weight=2.0)
    other: list[Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, op: other and x.copy_(torch.maximum(x, other.pop())))
    found = []
    for model, peer in (models, models[::-1]):
        other.append(peer[0].weight.detach().amax()[None])
        updates = ScaleUpdates(model, World(size=2, parallel="ddp"))
        observe(model[0], input=1.0 if model is models[0] else 100.0)
        other.append(torch.tensor([[100.0 if model is models[0] else 1.0], [0.0], [0.0]]))
        updates.update()
        found.append(scales_of(model))
        assert updates.metrics()["fp8/amax_input"] == 100.0
    assert found[0] == found[1] == [[wanted(100.0, "input"), wanted(2.0, "weight"), found[0][0][2]]]
