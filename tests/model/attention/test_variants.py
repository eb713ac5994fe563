"""Each variant that runs everywhere against fp64, on one matrix of dtypes, masks, lengths and head sizes."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from errors import UserError
from kernels.flash1 import definition as flash1_definition
from kernels.flash2 import definition
from model.attention import (
    BUILT_IN,
    EXACT,
    SDPA_BACKENDS,
    VARIANTS,
    AttentionConfig,
    BlockSparseConfig,
    Flash2Config,
    FusedSoftmaxConfig,
    LocalConfig,
    NaiveConfig,
    Sdpa,
    SdpaConfig,
    build_attention,
    check_attention,
)
from model.attention.exact import Exact
from model.linear import Linear
from tests.kernels.accuracy import Case, assert_as_accurate, draw, outcome

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = [Case(seq_q=n, seq_k=n, dtype=dtype) for n in (1, 63, 111) for dtype in (F32, F16, BF16)]
CASES += [Case(head_dim=d, causal=c, dtype=BF16) for d in (16, 40, 80, 96, 128, 256) for c in (True, False)]
CASES += [Case(head_dim=d, dtype=dtype) for d in (40, 80) for dtype in (F32, F16)]
CASES += [Case(heads=4, kv_heads=kv, dtype=dtype) for kv in (1, 2) for dtype in (F32, BF16)]
CASES += [Case(batch=1, seq_q=1025, seq_k=1025, dtype=dtype) for dtype in (F32, BF16)]
LENGTHS = [Case(seq_q=q, seq_k=k, causal=c, dtype=BF16) for q, k in ((63, 100), (100, 63)) for c in (True, False)]


# In 16 bits, torch's CPU kernel has up to 3.3 times the error of torch's math attention. fused_softmax follows
# Megatron-LM, which rounds S and dP to 16 bits.
FACTORS = {name: 2 for name in EXACT} | {"sdpa": 4, "fused_softmax": 3}


CHECK = {"head_dim": 64, "dtype": F32, "dropout_p": 0.0, "device": torch.device("cpu"), "context_length": 64}
SPARSE = [LocalConfig(window=70), BlockSparseConfig()]


def config_of(name: str) -> AttentionConfig:
    """Return a variant that leaves out as few pairs as possible: a window of 2048 tokens hides nothing here."""
    return VARIANTS[name](**({"window": 2048} if name == "local" else {}))


def run(config: AttentionConfig, case: Case, device: str) -> None:
    inputs = draw(case, device)
    attention = build_attention(config)
    scale = case.head_dim**-0.5
    got = outcome(lambda q, k, v: attention(q, k, v, causal=case.causal, scale=scale), *inputs)
    assert_as_accurate(case, got, inputs, FACTORS[config.name])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("device", DEVICES)
def test_error_is_within_a_small_factor_of_math_attentions(name, case, device):
    run(config_of(name), case, device)


@pytest.mark.parametrize("case", LENGTHS, ids=str)
@pytest.mark.parametrize("name", [name for name in EXACT if name != "sdpa"])
@pytest.mark.parametrize("device", DEVICES)
def test_queries_and_keys_of_different_lengths_align_at_the_end(name, case, device):
    run(config_of(name), case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", SDPA_BACKENDS)
def test_each_backend_of_sdpa_runs(backend):
    run(SdpaConfig(backend=backend), Case(seq_q=128, seq_k=128, dtype=F16), "cuda")


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("device", DEVICES)
def test_dropout_keeps_the_mean_and_follows_the_seed(name, device):
    attention = build_attention(config_of(name))
    q, k, v, _ = draw(Case(batch=4, seq_q=256, seq_k=256, heads=4, dtype=F32 if device == "cpu" else F16), device)

    def drop(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return attention(q, k, torch.ones_like(v), causal=True, scale=0.125, dropout_p=0.25)

    first = drop(1)
    torch.testing.assert_close(first.float().mean().item(), 1.0, atol=3e-3, rtol=0)
    assert first.std() > 0.01
    assert torch.equal(first, drop(1)) and not torch.equal(first, drop(2))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", BUILT_IN)
def test_documents_attend_to_themselves_alone(name, device):
    """Two sequences cut into documents, one of a single token, against each document by itself; grouped heads."""
    cuts = [0, 1, 40, 96, 120, 192]
    case = Case(batch=2, seq_q=96, seq_k=96, heads=4, kv_heads=2, head_dim=32, dtype=F32)
    attention = build_attention(config_of(name))
    inputs = draw(case, device)
    cu_seqlens = torch.tensor(cuts, dtype=torch.int32, device=device)
    got = outcome(lambda q, k, v: attention(q, k, v, causal=True, scale=0.2, cu_seqlens=cu_seqlens), *inputs)
    laid_out = [x.reshape(1, -1, *x.shape[2:]) for x in inputs]
    alone = [
        outcome(lambda q, k, v: attention(q, k, v, causal=True, scale=0.2), *(x[:, a:b] for x in laid_out))
        for a, b in itertools.pairwise(cuts)
    ]
    for whole, parts in zip(got, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(whole.reshape(1, -1, *whole.shape[2:]), torch.cat(parts, 1), atol=1e-4, rtol=1e-4)


def test_the_deterministic_switch_reaches_the_operator_and_follows_torch_unless_set(monkeypatch):
    asked = []
    backward = definition.backward_packed

    def spy(dout, qkv, out, logsumexp, dlogsumexp, deterministic, *options):
        asked.append(deterministic)
        return backward(dout, qkv, out, logsumexp, dlogsumexp, deterministic, *options)

    monkeypatch.setattr(definition, "backward_packed", spy)
    x, projection = torch.randn(1, 9, 32), Linear(32, 96)

    def step(config: AttentionConfig) -> None:
        build_attention(config).projected(x, projection, 2, 2, causal=True, scale=0.25).sum().backward()

    step(Flash2Config(deterministic=True))
    step(Flash2Config())
    torch.use_deterministic_algorithms(True)
    try:
        step(Flash2Config())
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [True, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_deterministic_gradients_are_bitwise_equal_over_20_runs(head_dim):
    inputs = draw(Case(batch=2, seq_q=1500, seq_k=1500, heads=4, kv_heads=2, head_dim=head_dim, dtype=BF16), "cuda")
    attention = build_attention(Flash2Config(deterministic=True))
    attend = lambda q, k, v: attention(q, k, v, causal=True, scale=0.1)  # noqa: E731
    first = outcome(attend, *inputs)
    for _ in range(19):
        for again, once in zip(outcome(attend, *inputs), first, strict=True):
            assert torch.equal(again, once)


def seen_by(config: AttentionConfig, length: int) -> torch.Tensor:
    """Return (length, length): which keys each query of a sparse variant sees, pair by pair."""
    i = torch.arange(length)
    seen = i[:, None] >= i
    if config.name == "local":
        return seen & (i[:, None] - i < config.window)
    pairs = {(a, b) for a in range(4) for b in range(4) if a ^ b in (0, 1, 2) or b == 0}
    return seen & torch.tensor([[(a // 128, b // 128) in pairs for b in range(length)] for a in range(length)])


@pytest.mark.parametrize("length", [40, 128, 400, 512])
def test_the_share_of_pairs_that_a_variant_keeps_is_that_of_pairs_counted_one_by_one(length):
    for config in SPARSE:
        share = seen_by(config, length).sum() / (length * (length + 1) / 2)
        assert build_attention(config).kept_share(length) == pytest.approx(share)
    assert build_attention(Flash2Config()).kept_share(length) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", SPARSE, ids=lambda config: config.name)
def test_sparse_variants_are_attention_among_the_pairs_they_keep(config, device):
    """Forward and backward with four blocks: the last is not full, and the butterfly leaves one out.

    Then the last token alone, as in sampling.
    """
    inputs = draw(Case(batch=1, seq_q=400, seq_k=400, heads=2, kv_heads=1, head_dim=16, dtype=F32), device)
    attention, seen = build_attention(config), seen_by(config, 400).to(device)

    def masked(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.25, enable_gqa=True).transpose(1, 2)

    got = outcome(lambda q, k, v: attention(q, k, v, causal=True, scale=0.25), *inputs)
    expected = outcome(masked, *(x.double() for x in inputs))
    torch.testing.assert_close(got, tuple(x.float() for x in expected), atol=2e-5, rtol=2e-4)
    q, k, v, _ = inputs
    alone = attention(q[:, -1:], k, v, causal=False, scale=0.25)
    torch.testing.assert_close(alone, got[0][:, -1:], atol=1e-6, rtol=1e-5)


def test_a_pattern_from_a_file_is_taken_as_it_is(tmp_path):
    """Also with torch.compile, which takes the lists of blocks as a constant."""
    pattern = torch.tensor([[True, False, False], [False, True, False], [True, False, True]])
    np.save(tmp_path / "mine.npy", F.pad(pattern, (0, 1, 0, 1)).numpy())
    attention = build_attention(BlockSparseConfig(pattern=str(tmp_path / "mine.npy")))
    q, k, v, dout = draw(Case(batch=1, seq_q=300, seq_k=300, heads=1, kv_heads=1, head_dim=16), "cpu")
    attend = lambda q, k, v: attention(q * 2, k, v, causal=True, scale=0.25)  # noqa: E731
    changed = k.clone()
    changed[:, 128:256] *= -1
    same = (attend(q, k, v) == attend(q, changed, v)).all(-1).flatten()
    assert same[:128].all() and not same[129:256].any() and same[256:].all()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled, q, k, v, dout), outcome(attend, q, k, v, dout))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "does not exist; give butterfly"),
        (b"no matrix", "is not a .npy file"),
        (np.ones((2, 3), bool), "does not hold a square boolean matrix"),
        (np.ones((2, 2)), "does not hold a square boolean matrix"),
        (np.ones((2, 2), bool), "has 2 blocks of 128 tokens, but 300 tokens need 3"),
        (np.tri(3, k=-1, dtype=bool), "keeps no block up to the diagonal in row 0, .*keep at least the diagonal"),
        (np.diag([True, False, True]), "keeps no block up to the diagonal in row 1"),
        (~np.tri(4, dtype=bool) | np.diag([True, True, False, True]), "keeps no block up to the diagonal in row 2"),
    ],
    ids=["missing", "garbage", "oblong", "numbers", "too_small", "first_row", "empty_row", "only_later_keys"],
)
def test_patterns_that_do_not_fit_are_refused(tmp_path, contents, message):
    path = tmp_path / "pattern.npy"
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    elif contents is not None:
        np.save(path, contents)
    config = BlockSparseConfig(pattern=str(path))
    with pytest.raises(UserError, match=message):
        check_attention(config, **CHECK | {"context_length": 300})


@pytest.mark.parametrize(
    ("name", "said"), [("local", "causal=False does not suit"), ("block_sparse", "as many queries as keys")]
)
def test_sparse_variants_refuse_what_they_cannot_do(name, said):
    q, k, v, _ = draw(Case(seq_q=63, seq_k=100), "cpu")
    with pytest.raises(ValueError, match=f"{said}.*use attention=flash2"):
        build_attention(config_of(name))(q, k, v, causal=False, scale=0.125)


@pytest.mark.parametrize("name", BUILT_IN)
def test_documents_of_more_keys_than_queries_are_refused(name):
    """Some variants once ignored the documents of a single query, as in sampling."""
    q, k, v, _ = draw(Case(seq_q=1, seq_k=300), "cpu")
    cu_seqlens = torch.tensor([0, 100, 600], dtype=torch.int32)
    with pytest.raises(ValueError, match="queries and keys of one length, not 1 and 300"):
        build_attention(config_of(name))(q, k, v, causal=False, scale=0.125, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("name", [name for name in EXACT if name != "sdpa"])
def test_no_second_gradient_is_given_rather_than_a_wrong_one(name):
    q, k, v, _ = (x.requires_grad_() for x in draw(Case(dtype=F32), "cpu"))
    out = build_attention(VARIANTS[name]())(q, k, v, causal=True, scale=0.125)
    with pytest.raises(RuntimeError, match="has no second derivative; use attention=sdpa attention.backend=math"):
        torch.autograd.grad(out.square().sum(), q, create_graph=True)


@pytest.mark.parametrize("name", [name for name in EXACT if name != "sdpa"])
def test_autocast_changes_nothing(name):
    """Autocast is on in training. On a CPU, it once rounded naive's scores to 16 bits."""
    for dtype in (F32, BF16):
        inputs = draw(Case(dtype=dtype), "cpu")
        attend = partial(build_attention(VARIANTS[name]()), causal=True, scale=0.125)
        with torch.autocast("cpu", BF16):
            found = attend(*inputs[:3])
        assert torch.equal(found, attend(*inputs[:3]))


