"""The table `bert`: the model against Hugging Face's, padded and unpadded batches, the search and the Markdown."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from bench.attention.accuracy import WrongResult
from bench.common.timing import Cpu
from bench.paper.bert_model import Bert, BertConfig, draw_batch, draw_lengths, masked_tokens, step_flops
from bench.paper.settings import PaperSettings
from bench.paper.tables import bert
from model.attention import VARIANTS, build_attention

TINY = BertConfig(n_layer=2, n_head=2, n_embd=32, context_length=24, vocab_size=200)
LENGTHS = [24, 5, 17, 1]


@pytest.fixture
def in_fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def model_with(attention, seed=0):
    torch.manual_seed(seed)
    model = Bert(TINY, build_attention(VARIANTS[attention]()))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def batch_for(attention, padded):
    return draw_batch(TINY, LENGTHS, "cpu", padded=padded, pads=attention not in bert.PACKS)


def test_the_lengths_have_the_quantiles_and_the_mean_of_the_papers_histogram():
    """The histogram's mean is 255.8, and 23.4 % of its sequences have 512 tokens."""
    lengths = draw_lengths(1000, 512)
    assert sum(lengths) / 1000 == pytest.approx(255.8, abs=1)
    assert lengths.count(512) == pytest.approx(234, abs=1) and sorted(lengths)[500] == pytest.approx(204, abs=1)
    assert lengths != sorted(lengths) and lengths == draw_lengths(1000, 512)
    assert sum(draw_lengths(56, 512)) / 56 == pytest.approx(255.8, abs=5)
    assert min(draw_lengths(9, 16)) >= 1 and max(draw_lengths(9, 16)) == 16


def test_fifteen_per_cent_of_the_real_tokens_are_masked():
    assert [masked_tokens(n) for n in (1, 6, 7, 20, 512)] == [1, 1, 1, 3, 76]
    padded, packed = (draw_batch(TINY, LENGTHS, "cpu", padded=padded, pads=False) for padded in (True, False))
    rows, columns = padded.masked // 24, padded.masked % 24
    assert torch.bincount(rows).tolist() == [masked_tokens(n) for n in LENGTHS] == [3, 1, 2, 1]
    assert all(column < LENGTHS[row] for row, column in zip(rows.tolist(), columns.tolist(), strict=True))
    assert set(padded.tokens.flatten()[padded.masked].tolist()) == {103}
    real = torch.cat([row[:n] for row, n in zip(padded.tokens, LENGTHS, strict=True)])
    assert torch.equal(packed.tokens, real[None]) and torch.equal(packed.targets, padded.targets)
    assert torch.equal(packed.tokens.flatten()[packed.masked], padded.tokens.flatten()[padded.masked])
    assert packed.positions.flatten().tolist() == [n for length in LENGTHS for n in range(length)]
    assert packed.cu_seqlens.tolist() == [0, 24, 29, 46, 47]


@pytest.mark.parametrize("attention", bert.ATTENTIONS)
def test_unpadded_equals_padded(attention, in_fp64):
    """On real tokens, for the states, the loss and the gradients; and all attentions agree."""
    model, reference = model_with(attention), model_with("naive")
    expected = reference(batch_for("naive", padded=True))
    expected.backward()
    real = torch.arange(24) < torch.tensor(LENGTHS)[:, None]
    states = reference.hidden(batch_for("naive", padded=True))[real]
    for padded in (True, False):
        batch = batch_for(attention, padded)
        hidden = model.hidden(batch)
        torch.testing.assert_close(hidden[real] if padded else hidden[0], states)
        model.zero_grad()
        loss = model(batch)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_model_is_hugging_faces_bert():
    """With zeros for what this model leaves out: segments and the last layer's bias."""
    from transformers import BertConfig as Config
    from transformers import BertForMaskedLM

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 128}
    sizes |= {"max_position_embeddings": 24, "vocab_size": 256, "hidden_act": "gelu_new"}
    theirs, ours = BertForMaskedLM(Config(**sizes)).eval(), model_with("sdpa")
    with torch.no_grad():
        embeddings, head = theirs.bert.embeddings, theirs.cls.predictions
        embeddings.token_type_embeddings.weight.zero_()
        embeddings.word_embeddings.weight.copy_(ours.wte.weight)
        embeddings.position_embeddings.weight.copy_(ours.wpe.weight)
        pairs = [(embeddings.LayerNorm, ours.ln_0), (head.transform.dense, ours.head)]
        pairs += [(head.transform.LayerNorm, ours.ln_head)]
        for theirs_block, block in zip(theirs.bert.encoder.layer, ours.h, strict=True):
            attention, names = theirs_block.attention, ("query", "key", "value")
            parts = zip(names, block.c_attn.weight.chunk(3), block.c_attn.bias.chunk(3), strict=True)
            for name, weight, bias in parts:
                getattr(attention.self, name).weight.copy_(weight)
                getattr(attention.self, name).bias.copy_(bias)
            pairs += [(attention.output.dense, block.c_proj), (attention.output.LayerNorm, block.ln_1)]
            pairs += [(theirs_block.intermediate.dense, block.c_fc), (theirs_block.output.dense, block.c_out)]
            pairs += [(theirs_block.output.LayerNorm, block.ln_2)]
        for copy, original in pairs:
            copy.load_state_dict(original.state_dict())
        batch = batch_for("sdpa", padded=True)
        real = torch.arange(24) < torch.tensor(LENGTHS)[:, None]
        logits = theirs(input_ids=batch.tokens, attention_mask=real.long()).logits
        found = ours.predicted(ours.hidden(batch)) @ ours.wte.weight.T
    torch.testing.assert_close(found[real], logits[real], rtol=1e-4, atol=1e-4)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1)[batch.masked][:, : TINY.vocab_size], batch.targets)
    torch.testing.assert_close(ours(batch), loss)


