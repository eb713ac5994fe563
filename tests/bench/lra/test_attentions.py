"""All attentions of bench.lra: dtypes, gradients, compilation, CUDA graphs, and messages."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.lra.attentions import ATTENTIONS, EXACT, UNPADDED, build_attention
from bench.lra.encoder import Classifier, packing_of
from errors import UserError
from tests.bench.lra.definitions import assert_same, config_of, draw, softmax_attention

APPROXIMATE = "linformer", "linear", "performer", "local_window", "reformer", "smyrf"


def batch_of(length: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens (2, length), lengths and labels."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([length, 70], dtype=torch.int32)
    tokens = torch.randint(1, 16, (2, length), generator=generator) * (torch.arange(length) < lengths[:, None])
    return tokens.to(device), lengths.to(device), torch.tensor([1, 3], device=device)


@pytest.mark.parametrize("name", [*EXACT, UNPADDED])
def test_exact_attentions_see_all_pairs(name):
    assert_same(build_attention(name, config_of(40)), softmax_attention, draw(40))


def test_block_sparse_attention_sees_the_blocks_of_its_pattern():
    n = torch.arange(520) // 128
    difference = n[:, None] ^ n
    masked = ((difference & (difference - 1)) != 0) & (n > 0)
    attend = build_attention("block_sparse", config_of(520))
    assert masked.any()
    assert_same(attend, lambda *inputs: softmax_attention(*inputs, masked), draw(520, batch=1, heads=1))


@pytest.mark.parametrize("name", APPROXIMATE)
def test_bf16_is_close_to_fp64(name):
    torch.manual_seed(0)
    attend = build_attention(name, config_of(300))
    q, k, v = (x.detach().bfloat16() for x in draw(300))
    out = attend(q, k, v)
    assert out.dtype == torch.bfloat16 and out.shape == q.shape
    exact = attend.double()(q.double(), k.double(), v.double())
    assert (out - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("name", APPROXIMATE)
def test_gradients_in_bf16_are_close_to_fp64(name):
    """Values have a mean and weights are nearly equal, as in a new model. Linear attention's dq was off by 280 %."""
    torch.manual_seed(0)
    attend = build_attention(name, config_of(300))
    q, k, v = (x.detach().bfloat16() for x in draw(300))
    inputs = [x.requires_grad_() for x in (q / 10, k / 10, 1 + v / 3)]
    dout = torch.randn(q.shape).bfloat16()
    rounded = torch.autograd.grad(attend(*inputs), inputs, dout, materialize_grads=True)
    attend, inputs = attend.double(), [x.detach().double().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(attend(*inputs), inputs, dout.double(), materialize_grads=True)
    for ours, theirs in zip(rounded, exact, strict=True):
        assert (ours - theirs).norm() <= 0.05 * theirs.norm()  # Reformer ignores k


@pytest.mark.parametrize("name", ["naive", UNPADDED, *APPROXIMATE])
def test_each_weight_gets_a_gradient_under_autocast(name):
    torch.manual_seed(0)
    model = Classifier(config_of(150, n_layer=1), name)
    tokens, lengths, labels = batch_of(150)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens, lengths)
    assert logits.dtype == torch.float32
    F.cross_entropy(logits, labels).backward()
    for key, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all() and weight.grad.any(), key


@pytest.mark.parametrize("name", [UNPADDED, *APPROXIMATE])
def test_a_step_never_reads_a_value_from_the_device(name):
    """Fake tensors have shapes but no values, so a step that needs a value raises here."""
    packing = packing_of(batch_of(300)[1], 300)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = Classifier(config_of(300), name)
        tokens, lengths, labels = (mode.from_tensor(x.to("cpu")) for x in batch_of(300))
        logits = model(tokens, lengths, packing)
        F.cross_entropy(logits, labels).backward()
        assert logits.shape == (2, 4) and all(weight.grad is not None for weight in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTIONS)
def test_torch_compile_traces_a_step_without_graph_breaks(name):
    torch.compiler.reset()  # all classifiers have the same code, and torch compiles a function 8 times at most
    torch.manual_seed(0)
    model = Classifier(config_of(300), name)
    tokens, lengths, _ = batch_of(300)
    packing = packing_of(lengths, 300)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    gradients = []
    for run in model, compiled:
        logits = run(tokens, lengths, packing)
        gradients.append(torch.autograd.grad(logits.square().sum(), list(model.parameters())))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_cuda_graph_replays_a_step(name):
    """A captured step reads new tokens and gives the gradients of an eager step.

    The gradient of an embedding takes other kernels above 3072 tokens, so the batch has 4096.
    """
    torch.manual_seed(0)
    model = Classifier(config_of(2048), name).cuda()
    tokens, lengths, labels = batch_of(2048, "cuda")
    packing = packing_of(lengths, 2048)
    weights = list(model.parameters())

    def step() -> tuple[torch.Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(tokens, lengths, packing), labels)
        return torch.autograd.grad(loss, weights)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    graph.replay()
    before = [gradient.clone() for gradient in captured]
    tokens.copy_(tokens.flip(1) % 15 + 1)
    graph.replay()
    for (key, _), found, expected in zip(model.named_parameters(), captured, step(), strict=True):
        assert (found - expected).norm() <= 0.02 * expected.norm(), key
    assert any((a - b).norm() > 0.1 * b.norm() for a, b in zip(before, captured, strict=True))


def test_what_cannot_be_built_is_refused():
    with pytest.raises(UserError, match="attention=flash9 is unknown; choose one of naive, .*, smyrf"):
        build_attention("flash9", config_of(64))
    with pytest.raises(UserError, match="fused_softmax holds a row of at most 16384 scores"):
        Classifier(config_of(65536), "fused_softmax")
