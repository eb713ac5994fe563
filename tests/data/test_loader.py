import os
import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.loader import IGNORED, DataError, TrainLoader, WindowOrder, document_cu_seqlens, validation_batches
from errors import UserError

CPU = torch.device("cpu")


def loader_of(tokens, **settings):
    defaults = {
        "batch_size": 3,
        "context_length": 8,
        "seed": 1,
        "device": CPU,
        "vocab_size": 50257,
        "name": "train.bin",
    }
    return TrainLoader(tokens, **defaults | settings)


def numbered(count):
    """Return tokens that equal their own index, so that a batch shows its place in the file."""
    return np.arange(count, dtype=np.uint16)


sizes = st.tuples(st.integers(1, 40), st.integers(1, 400)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(size=sizes, seed=st.integers(0, 2**32), epoch=st.integers(0, 3))
@settings(deadline=None)
def test_an_epoch_visits_every_window_once(size, seed, epoch):
    context_length, count = size
    order = WindowOrder(count, context_length, seed)
    starts = sorted(order.start(epoch * order.windows + i) for i in range(order.windows))
    assert 0 <= starts[0] < context_length
    assert np.all(np.diff(starts) == context_length)
    assert starts[-1] + context_length + 1 <= count
    assert (order.windows + 2) * context_length > count - context_length


def test_epochs_differ_in_order_and_offset():
    order = WindowOrder(1000, 8, seed=0)
    epochs = [[order.start(e * order.windows + i) for i in range(order.windows)] for e in range(5)]
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert len({min(epoch) for epoch in epochs}) > 1


@given(size=sizes, batch_size=st.integers(1, 9), seed=st.integers(0, 99), prefetch=st.integers(0, 3))
@settings(deadline=None, max_examples=50)
def test_batches_are_the_windows_in_order_with_targets_shifted_by_one(size, batch_size, seed, prefetch):
    context_length, count = size
    order = WindowOrder(count, context_length, seed)
    options = {"batch_size": batch_size, "context_length": context_length, "seed": seed, "prefetch": prefetch}
    with loader_of(numbered(count), **options) as loader:
        for step in range(4):
            inputs, targets = loader.next_batch()
            assert inputs.shape == targets.shape == (batch_size, context_length)
            assert inputs.dtype == targets.dtype == torch.int64
            assert inputs.is_contiguous() and targets.is_contiguous()
            assert torch.equal(inputs + 1, targets)
            assert inputs[:, 0].tolist() == [order.start(step * batch_size + i) for i in range(batch_size)]


@given(taken=st.integers(0, 30), prefetch=st.integers(0, 4), used=st.integers(0, 3))
@settings(deadline=None, max_examples=25)
def test_resuming_anywhere_gives_the_same_remaining_batches(taken, prefetch, used):
    tokens = numbered(200)
    with loader_of(tokens, prefetch=prefetch) as first, loader_of(tokens) as second:
        for _ in range(taken):
            first.next_batch()
        for _ in range(used):
            second.next_batch()
        second.load_state_dict(first.state_dict())
        assert first.state_dict()["position"] == taken * 3
        for _ in range(12):
            for mine, theirs in zip(first.next_batch(), second.next_batch(), strict=True):
                assert torch.equal(mine, theirs)


def test_resuming_with_another_batch_size_continues_at_the_same_window():
    with loader_of(numbered(500)) as first, loader_of(numbered(500), batch_size=6) as second:
        first.next_batch()
        second.load_state_dict(first.state_dict())
        expected = torch.cat([first.next_batch()[0], first.next_batch()[0]])
        assert torch.equal(second.next_batch()[0], expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_processes_read_the_same_windows_as_one(ranks):
    """Processes with 3 windows each read the same windows as one process with a batch of 3 * ranks."""
    with ExitStack() as stack:
        alone = stack.enter_context(loader_of(numbered(500), batch_size=3 * ranks))
        several = [stack.enter_context(loader_of(numbered(500), rank=r, ranks=ranks)) for r in range(ranks)]
        for _ in range(20):
            assert torch.equal(torch.cat([loader.next_batch()[0] for loader in several]), alone.next_batch()[0])
        for loader in several:
            assert loader.state_dict() == alone.state_dict()
        several[-1].load_state_dict(alone.state_dict())
        assert torch.equal(several[-1].next_batch()[0], alone.next_batch()[0][-3:])


@pytest.mark.parametrize(
    ("change", "count", "message"),
    [
        ({"seed": 2}, 200, r"train\.seed gives this run seed=2, but .* seed=1; set train\.seed"),
        ({"context_length": 4}, 200, r"context_length=4, but .* context_length=8; set model\.context_length"),
        ({}, 300, r"data\.dir gives this run tokens=300, but .* tokens=200; set data\.dir"),
        ({"sha256": "bb"}, 200, r"train\.bin has other tokens \(sha256 bb\) .* had \(sha256 aa\); set data\.dir"),
    ],
    ids=["seed", "context length", "token count", "content"],
)
def test_the_state_of_another_order_is_refused(change, count, message):
    with (
        loader_of(numbered(200), sha256="aa") as first,
        loader_of(numbered(count), **{"sha256": "aa"} | change) as second,
        pytest.raises(UserError, match=message),
    ):
        second.load_state_dict(first.state_dict())


def test_a_state_or_a_file_without_a_checksum_is_accepted():
    """Older checkpoints have no checksum, and files of nanoGPT have none."""
    with loader_of(numbered(200), sha256="aa") as first, loader_of(numbered(200)) as second:
        first.next_batch()
        saved = first.state_dict()
        second.load_state_dict(saved)
        assert second.state_dict() == saved | {"sha256": None}
        for state in (second.state_dict(), {key: value for key, value in saved.items() if key != "sha256"}):
            first.load_state_dict(state)
            assert first.state_dict() == saved


def test_a_token_outside_the_vocabulary_names_file_and_byte():
    tokens = numbered(100)
    tokens[[61, 62]] = 60000
    with loader_of(tokens, batch_size=12) as loader:
        for _ in range(2):  # asking again does not step over it
            with pytest.raises(UserError, match=r"train\.bin holds token 60000 at byte 122, but .* has 50257 tokens"):
                loader.next_batch()
        assert loader.state_dict()["position"] == 0
    batches = validation_batches(
        tokens, batch_size=2, context_length=8, max_tokens=100, device=CPU, vocab_size=50257, name="val.bin"
    )
    with pytest.raises(UserError, match=r"val\.bin holds token 60000 at byte 122"):
        list(batches)


@pytest.mark.parametrize("fault", ["cut", "emptied", "removed", "longer"])
def test_a_file_that_changes_while_it_is_read_is_reported(tmp_path, fault):
    """A file cut short under its memory map killed the process by SIGBUS."""
    path = tmp_path / "train.bin"
    content = numbered(100_000) % 50257
    content.tofile(path)
    tokens = np.memmap(path, dtype="<u2", mode="r")
    with loader_of(content) as whole, loader_of(tokens) as loader:
        assert torch.equal(loader.next_batch()[0], whole.next_batch()[0])
        before = loader.state_dict()
        loader.load_state_dict(before)  # nothing is prefetched any more
        if fault == "removed":
            path.unlink()
        else:
            os.truncate(path, {"cut": 8192, "emptied": 0, "longer": 300_000}[fault])
        words = "can no longer be read" if fault == "removed" else "train.bin went from 200000 to"
        with pytest.raises(DataError, match=f"{words}.*put it back as it was"):
            loader.next_batches(3)
        content.tofile(path)
        assert loader.state_dict() == before
        assert torch.equal(loader.next_batch()[0], whole.next_batch()[0]), "nothing was passed over"


def test_an_error_in_another_process_takes_back_the_batches_of_this_one():
    def agree(act):
        act()
        raise DataError("of another process")

    with loader_of(numbered(500), agree=agree) as loader:
        with pytest.raises(DataError, match="of another process"):
            loader.next_batches(3)
        assert loader.state_dict()["position"] == 0
    options = {"batch_size": 2, "context_length": 8, "max_tokens": 100, "device": CPU, "vocab_size": 50257}
    batches = validation_batches(numbered(500), name="val.bin", agree=agree, **options)
    with pytest.raises(DataError, match="of another process"):
        next(batches)


def test_a_file_shorter_than_a_window_is_refused():
    message = r"holds 8 tokens, but one window takes 9; set a smaller model\.context_length"
    with pytest.raises(UserError, match=message):
        loader_of(numbered(8))
    with pytest.raises(UserError, match=message):
        validation_batches(
            numbered(8), batch_size=1, context_length=8, max_tokens=1, device=CPU, vocab_size=257, name="val.bin"
        )


def test_closing_ends_the_thread():
    before = threading.active_count()
    with loader_of(numbered(100)) as loader:
        loader.next_batch()
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@given(size=sizes, batch_size=st.integers(1, 9), max_tokens=st.integers(0, 600))
@settings(deadline=None)
def test_validation_covers_the_file_evenly_and_the_same_way_each_time(size, batch_size, max_tokens):
    context_length, count = size
    options = {"batch_size": batch_size, "context_length": context_length, "max_tokens": max_tokens}
    options |= {"device": CPU, "vocab_size": 50257, "name": "val.bin"}
    batches = list(validation_batches(numbered(count), **options))
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    again = torch.cat([batch for batch, _ in validation_batches(numbered(count), **options)])
    assert torch.equal(inputs, again)
    assert {batch.shape for batch, _ in batches} == {(batch_size, context_length)}

    windows = (count - 1) // context_length
    wanted = min(windows, max(1, -(-max_tokens // context_length)))
    assert (targets[wanted:] == IGNORED).all() and len(targets) < wanted + batch_size
    inputs, targets = inputs[:wanted], targets[:wanted]
    assert torch.equal(inputs + 1, targets)
    places = inputs[:, 0] // context_length
    assert torch.all(inputs[:, 0] % context_length == 0)
    gaps = torch.diff(places, append=torch.tensor([windows]))
    assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


@given(windows=st.integers(1, 20), batch_size=st.integers(1, 4), ranks=st.integers(1, 5))
@settings(deadline=None)
def test_validation_is_split_into_as_many_batches_for_every_process(windows, batch_size, ranks):
    """All processes together count the targets that one process counts. A window counts completely or not at all."""
    options = {"batch_size": batch_size, "context_length": 4, "max_tokens": 10**6, "device": CPU}
    options |= {"vocab_size": 50257, "name": "val.bin", "ranks": ranks}
    tokens = numbered(windows * 4 + 1)
    parts = [[targets for _, targets in validation_batches(tokens, rank=r, **options)] for r in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    targets = torch.cat([batch for part in parts for batch in part])
    whole = (targets != IGNORED).all(1)
    assert (targets[~whole] == IGNORED).all()
    counted = targets[whole].flatten()
    assert counted.sort().values.tolist() == list(range(1, windows * 4 + 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_the_gpu_are_those_on_the_cpu():
    with loader_of(numbered(500)) as cpu, loader_of(numbered(500), device=torch.device("cuda")) as gpu:
        for _ in range(20):
            for mine, theirs in zip(gpu.next_batch(), cpu.next_batch(), strict=True):
                assert mine.is_cuda and torch.equal(mine.cpu(), theirs)


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4))
def test_cuts_are_where_documents_begin(rows):
    """Token 3 is end of text. The number of cuts is constant, and sequences cut documents."""
    inputs = torch.tensor(rows)
    cuts = document_cu_seqlens(inputs, eot=3)
    starts = [i for i, token in enumerate(inputs.flatten()[:-1].tolist(), start=1) if token == 3 or i % 5 == 0]
    assert cuts.tolist() == [0, *starts] + [inputs.numel()] * (inputs.numel() - len(starts))
    assert (cuts.dtype, len(cuts)) == (torch.int32, inputs.numel() + 1)
