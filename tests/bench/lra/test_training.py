"""Training on a tiny task whose rule is known."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.lra import training
from bench.lra.datasets import Examples, first_of
from bench.lra.tasks import TASKS, Task
from bench.lra.training import TrainingSettings, rate_share, train_and_evaluate
from errors import UserError
from trainer.precision import PrecisionConfig, choose_compute

SIZES = {"vocab_size": 8, "classes": 2, "context_length": 32, "batch_size": 32}
EXAMPLES = {"train": 512, "val": 0, "test": 250}
TINY = Task("tiny", **SIZES, steps=100, warmup_steps=20, learning_rate=3e-3, examples=EXAMPLES)
CPU = choose_compute("cpu", PrecisionConfig("auto"))


def examples_of(count: int, seed: int) -> Examples:
    """Return sequences whose label is 1 if token 2 is more frequent than token 3, ignoring the padding."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(9, 32, count, endpoint=True).astype(np.int32)
    tokens = rng.integers(1, 8, (count, 32)).astype(np.uint16)
    tokens[np.arange(32) >= lengths[:, None]] = 0
    difference = (tokens == 2).sum(axis=1) - (tokens == 3).sum(axis=1)
    kept = difference != 0
    return Examples(tokens[kept], lengths[kept], (difference > 0)[kept].astype(np.int64))


TRAIN, TEST = examples_of(700, 0), examples_of(300, 1)


@pytest.fixture(autouse=True)
def one_thread():
    """Waiting threads spin, which takes longer than these small products if other processes share the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_rule_is_learned_and_shuffled_labels_are_not():
    learned = train_and_evaluate(TINY, "naive", TRAIN, TEST, CPU)
    assert all(score.accuracy > 0.95 and score.loss < 0.2 for score in learned)
    shuffled = TRAIN._replace(labels=np.random.default_rng(2).permutation(TRAIN.labels))
    guessed = train_and_evaluate(TINY, "naive", shuffled, TEST, CPU).test
    assert 0.35 < guessed.accuracy < 0.65 and guessed.loss > 0.6


def test_a_model_that_overfits_scores_better_on_its_training_examples():
    """The labels are random, so the model can only remember examples. The scored ones are among them."""
    few = first_of(TRAIN, 32)
    few = few._replace(labels=np.random.default_rng(0).permutation(few.labels))
    scores = train_and_evaluate(TINY, "naive", few, TEST, CPU)
    assert scores.train.accuracy > 0.9 and scores.test.accuracy < 0.7


def test_a_pair_is_two_documents_that_follow_each_other():
    """The label of a pair is the label of the second document."""
    task = replace(TINY, pairs=True, batch_size=16)
    train_set, test_set = (
        Examples(x.tokens[:n], x.lengths[:n], x.labels[1:n:2])
        for x, n in ((TRAIN, len(TRAIN.labels) // 2 * 2), (TEST, len(TEST.labels) // 2 * 2))
    )
    assert all(score.accuracy > 0.9 for score in train_and_evaluate(task, "linear", train_set, test_set, CPU))


def test_a_seed_decides_the_weights_and_the_order():
    options = {"steps": 5}
    one, again, other = (train_and_evaluate(TINY, "linear", TRAIN, TEST, CPU, seed=s, **options) for s in (1, 1, 2))
    assert one == again and one.test.loss != other.test.loss


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["naive", "flash2", "reformer"])
def test_a_cuda_graph_trains_as_steps_without_a_graph(monkeypatch, attention):
    """Lengths differ between batches, so a graph that keeps its first batch would learn nothing."""
    compute = choose_compute("cuda", PrecisionConfig("auto"))
    graph = train_and_evaluate(TINY, attention, TRAIN, TEST, compute).test
    captured = []
    monkeypatch.setattr(training, "_captured", lambda gradients, batch: captured.append(batch) or gradients)
    without = train_and_evaluate(TINY, attention, TRAIN, TEST, compute).test
    assert len(captured) == 1 and graph.accuracy > 0.9 and graph.loss == pytest.approx(without.loss, abs=0.05)


def test_the_rate_rises_linearly_and_falls_linearly():
    shares = [rate_share(step, TASKS["listops"], 50) for step in range(51)]
    assert shares[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert shares[10:] == pytest.approx([(50 - step) / 40 for step in range(10, 51)])
    assert [rate_share(step, TASKS["listops"], 1) for step in (0, 1)] == [1, 0]


def test_a_loss_that_is_not_finite_is_an_error():
    with pytest.raises(ArithmeticError, match="the loss after training is nan"):
        train_and_evaluate(replace(TINY, learning_rate=float("inf")), "linear", TRAIN, TEST, CPU, steps=3)


def test_all_whole_batches_of_an_epoch_are_different_examples():
    batches = training._Batches(TINY, TRAIN, CPU.device)
    whole, stream = len(TRAIN.labels) // 32, batches.shuffled(1)
    epochs = [torch.cat([next(stream)[0] for _ in range(whole)]) for _ in range(2)]
    assert all(len(epoch.unique(dim=0)) == 32 * whole for epoch in epochs) and not epochs[0].equal(epochs[1])
    tokens, lengths, labels = map(torch.cat, zip(*batches.in_order(), strict=True))
    assert tokens.numpy().tolist() == TRAIN.tokens.tolist()
    assert lengths.tolist() == TRAIN.lengths.tolist() and labels.tolist() == TRAIN.labels.tolist()


def test_the_command_prints_both_scores(capsys, monkeypatch):
    monkeypatch.setitem(TASKS, "tiny", TINY)
    monkeypatch.setattr(training, "load", lambda task, split, source: TRAIN if split == "train" else TEST)
    training.run(TrainingSettings("tiny", "linear", steps=2, compile=False, device="cpu"))
    printed = capsys.readouterr().out
    assert "tiny, linear:\n  test examples: accuracy " in printed and "  training examples: accuracy " in printed


def test_an_unsuitable_length_is_refused_before_the_data_are_read(monkeypatch):
    monkeypatch.setattr(training, "load", None)
    with pytest.raises(UserError, match="attention=fused_softmax holds a row of at most"):
        training.run(TrainingSettings("path_256", "fused_softmax", device="cpu"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "sorting"}, "task=sorting is unknown; choose one of listops"),
        ({"task": "text", "attention_name": "flash9"}, "attention_name=flash9 is unknown"),
        ({"task": "text", "steps": 0}, "steps=0"),
    ],
)
def test_unknown_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        TrainingSettings(**settings)
