import pytest
import torch

from errors import UserError
from model.attention import VARIANTS, build_attention
from model.gpt2 import GPT2, ModelConfig
from trainer.precision import PrecisionConfig, choose_compute


@pytest.fixture
def machine(monkeypatch):
    """Let torch see no GPU, an old GPU, or a GPU that computes in bf16."""

    def pretend(gpu: str | None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: gpu == "new")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"{gpu} GPU")

    return pretend


@pytest.mark.parametrize(
    ("gpu", "device", "precision", "expected"),
    [
        (None, "auto", "auto", ("cpu", torch.float32)),
        (None, "cpu", "bf16", ("cpu", torch.bfloat16)),
        ("new", "auto", "auto", ("cuda", torch.bfloat16)),
        ("new", "cuda", "fp32", ("cuda", torch.float32)),
        ("new", "cpu", "auto", ("cpu", torch.float32)),
        ("old", "auto", "auto", ("cuda", torch.float32)),
        ("old", "cuda", "fp16", ("cuda", torch.float16)),
    ],
)
def test_device_and_precision_are_chosen_for_the_machine(machine, gpu, device, precision, expected):
    machine(gpu)
    compute = choose_compute(device, PrecisionConfig(precision))
    assert (compute.device.type, compute.dtype) == expected


@pytest.mark.parametrize(
    ("gpu", "device", "precision", "sentence"),
    [
        (None, "cuda", "auto", "device=cuda finds no GPU; set device=cpu"),
        (None, "gpu", "auto", "device=gpu is unknown; choose one of auto, cpu, cuda"),
        (None, "auto", "fp16", "precision=fp16 needs a GPU; set precision=fp32 or precision=bf16"),
        ("old", "auto", "bf16", "precision=bf16 does not run on old GPU; set precision=fp16 or precision=fp32"),
    ],
)
def test_what_the_machine_cannot_do_is_refused_with_what_it_can(machine, gpu, device, precision, sentence):
    machine(gpu)
    with pytest.raises(UserError, match=sentence):
        choose_compute(device, PrecisionConfig(precision))


@pytest.mark.parametrize(
    ("capability", "hip", "runs"),
    [((8, 9), None, True), ((10, 0), None, True), ((8, 6), None, False), ((9, 4), "6.4", False)],
)
def test_fp8_needs_ada_or_hopper(machine, monkeypatch, capability, hip, runs):
    """An MI300 has capability 9.4."""
    machine("new")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    if runs:
        compute = choose_compute("auto", PrecisionConfig("fp8"))
        assert (str(compute), compute.dtype, compute.fp8) == ("new GPU, fp8", torch.bfloat16, True)
        return
    sentence = "precision=fp8 needs an NVIDIA GPU from Ada or Hopper on, not new GPU; set precision=auto"
    with pytest.raises(UserError, match=sentence):
        choose_compute("auto", PrecisionConfig("fp8"))


def test_an_unknown_precision_is_refused():
    with pytest.raises(UserError, match="precision.name=int8 is unknown; choose one of auto, bf16, fp16, fp32, fp8"):
        PrecisionConfig("int8")


@pytest.mark.parametrize(("precision", "scales"), [("fp16", True), ("bf16", False), ("fp32", False)])
def test_only_fp16_scales_the_loss(machine, precision, scales):
    machine("new")
    compute = choose_compute("cuda", PrecisionConfig(precision))
    assert compute.grad_scaler().is_enabled() == scales
    assert str(compute) == f"new GPU, {precision}"


@pytest.mark.parametrize("attention", ["naive", "sdpa", "flash2"])
def test_bf16_reaches_the_products_but_neither_loss_nor_weights_nor_gradients(attention):
    """bf16 keeps 8 bits, so that the loss is off by far more than fp32 would be, but by less than 1 %."""
    torch.manual_seed(0)
    config = ModelConfig(n_layer=2, n_head=2, n_embd=64, context_length=32, vocab_size=257)
    model = GPT2(config, build_attention(VARIANTS[attention]()))
    tokens = torch.randint(257, (4, 33))
    losses = {}
    for precision in ("fp32", "bf16"):
        with choose_compute("cpu", PrecisionConfig(precision)).autocast():
            logits, loss = model(tokens[:, :-1]), model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        assert logits.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
        assert loss.dtype == torch.float32
        losses[precision] = loss.item()
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)
    assert losses["bf16"] != pytest.approx(losses["fp32"], rel=1e-7)
