"""Batches of token windows: shuffled and prefetched for training, fixed for validation.

B windows per batch, T tokens of context. A window is T + 1 consecutive tokens: T inputs, and the targets are the same
tokens shifted by one. The windows of an epoch do not share inputs.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from errors import UserError

IGNORED = -100  # a target that does not count in the loss
FROM_WEIGHTS = "start a new run from its weights with model.pretrained=CHECKPOINT in place of checkpoint.resume"
Result = TypeVar("Result")
Agree = Callable[[Callable[[], Result]], Result]


def alone(act: Callable[[], Result]) -> Result:
    """Return act(): the `agree` of a single process."""
    return act()


class DataError(UserError):
    """A token file turned out to be wrong while it was read."""


class WindowOrder:
    """The start of each training window, as a pure function of the seed and the window's position in training.

    Every epoch visits `windows` windows without replacement, with a permutation and an offset of its own.
    """

    def __init__(self, token_count: int, context_length: int, seed: int):
        self.context_length, self.seed = context_length, seed
        self.windows = max(1, token_count // context_length - 1)
        self._offsets = min(context_length, token_count - self.windows * context_length)
        self._epoch = -1

    def start(self, position: int) -> int:
        """Return the index in the file of the first token of the window at `position`."""
        epoch, index = divmod(position, self.windows)
        if epoch != self._epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self._offset = int(rng.integers(self._offsets))
            self._permutation = np.arange(self.windows, dtype=np.uint32)
            rng.shuffle(self._permutation)
            self._epoch = epoch
        return self._offset + int(self._permutation[index]) * self.context_length


class TrainLoader(AbstractContextManager):
    """Endless training batches, prepared by a background thread `prefetch` batches ahead.

    `tokens` is uint16 (n,), usually a memory map. Messages call it `name`. `sha256` is the checksum of its file, if
    known. A batch depends only on the seed and on the number of windows that all processes took before. That number is
    the state to save. Each of the `ranks` processes takes its own B of the next B * ranks windows. `agree(act)` returns
    act(), and if act raises a UserError in one process, it raises that error in all of them.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        batch_size: int,
        context_length: int,
        seed: int,
        device: torch.device,
        vocab_size: int,
        name: str,
        prefetch: int = 2,
        rank: int = 0,
        ranks: int = 1,
        agree: Agree = alone,
        sha256: str | None = None,
    ):
        check_length(tokens, context_length, name)
        self._tokens, self._vocab_size, self._name, self._sha256 = tokens, vocab_size, name, sha256
        self._batch_size, self._device, self._prefetch = batch_size, torch.device(device), prefetch
        self._order = WindowOrder(len(tokens), context_length, seed)
        self._stride, self._share, self._agree = batch_size * ranks, batch_size * rank, agree
        self._position = 0
        self.waited_s = 0.0
        """Seconds spent in next_batches so far."""
        self._pending: deque[Future] = deque()
        # A new thread starts on the first GPU. Pinning memory there would open a context on it for every process.
        is_cuda = self._device.type == "cuda"
        index = torch.cuda.current_device() if is_cuda and self._device.index is None else self._device.index
        initializer = partial(torch.cuda.set_device, index) if is_cuda else None
        self._thread = ThreadPoolExecutor(1, "loader", initializer=initializer)

    def next_batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return the next `count` batches, see next_batch. If one fails in any process, all processes take none."""
        position, asked = self._position, time.perf_counter()
        try:
            return self._agree(lambda: [self.next_batch() for _ in range(count)])
        except DataError:
            self._seek(position)
            raise
        finally:
            self.waited_s += time.perf_counter() - asked

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of this process's next batch, int64 (B, T) on the device.

        Raises:
            DataError: a token is not below `vocab_size`, or the file behind a memory map changed.
        """
        while len(self._pending) <= self._prefetch:
            ahead = self._position + len(self._pending) * self._stride
            self._pending.append(self._thread.submit(self._load, ahead + self._share))
        block = self._pending[0].result()
        self._pending.popleft()
        self._position += self._stride
        return tuple(block.to(self._device, non_blocking=True))

    def _load(self, position: int) -> Tensor:
        starts = [self._order.start(position + i) for i in range(self._batch_size)]
        block = gather(self._tokens, starts, self._order.context_length, self._vocab_size, self._name)
        return block.pin_memory() if self._device.type == "cuda" else block

    def state_dict(self) -> dict[str, int | str | None]:
        """Return the number of windows handed out (not those prefetched), and what fixes their order and content."""
        order = {"seed": self._order.seed, "context_length": self._order.context_length, "tokens": len(self._tokens)}
        return {"position": self._position, **order, "sha256": self._sha256}

    def load_state_dict(self, state: dict[str, int | str | None]) -> None:
        """Continue at the position of `state`. The batch size may differ.

        Raises:
            UserError: the windows of `state` come in a different order, or from other tokens.
        """
        settings = {"seed": "train.seed", "context_length": "model.context_length", "tokens": "data.dir"}
        for key, setting in settings.items():
            if (mine := self.state_dict()[key]) != state[key]:
                raise UserError(
                    f"{setting} gives this run {key}={mine}, but the checkpoint's batches were drawn with "
                    f"{key}={state[key]}; set {setting} as it was, or {FROM_WEIGHTS}"
                )
        mine, saved = self._sha256, state.get("sha256")  # nanoGPT's files and older checkpoints have none
        if mine and saved and mine != saved:
            raise UserError(
                f"{self._name} has other tokens (sha256 {mine:.12}) than the run of the checkpoint had (sha256 "
                f"{saved:.12}); set data.dir to those tokens, or {FROM_WEIGHTS}"
            )
        if not (isinstance(state["position"], int) and state["position"] >= 0):
            raise ValueError(f"position={state['position']}")
        self._seek(state["position"])

    def _seek(self, position: int) -> None:
        self._pending.clear()  # the thread still loads these batches, which is harmless
        self._position = position

    def __exit__(self, *_) -> None:
        """End the background thread."""
        self._thread.shutdown(cancel_futures=True)


