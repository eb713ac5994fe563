"""The training steps of the table `lra`: their inputs, the check of exact attentions, and CUDA graphs."""

import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.attention.accuracy import WrongResult
from bench.lra.attentions import EXACT, UNPADDED, build_attention
from bench.lra.encoder import Classifier
from bench.lra.tasks import TASKS
from bench.lra.training import shape_of
from bench.paper import classifier_steps
from bench.paper.classifier_steps import build_step, captured, check_exact, draw_batch, lengths_of, step_row
from tests.bench.stopwatch import Stopwatch

TASK = replace(TASKS["listops"], context_length=32, batch_size=2)


def test_a_pair_is_two_documents_of_full_length_without_padding():
    task = replace(TASKS["retrieval"], context_length=30)
    tokens, labels = draw_batch(task, 3)
    assert tokens.shape == (6, 32) and labels.shape == (3,)
    assert tokens.min() >= 1 and tokens.max() < task.vocab_size


def test_only_lists_have_padding_and_short_expressions_are_more_frequent_than_long_ones():
    lengths = lengths_of(TASKS["listops"], 4_000)
    assert lengths.min() >= 501 and lengths.max() <= 1999 and lengths.dtype == torch.int32
    assert 950 < lengths.float().mean() < 1100  # uniform lengths would have a mean of 1,250
    assert lengths_of(TASK, 100).min() >= 1 and lengths_of(TASK, 100).max() == 32
    assert lengths_of(TASKS["text"], 3).tolist() == [4096] * 3


@pytest.mark.parametrize("task", [TASK, replace(TASKS["retrieval"], context_length=32)], ids=["one", "pairs"])
def test_a_step_minimizes_the_cross_entropy_with_adamw_and_leaves_no_gradients(task, monkeypatch):
    """A hand-written step of the same weights gives the same weights."""
    built = []
    monkeypatch.setattr(classifier_steps, "Classifier", lambda *args: built.append(Classifier(*args)) or built[-1])
    step = build_step(task, 2, "linformer", None, "cpu")
    (model,) = built
    copy = Classifier(shape_of(task), "linformer")
    copy.load_state_dict(model.state_dict())
    step()
    tokens, labels = draw_batch(task, 2)
    optimizer = torch.optim.AdamW(copy.parameters(), task.learning_rate)
    with torch.autocast("cpu", torch.bfloat16):
        logits = copy(tokens)
    torch.nn.functional.cross_entropy(logits, labels).backward()
    optimizer.step()
    for (name, mine), theirs in zip(model.named_parameters(), copy.parameters(), strict=True):
        assert mine.grad is None, name
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", [*EXACT, UNPADDED])
def test_exact_attentions_pass_the_check(name):
    check_exact(name, shape_of(TASK), 2, "cpu")


def test_a_packed_attention_that_ignores_where_sequences_end_fails_the_check(monkeypatch):
    def careless(name, config):
        attend = build_attention(name, config)
        return lambda q, k, v, cu_seqlens: attend(q, k, v)

    monkeypatch.setattr(classifier_steps, "build_attention", careless)
    with pytest.raises(WrongResult, match="out is off by"):
        check_exact(UNPADDED, shape_of(TASK), 2, "cpu")


def test_an_attention_that_is_too_short_for_the_task_is_unsupported_and_the_others_go_on():
    rows = [step_row("fused_softmax", 1), step_row("linear", 1)]
    long = replace(TASK, context_length=16385)
    assert classifier_steps.warm_step(rows[0], long, "eager", Stopwatch()) is None
    assert rows[0]["status"] == "unsupported" and "at most 16384 scores" in rows[0]["message"]
    classifier_steps.time_steps(rows[1:], TASK, "eager", Stopwatch(), 1)
    assert (rows[1]["status"], rows[1]["ms"], rows[1]["graph"]) == ("ok", 2.0, None)


class FakeGraph:
    replays = 0

    def replay(self):
        FakeGraph.replays += 1


