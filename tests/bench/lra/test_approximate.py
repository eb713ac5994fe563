"""Each approximate attention against its definition."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.lra.approximate.clusters import clustered_attention
from bench.lra.approximate.linear import LinearAttention
from bench.lra.approximate.linformer import Linformer
from bench.lra.approximate.local_window import LocalWindow
from bench.lra.approximate.performer import Performer, orthogonal_features
from bench.lra.approximate.reformer import Reformer, bucket_factors
from bench.lra.approximate.smyrf import Smyrf
from tests.bench.lra.definitions import assert_same, config_of, draw, softmax_attention


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_linear_attention_weighs_all_pairs_by_their_features():
    def definition(q, k, v):
        weights = torch.einsum("bthd,bshd->bhts", F.elu(q) + 1, F.elu(k) + 1)
        return torch.einsum("bhts,bshd->bthd", weights / weights.sum(3, keepdim=True), v)

    assert_same(LinearAttention(config_of(50)), definition, draw(50))


def test_linformer_is_softmax_attention_to_projected_keys_and_values():
    """If E and F are the identity, it is softmax attention. A shorter sequence takes the first columns."""
    module = Linformer(config_of(60), rank=60).double()
    for matrix in module.parameters():
        matrix.data = torch.eye(60, dtype=torch.float64)
    assert_same(module, softmax_attention, draw(60))

    module = Linformer(config_of(60), rank=7).double()
    E, F_ = (50 * matrix.detach()[:, :45] for matrix in (module.E, module.F))
    module.E.data *= 50
    module.F.data *= 50

    def definition(q, k, v):
        return softmax_attention(q, *(torch.einsum("rt,bthd->brhd", *pair) for pair in ((E, k), (F_, v))))

    assert_same(module, definition, draw(45))


def test_performers_features_are_orthogonal_normal_vectors():
    W = orthogonal_features(4 * 512 + 5, 32).double()
    for block in W.split(32):
        products = block @ block.T
        assert (products - products.diag().diag()).abs().max() < 1e-4
    assert 0.95 < W.square().mean() < 1.05 and W.mean(0).norm() < 0.25
    assert W.norm(dim=1).std() > 0.5  # the norms of normal vectors in 32 dimensions vary by 0.7


def test_performer_divides_sums_of_its_random_features():
    """Large scores would overflow without the stabiliser."""
    module = Performer(config_of(40)).double()

    def definition(q, k, v):
        q, k = (x * 32**-0.25 for x in (q, k))
        q, k = (x @ module.W.T - x.square().sum(3, keepdim=True) / 2 for x in (q, k))
        weights = (q[:, :, None] + k[:, None]).logsumexp(4).softmax(2)
        return torch.einsum("btsh,bshd->bthd", weights, v)

    q, k, v = draw(40)
    torch.testing.assert_close(module(q / 2, k / 2, v), definition(q / 2, k / 2, v), rtol=0, atol=1e-4)
    out = module.float()(*(100 * x.float() for x in (q, k, v)))
    assert out.isfinite().all() and all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_performers_error_falls_with_more_features():
    def error(features: int) -> float:
        errors = []
        for seed in range(6):
            torch.manual_seed(seed)
            q, k, v = (x.detach() / 2 for x in draw(64, batch=1))
            exact = softmax_attention(q, k, v)
            module = Performer(config_of(64), features).double()
            errors.append((module(q, k, v) - exact).norm() / exact.norm())
        return torch.stack(errors).mean().item()

    few, more, many = error(64), error(512), error(4096)
    assert more < 0.6 * few and many < 0.6 * more and many < 0.1


@pytest.mark.parametrize("length", [1, 16, 37, 64])
def test_local_attention_is_softmax_attention_in_a_window(length):
    position = torch.arange(length)
    outside = (position[:, None] - position).abs() > 16
    module = LocalWindow(config_of(length), radius=16)
    assert_same(module, lambda *inputs: softmax_attention(*inputs, outside), draw(length))


HASHED = {
    "reformer": lambda config, size, rounds: Reformer(config, size, rounds).double(),
    "smyrf": lambda config, size, rounds: Smyrf(config, size, rounds).double(),
}


def orders_of(module: Reformer | Smyrf, q: Tensor, k: Tensor) -> list[Tensor]:
    """Return the permutations of the queries and of the keys."""
    hashes = [module.buckets(q)] * 2 if isinstance(module, Reformer) else module.hashes(q, k)
    return [x.argsort(dim=-1, stable=True) for x in hashes]


def keys_of_queries(q: Tensor) -> Tensor:
    """Return Reformer's keys: the queries with the length D**0.5."""
    return q / (q.square().mean(3, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("rounds", [1, 3])
def test_one_cluster_of_smyrf_is_softmax_attention(rounds):
    assert_same(HASHED["smyrf"](config_of(50), 64, rounds), softmax_attention, draw(50))


@pytest.mark.parametrize("rounds", [1, 3])
def test_one_chunk_of_reformer_is_softmax_attention_to_the_scaled_queries_of_other_tokens(rounds):
    itself = torch.eye(50, dtype=torch.bool)

    def definition(q, k, v):
        return softmax_attention(q, keys_of_queries(q), v, itself)

    assert_same(HASHED["reformer"](config_of(50), 64, rounds), definition, draw(50))
    q, k, v = draw(1)
    torch.testing.assert_close(HASHED["reformer"](config_of(1), 64, rounds)(q, k, v), v, msg="a lone token sees itself")


@pytest.mark.parametrize("name", HASHED)
@pytest.mark.parametrize("length", [48, 53])
def test_several_clusters_are_softmax_attention_to_the_clusters_keys(name, length):
    """Each query sees the keys of its clusters of all rounds. A key in several of them counts several times."""
    module = HASHED[name](config_of(64), 16, 2)

    def definition(q, k, v):
        times = torch.zeros(2, 2, length, length, dtype=torch.float64)  # that query t meets key s
        for b, h, r in torch.cartesian_prod(*map(torch.arange, (2, 2, 2))).tolist():
            queries, keys = (order[b, h, r].split(16) for order in orders_of(module, q, k))
            for c in range(len(queries)):
                seen = torch.cat([keys[c - 1], keys[c]]) if name == "reformer" else keys[c]
                times[b, h, queries[c][:, None], seen] += 1
        assert (times == 0).any() and (times == 2).any()
        if name == "reformer":
            k = keys_of_queries(q)
            times = times.where(~torch.eye(length, dtype=torch.bool), 0)
        scores = torch.einsum("bthd,bshd->bhts", q, k) * 32**-0.5 + times.log()
        return torch.einsum("bhts,bshd->bthd", scores.softmax(3), v)

    assert_same(module, definition, draw(length))


def test_a_query_of_reformer_sees_keys_of_its_bucket_even_if_most_queries_share_a_bucket():
    """Half of the tokens have one direction. Each token sees the value of a token of the same direction."""
    module = HASHED["reformer"](config_of(256), 32, 2)
    directions = F.normalize(torch.randn(9, 32, dtype=torch.float64), dim=1)
    kind = torch.randint(1, 9, (2, 256, 2)) * torch.randint(2, (2, 256, 2))
    q = 200 * directions[kind]
    v = F.one_hot(kind, 32).double()
    assert (module(q, torch.randn_like(q), v).argmax(3) == kind).double().mean() > 0.99


@pytest.mark.parametrize("name", HASHED)
def test_hashing_finds_the_large_scores(name):
    """Queries near one of 16 directions find the keys of that direction far better than random clusters do."""
    module, is_reformer = HASHED[name](config_of(256), 32, 2), name == "reformer"
    directions = F.normalize(torch.randn(16, 32, dtype=torch.float64), dim=1)
    q, k = (12 * directions[torch.randint(16, (2, 256, 2))] + 0.3 * x.detach() for x in draw(256)[:2])
    v = torch.randn(2, 256, 2, 32, dtype=torch.float64)
    orders = [torch.rand(2, 2, 2, 256).argsort(3) for _ in "qk"]
    if is_reformer:
        k, orders = keys_of_queries(q), orders[:1] * 2
    exact = softmax_attention(q, k, v, torch.eye(256, dtype=torch.bool) if is_reformer else None)
    chance = clustered_attention(q, k, v, *orders, 32, previous=is_reformer, itself=not is_reformer)
    assert (module(q, k, v) - exact).norm() < 0.6 * (chance - exact).norm()


def test_reformers_buckets_are_the_nearest_of_random_directions():
    assert bucket_factors(1024, 64) == [32] and bucket_factors(65536, 64) == [32, 64]
    module = Reformer(config_of(65536)).double()
    q, _, _ = draw(20)
    bucket = module.buckets(q)
    assert torch.equal(module.buckets(3 * q), bucket)
    b, t, h, r = 1, 13, 1, 0
    first, second = (q[b, t, h] @ W for W in module.rotations[h, :, r].split([16, 32], 1))
    expected = [max(range(2 * len(x)), key=lambda i, x=x: torch.cat([x, -x])[i]) for x in (first, second)]
    assert bucket[b, h, r, t] == 64 * expected[0] + expected[1]
    assert module.buckets(-q)[b, h, r, t] == 64 * ((expected[0] + 16) % 32) + (expected[1] + 32) % 64


def test_smyrfs_hashes_are_projections_of_transformed_vectors():
    """F(q) and G(k) have the same norm, and their distance falls with q k."""
    module = Smyrf(config_of(20)).double()
    q, k, _ = (x.detach() for x in draw(20, heads=2))
    bound = (q.square().sum(3).amax(1) + k.square().sum(3).amax(1))[:, None, :, None]
    zero = torch.zeros_like(q[..., :1])
    transformed_q = torch.cat([q, zero, (bound - q.square().sum(3, keepdim=True)).sqrt()], 3)
    transformed_k = torch.cat([k, (bound - k.square().sum(3, keepdim=True)).sqrt(), zero], 3)
    torch.testing.assert_close((transformed_q - transformed_k).square().sum(3), 2 * bound[..., 0] - 2 * (q * k).sum(3))
    for found, x in zip(module.hashes(q, k), (transformed_q, transformed_k), strict=True):
        torch.testing.assert_close(found, torch.einsum("bthd,hdr->bhrt", x, module.a))