def validation_batches(
    tokens: np.ndarray,
    *,
    batch_size: int,
    context_length: int,
    max_tokens: int,
    device: torch.device,
    vocab_size: int,
    name: str,
    rank: int = 0,
    ranks: int = 1,
    agree: Agree = alone,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, int64 (B, T) on `device`, over the same windows in every call.

    The windows are spread evenly over the file. Their number is the smallest that covers `max_tokens`, but at least
    one and at most all. Each of the `ranks` processes takes a part of them; all yield the same number of batches.
    The last batch is filled with windows whose targets are IGNORED, so that a compiled model sees one shape.

    Raises:
        UserError: at once, if the file is shorter than one window.
        DataError: during iteration, as in TrainLoader.
    """
    check_length(tokens, context_length, name)
    windows = (len(tokens) - 1) // context_length
    wanted = min(windows, max(1, -(-max_tokens // context_length)))
    starts = [i * windows // wanted * context_length for i in range(wanted)]
    longest, mine = starts[::ranks], starts[rank::ranks]

    def load(i: int) -> tuple[Tensor, Tensor]:
        own = mine[i : i + batch_size]
        filled = own + starts[:1] * (batch_size - len(own))
        block = gather(tokens, filled, context_length, vocab_size, name)
        block[1, len(own) :] = IGNORED
        return tuple(block.to(device, non_blocking=True))

    return (agree(lambda i=i: load(i)) for i in range(0, len(longest), batch_size))


def document_options(inputs: Tensor, eot: int, apart: bool) -> dict[str, Tensor]:
    """Return the model's options for inputs (B, T). With `apart`, documents do not attend to each other."""
    return {"cu_seqlens": document_cu_seqlens(inputs, eot)} if apart else {}


def document_cu_seqlens(inputs: Tensor, eot: int) -> Tensor:
    """Return the cumulative lengths of the documents in inputs (B, T), with all sequences laid end to end.

    A document begins with each sequence and after each end-of-text token. The result is int32 (B * T + 1,) for any
    number of documents. Unused entries hold the total length.
    """
    starts = torch.ones_like(inputs, dtype=torch.bool)
    starts[:, 1:] = inputs[:, :-1] == eot
    total = inputs.numel()
    places = torch.arange(total, dtype=torch.int32, device=inputs.device)
    cuts = torch.where(starts.flatten(), places, total).to(torch.int32).sort().values
    return torch.cat([cuts, cuts.new_full((1,), total)])


def check_length(tokens: np.ndarray, context_length: int, name: str) -> None:
    """Raise UserError if tokens (n,) do not fill one window."""
    if len(tokens) <= context_length:
        raise UserError(
            f"{name} holds {len(tokens)} tokens, but one window takes {context_length + 1}; "
            "set a smaller model.context_length, or use more text"
        )


def gather(tokens: np.ndarray, starts: list[int], context_length: int, vocab_size: int, name: str) -> Tensor:
    """Return inputs and targets of the windows that begin at `starts`, int64 (2, B, T): one block, so one copy.

    Raises:
        DataError: a token is not below `vocab_size`, or the file behind a memory map changed.
    """
    windows = _read(tokens, starts, context_length + 1, name)  # [B, T + 1]
    if windows.max() >= vocab_size:
        rows, columns = np.nonzero(windows >= vocab_size)
        index = int((np.array(starts)[rows] + columns).min())
        raise DataError(
            f"{name} holds token {tokens[index]} at byte {index * tokens.itemsize}, but the vocabulary has "
            f"{vocab_size} tokens; set the data.tokenizer that the file was made with, or prepare the file again"
        )
    return torch.from_numpy(np.stack((windows[:, :-1], windows[:, 1:])).astype(np.int64))


def _read(tokens: np.ndarray, starts: list[int], length: int, name: str) -> np.ndarray:
    """Return the windows (B, length) that begin at `starts`."""
    if not isinstance(tokens, np.memmap):
        return np.stack([tokens[start : start + length] for start in starts])
    # Read the file instead of the map: if the file was truncated, touching a lost page would kill the process.
    width = tokens.itemsize
    try:
        with open(tokens.filename, "rb", buffering=0) as file:
            windows = [os.pread(file.fileno(), length * width, start * width) for start in starts]
            size = os.fstat(file.fileno()).st_size  # after the reads, so that a change during them is seen
    except OSError as error:
        raise DataError(f"{name} can no longer be read ({error.strerror}); put it back as it was") from error
    if size != tokens.nbytes:
        raise DataError(f"{name} went from {tokens.nbytes} to {size} bytes while in use; put it back as it was")
    return np.stack([np.frombuffer(window, dtype=tokens.dtype) for window in windows])
