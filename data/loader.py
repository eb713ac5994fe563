"""Batches of token windows: shuffled and prefetched for training, fixed for validation.

B windows of a batch, T tokens of context. A window is T + 1 consecutive tokens: T inputs, and as targets the same
shifted by one. The windows of an epoch share no input.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from errors import UserError

IGNORED = -100  # a target that takes no part in the loss


class DataError(UserError):
    """A token file that turns out wrong when it is read."""


class WindowOrder:
    """Where each training window starts, as a pure function of the seed and of its position since the start.

    Every epoch visits `windows` windows without replacement, in its own permutation and from its own offset, so that
    other tokens meet at the edges. The number of windows is the same whatever the offset, which keeps the way from a
    position to its epoch a division.
    """

    def __init__(self, token_count: int, context_length: int, seed: int):
        self.context_length = context_length
        self.seed = seed
        self.windows = max(1, token_count // context_length - 1)
        self.offsets = min(context_length, token_count - self.windows * context_length)
        self._epoch = -1

    def start(self, position: int) -> int:
        """Index in the file of the first token of the window at `position`."""
        epoch, index = divmod(position, self.windows)
        if epoch != self._epoch:
            self._shuffle(epoch)
        return self._offset + int(self._permutation[index]) * self.context_length

    def _shuffle(self, epoch: int) -> None:
        rng = np.random.default_rng((self.seed, epoch))
        self._offset = int(rng.integers(self.offsets))
        self._permutation = np.arange(self.windows, dtype=np.uint32)
        rng.shuffle(self._permutation)
        self._epoch = epoch


class TrainLoader:
    """Endless training batches, prepared by a background thread `prefetch` batches ahead.

    `next_batch` (or `next`) returns inputs and targets, int64 tensors (B, T) on `device`. Which ones depends on the
    seed and on the number of windows handed out before, on nothing else; that number is the state to save. `tokens`
    is a uint16 array of one dimension, usually a memory map, called `name` in messages.

    Of `ranks` processes each takes its own B of the next B * ranks windows, that of `rank` 0 the first; the windows
    handed out are those of all.

    Raises UserError where `tokens` are too few for one window, and from `next_batch` DataError where a token is not
    below `vocab_size`, or the file of a memory map has become shorter.
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
    ):
        check_length(tokens, context_length, name)
        self._tokens, self._vocab_size, self._name = tokens, vocab_size, name
        self._batch_size, self._device, self._prefetch = batch_size, torch.device(device), prefetch
        self._order = WindowOrder(len(tokens), context_length, seed)
        self._stride, self._share = batch_size * ranks, batch_size * rank
        self._position = 0
        self._pending: deque[Future] = deque()
        self._thread = ThreadPoolExecutor(1, "loader", initializer=_enter_device, initargs=(_with_index(self._device),))

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the next batch; what went wrong in the background is raised here."""
        while len(self._pending) <= self._prefetch:
            ahead = self._position + len(self._pending) * self._stride
            self._pending.append(self._thread.submit(self._load, ahead + self._share))
        block = self._pending[0].result()
        self._pending.popleft()
        self._position += self._stride
        return _upload(block, self._device)

    __next__ = next_batch

    def next_batches(self, count: int, agreed: Callable = lambda act: act()) -> list[tuple[Tensor, Tensor]]:
        """The next `count` batches; where one of them fails, none is handed out.

        `agreed` calls what it is given, and raises the DataError of any of the processes that it does so in.
        """
        position = self._position
        try:
            return agreed(lambda: [self.next_batch() for _ in range(count)])
        except DataError:
            self._seek(position)
            raise

    def __iter__(self) -> "TrainLoader":
        return self

    def _load(self, position: int) -> Tensor:
        starts = [self._order.start(position + i) for i in range(self._batch_size)]
        block = gather(self._tokens, starts, self._order.context_length, self._vocab_size, self._name)
        return block.pin_memory() if self._device.type == "cuda" else block

    def state_dict(self) -> dict[str, int]:
        """The number of windows handed out (not those prefetched), and what must be the same to continue there."""
        return {
            "position": self._position,
            "seed": self._order.seed,
            "context_length": self._order.context_length,
            "tokens": len(self._tokens),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where `state` was taken; the batch size may differ. Raises UserError where the order differs."""
        settings = {"seed": "train.seed", "context_length": "model.context_length", "tokens": "data.dir"}
        for key, setting in settings.items():
            if (mine := self.state_dict()[key]) != state[key]:
                raise UserError(
                    f"The checkpoint's batches were drawn with {key}={state[key]}, this run has {mine}: "
                    f"set {setting} as it was, or start afresh with checkpoint.resume off."
                )
        if not (isinstance(state["position"], int) and state["position"] >= 0):
            raise ValueError(f"position={state['position']}")
        self._seek(state["position"])

    def _seek(self, position: int) -> None:
        self._cancel_pending()
        self._position = position

    def _cancel_pending(self) -> None:
        for future in self._pending:
            future.cancel()
        self._pending.clear()

    def close(self) -> None:
        """End the background thread; no batch can be had afterwards."""
        self._cancel_pending()
        self._thread.shutdown()

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *_) -> None:
        self.close()


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
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, int64 (B, T) on `device`, over the same windows every time.

    The windows do not overlap, are spread evenly over the file, and are as many as cover `max_tokens`: at least one,
    all of them where the file is shorter. Of `ranks` processes each takes its own part of them, in as many batches as
    the others. All batches are of one shape, or a compiled model would be compiled anew for the last: where windows run
    short, some whose targets are IGNORED make up for them. Raises UserError at once where the file is shorter than one
    window, and while iterating DataError as TrainLoader does.
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
        return _upload(block, torch.device(device))

    return map(load, range(0, len(longest), batch_size))