def test_the_blocks_are_compiled_once_for_all_of_them():
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    model, batch = model_with("flash2"), batch_for("flash2", padded=True)
    expected = model(batch)
    bert.compile_blocks(model, graphs)
    torch.testing.assert_close(model(batch), expected)
    assert graphs.frame_count == 1 and len(model.h) == 2


def test_flops_count_real_tokens_only():
    """Per layer and token of a sequence of n: 12 width^2 weights and 2 n width of attention, 6 FLOPs each."""
    blocks = sum(n * 2 * (6 * 12 * 32**2 + 12 * n * 32) for n in (24, 5))
    assert step_flops(TINY, [24, 5]) == blocks + 6 * (3 + 1) * (32**2 + 200 * 32)


@pytest.mark.parametrize(
    ("times", "statuses", "best"),
    [
        ([10.0, 18.0, 30.0], ["ok"] * 3, 112),
        ([10.0, 25.0, 30.0], ["ok"] * 2, 28),
        ([10.0, 18.0, torch.OutOfMemoryError("full")], ["ok", "ok", "oom"], 56),
        ([torch.OutOfMemoryError("full")], ["oom"], None),
    ],
)
def test_the_search_ends_when_the_speed_falls_or_memory_is_out(times, statuses, best, monkeypatch):
    monkeypatch.setitem(bert.SIZES, "smoke", (TINY, bert.SIZES["full"][1]))
    outcomes = iter(times)

    def timed(step, gpu, rounds):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return {"ms": outcome, "status": "ok"}

    monkeypatch.setattr(bert, "timed", timed)
    cell = {"attention": "sdpa", "padded": True}
    rows = list(bert.measure(cell, Cpu(), PaperSettings(size="smoke")))
    assert [row["status"] for row in rows] == statuses
    assert [row["batch_size"] for row in rows if row["best"]] == [best] * (best is not None)
    assert rows[0]["tokens"] == sum(draw_lengths(28, 24))


@pytest.mark.parametrize("name", bert.ATTENTIONS)
def test_an_attention_that_ignores_where_documents_end_fails_the_check(name, monkeypatch):
    bert.check_documents(name, TINY, Cpu())
    attend = build_attention(VARIANTS[name]())
    ignoring = lambda q, k, v, cu_seqlens, **options: attend(q, k, v, **options)  # noqa: E731
    monkeypatch.setattr(bert, "build_attention", lambda config: ignoring)
    with pytest.raises(WrongResult, match="out is off by"):
        bert.check_documents(name, TINY, Cpu())


def row(attention, padded, speed=None, batch=56, best=True):
    cell = {"attention": attention, "padded": padded, "batch_size": batch, "context_length": 512, "tokens": batch * 256}
    if speed is None:
        return cell | {"status": "oom", "best": False}
    return cell | {"sequences_per_second": speed, "tflops": 123.6, "peak_gib": 40.04, "best": best, "status": "ok"}


def test_the_markdown_has_the_fastest_batch_of_each_row():
    """Ours is rounded down and the others up: 1799.9 / 500 = 3.5998, 750.01 / 500 = 1.50002."""
    made = bert.markdown(
        [
            row("naive", True, 500.0),
            row("naive", True, batch=112),
            row("sdpa", True, 600.0, batch=28, best=False),
            row("sdpa", True, 750.01),
            row("flash2", False, 1799.9, batch=112),
            row("naive", False),
        ]
    )
    lines = [line for line in made.splitlines() if line.startswith("| `")]
    assert lines == [
        "| `naive` | padded | 56 | 500 | 124 | 40.0 | 1.00 |",
        "| `sdpa` | padded | 56 | 751 | 124 | 40.0 | 1.51 |",
        "| `naive` | unpadded | 56 | OOM | OOM | OOM | - |",
        "| `flash2` | unpadded | 112 | 1,799 | 123 | 40.1 | 3.59 |",
    ]
    assert "fastest of 56, 112, 28 sequences" in made and "50% of the padded sequences' tokens are real" in made
    assert "20.0 minutes" in made and "17.4" in made and "72.0 %" in made