def test_sdpa_refuses_a_causal_mask_it_would_misalign():
    q, k, v, _ = draw(Case(seq_q=63, seq_k=100), "cpu")
    with pytest.raises(ValueError, match="attention=flash2 or naive"):
        Sdpa()(q, k, v, causal=True, scale=0.125)


def test_a_variant_that_cannot_run_is_refused_before_training():
    check_attention(Flash2Config(), **CHECK)
    with pytest.raises(UserError, match="attention.backend=cudnn cannot run on cpu"):
        check_attention(SdpaConfig(backend="cudnn"), **CHECK)
    with pytest.raises(UserError, match="head_dim=512 does not suit flash2, which takes 16 to 256"):
        check_attention(Flash2Config(), **CHECK | {"head_dim": 512})
    check_attention(FusedSoftmaxConfig(), **CHECK | {"context_length": 16384})
    with pytest.raises(
        UserError, match="attention=fused_softmax .* at most 16384 scores .* 16385 tokens; choose attention=flash2"
    ):
        check_attention(FusedSoftmaxConfig(), **CHECK | {"context_length": 16385})


@pytest.mark.parametrize("variant", ["flash1", "flash2", "local", "block_sparse"])
def test_a_gpu_older_than_sm_80_is_refused_before_training(variant, monkeypatch):
    """On this CPU, the launchers of the kernels run in place of the definitions, and find a T4."""
    pytest.importorskip("triton")
    from kernels.flash1 import launch
    from kernels.flash2 import dispatch

    dispatch._plan_forward.cache_clear()
    for kernels, launcher in ((flash1_definition, launch), (definition, dispatch)):
        monkeypatch.setattr(kernels, "forward", launcher.forward)
        monkeypatch.setattr(launcher, "arch_of", lambda device: "sm_75")
    remedy = "the kernels need sm_80 or newer, and this GPU is sm_75; use attention=sdpa or attention=naive"
    with pytest.raises(UserError, match=f"attention={variant} cannot run .*{remedy}"):
        check_attention(VARIANTS[variant](), **CHECK | {"dtype": F16})


def test_running_out_of_memory_is_not_reported_as_a_reason_to_choose_another_variant(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(NaiveConfig, "build", lambda config: Exact(full))
    with pytest.raises(torch.OutOfMemoryError):
        check_attention(NaiveConfig(), **CHECK)