def document_options(inputs: Tensor, eot: int, apart: bool) -> dict[str, Tensor]:
    """What the model is called with besides inputs (B, T) to keep documents apart, if they are to be."""
    return {"cu_seqlens": document_cu_seqlens(inputs, eot)} if apart else {}


def document_cu_seqlens(inputs: Tensor, eot: int) -> Tensor:
    """Cumulative lengths of the documents in inputs (B, T) laid end to end, for an attention that keeps them apart.

    A document begins with each sequence and after each end of text. The result is (B * T + 1,) int32 whatever their
    number, so that no shape depends on the data: the total length fills it up.
    """
    starts = torch.ones_like(inputs, dtype=torch.bool)
    starts[:, 1:] = inputs[:, :-1] == eot
    total = inputs.numel()
    places = torch.arange(total, dtype=torch.int32, device=inputs.device)
    cuts = torch.where(starts.flatten(), places, total).to(torch.int32).sort().values
    return torch.cat([cuts, cuts.new_full((1,), total)])


def check_length(tokens: np.ndarray, context_length: int, name: str) -> None:
    """UserError where tokens (n,) do not fill one window and the token after it."""
    if len(tokens) <= context_length:
        raise UserError(
            f"{name} holds {len(tokens)} tokens, but one window takes {context_length + 1}: "
            "set a smaller model.context_length or use more text."
        )


def gather(tokens: np.ndarray, starts: list[int], context_length: int, vocab_size: int, name: str) -> Tensor:
    """Inputs and targets of the windows that begin at `starts`, stacked, (2, B, T) int64: one block, so one copy.

    Raises:
        DataError: a token is not below vocab_size, or the file `name`, if `tokens` are a memory map, is not as it was.
    """
    windows = _read(tokens, starts, context_length + 1, name)  # [B, T + 1]
    if windows.max() >= vocab_size:
        rows, columns = np.nonzero(windows >= vocab_size)
        index = int((np.array(starts)[rows] + columns).min())
        raise DataError(
            f"{name} holds the token {tokens[index]} at byte {index * tokens.itemsize}, outside the vocabulary of "
            f"{vocab_size}: set the data.tokenizer it was made with, or prepare it again."
        )
    return torch.from_numpy(np.stack((windows[:, :-1], windows[:, 1:])).astype(np.int64))


def _read(tokens: np.ndarray, starts: list[int], length: int, name: str) -> np.ndarray:
    """The windows (B, length) that begin at `starts`.

    Of a memory map the file is read, since to look at a page that has been cut off its end would kill the process.
    """
    if not isinstance(tokens, np.memmap):
        return np.stack([tokens[start : start + length] for start in starts])
    width = tokens.itemsize
    try:
        with open(tokens.filename, "rb", buffering=0) as file:
            windows = [os.pread(file.fileno(), length * width, start * width) for start in starts]
            size = os.fstat(file.fileno()).st_size  # asked last, so that it has seen what the reads saw
    except OSError as error:
        raise DataError(f"{name} can no longer be read ({error.strerror}): put it back as it was.") from error
    if size != tokens.nbytes:
        raise DataError(f"{name} went from {tokens.nbytes} to {size} bytes while in use: put it back as it was.")
    return np.stack([np.frombuffer(window, dtype=tokens.dtype) for window in windows])


def _upload(block: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    inputs, targets = block.to(device, non_blocking=True)
    return inputs, targets


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _enter_device(device: torch.device) -> None:
    # A new thread starts on the first GPU, and pinning memory there would open a context on it for every process.
    if device.type == "cuda":
        torch.cuda.set_device(device)