def capturing(monkeypatch, error=None):
    """Let a capture run its body, or end with an error."""

    @contextmanager
    def graph(_, pool):
        yield
        if error:
            raise error

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)


def test_a_captured_step_is_replayed(monkeypatch):
    capturing(monkeypatch)
    monkeypatch.setattr(FakeGraph, "replays", 0)
    row = step_row("naive", 2)
    captured(lambda: None, row, (0, 1))()
    assert FakeGraph.replays == 1 and row["graph"] is True


def test_a_captured_step_keeps_the_tensors_that_its_graph_reads(monkeypatch):
    capturing(monkeypatch)
    weight = torch.ones(1)
    alive = weakref.ref(weight)
    replay = captured(partial(torch.neg, weight), step_row("naive", 2), (0, 1))
    del weight
    replay()
    assert alive() is not None


def test_a_step_that_cannot_be_captured_is_timed_without_a_graph_and_its_row_says_so(monkeypatch):
    capturing(monkeypatch, RuntimeError("operation not permitted when stream is capturing\nmore"))
    row = step_row("naive", 2)
    assert captured(lambda: "run", row, (0, 1))() == "run"
    assert (row["graph"], row["message"]) == (False, "operation not permitted when stream is capturing")


def test_a_failed_capture_gives_its_memory_back_before_the_step_is_timed(monkeypatch):
    log, clock = [], Stopwatch()
    clock.device = "cuda"
    monkeypatch.setattr(classifier_steps, "warm_step", lambda row, *rest: row.update)
    monkeypatch.setattr(classifier_steps, "captured", lambda step, row, pool: step(graph=False) or step)
    monkeypatch.setattr(classifier_steps, "take_turns", lambda *given: log.append("time"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(clock, "release", lambda: log.append("release"), raising=False)
    classifier_steps.time_steps([step_row("naive", 2)], TASK, "eager", clock, 1)
    assert log == ["release", "release", "time"]  # after the warm-up and after the capture


def test_a_step_whose_graph_does_not_fit_is_timed_without_a_graph(monkeypatch):
    capturing(monkeypatch, RuntimeError("CUDA error: out of memory"))
    row = step_row("naive", 2)
    assert captured(lambda: "run", row, (0, 1))() == "run"
    assert (row["graph"], row["message"]) == (False, "out of memory")


def test_an_exact_attention_that_is_wrong_is_not_timed_and_the_others_go_on(monkeypatch):
    def broken(name, config):
        attend = build_attention(name, config)
        return (lambda q, k, v: attend(q, k, v) * 1.1) if name == "flash1" else attend

    monkeypatch.setattr(classifier_steps, "build_attention", broken)
    wrong, right = rows = [step_row("flash1", 2), step_row("flash2", 2)]
    classifier_steps.time_steps(rows, TASK, "eager", Stopwatch(), 1)
    assert (wrong["status"], wrong["ms"]) == ("failed", None) and "out is off by 1.0e-01" in wrong["message"]
    assert (right["status"], right["ms"]) == ("ok", 2.0)


def test_all_steps_are_warm_before_the_first_capture_and_share_one_pool(monkeypatch):
    """So the memory of eager steps is free again when the graphs take theirs."""
    log = []

    def warm_step(row, *rest):
        log.append(("warm", row["attention"]))
        return lambda: None

    def capture(step, row, pool):
        log.append(("capture", row["attention"], pool))
        return step

    monkeypatch.setattr(classifier_steps, "warm_step", warm_step)
    monkeypatch.setattr(classifier_steps, "captured", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: len(log))
    clock = Stopwatch()
    clock.device = "cuda"
    rows = [step_row("naive", 2), step_row("flash2", 2)]
    classifier_steps.time_steps(rows, TASK, "eager", clock, 1)
    assert log == [("warm", "naive"), ("warm", "flash2"), ("capture", "naive", 2), ("capture", "flash2", 2)]
    assert [row["status"] for row in rows] == ["ok", "ok"]
