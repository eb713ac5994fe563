"""Checkpoints that are written beside training: a step waits only while the state is copied to the host's memory."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from errors import UserError, described
from trainer.checkpoint import Checkpoints, State
from trainer.distributed.world import local_part
from trainer.meters import GIB

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("model", *(f"optimizer.{moment}" for moment in MOMENTS))  # of tensors, before the name of their parameter


class BackgroundCheckpoints(Checkpoints):
    """Checkpoints whose `save` and `save_best` return when the state is copied; a thread writes it from there.

    The memory of the copy is set aside once: that of weights and moments. One state is under way at a time, the next
    waits for it and raises what went wrong.
    """

    def __init__(self, folder: Path, keep: int, writes: bool, model: nn.Module):
        super().__init__(folder, keep, writes)
        self._copied: int | None = None  # the step whose state is in the host's memory
        self._rest: State = {}  # of that state, all but weights and moments
        self._under_way: list[Future] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._host = host_memory(self._parts(model))

    def _parts(self, model: nn.Module) -> dict[str, Tensor]:
        """What this process writes of the weights, by name."""
        return dict(model.named_parameters()) if self.writes else {}

    @contextmanager
    def saving(self, tell: Callable[[str], None]) -> Iterator[None]:
        """As there; an error inside is what is raised at the end, and not that of a save."""
        self._tell = tell
        try:
            yield
            self.settle()
        except BaseException:
            with suppress(Exception):
                self.settle()
            raise
        finally:
            self._thread.shutdown()

    def settle(self, before: int | None = None) -> None:
        if before is not None and before == self._copied:
            return
        under_way, self._under_way = self._under_way, []
        wait(under_way)  # for all, whatever becomes of the first: the next state takes the place of what they read
        try:
            for future in under_way:
                future.result()
        except BaseException:
            self._copied = None
            raise

    def save(self, step: int, state: State) -> Path:
        """As there, but that what the disk refuses is raised by the next save, or by `settle`."""
        path = self.path_of(step)
        if self.writes:
            self._copy(state)
            self._submit(path, lambda: Checkpoints.save(self, step, join_state(self._rest, self._host)))
        return path

    def save_best(self, state: State) -> Path:
        """The same for best.pt."""
        path = self.folder / "best.pt"
        if self.writes:
            self._copy(state)
            self._submit(path, lambda: Checkpoints.save_best(self, join_state(self._rest, self._host)))
        return path

    def _copy(self, state: State) -> dict[str, Tensor] | None:
        """Brings the state to the host's memory, and returns its tensors; None where it is there already, as the best
        one is saved as the newest too."""
        if state["step"] == self._copied:
            return None
        self.settle()
        self._copied = state["step"]
        rest, tensors = split_state(state)
        if self.writes:
            self._rest = tree_map(lambda x: x.to("cpu", copy=True) if isinstance(x, Tensor) else x, rest)
        for key, x in tensors.items():
            self._host[key].copy_(local_part(x), non_blocking=True)
        if any(x.is_cuda for x in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return tensors

    def _submit(self, path: Path, write: Callable[[], object]) -> None:
        def act() -> None:
            began = time.monotonic()
            write()
            self._tell(f"saved {path}, in {time.monotonic() - began:.1f} s beside training")

        self._under_way.append(self._thread.submit(act))


def host_memory(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Room for weights and moments of those names and shapes.

    For a GPU's it is pinned, which takes a second for some GiB, and so is done before training.

    Raises:
        UserError: there is too little memory.
    """
    try:
        return {
            f"{kind}.{name}": torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            for kind, (name, part) in product(KINDS, parts.items())
        }
    except RuntimeError as error:
        size = len(KINDS) * sum(part.nbytes for part in parts.values()) / GIB
        raise UserError(
            f"the host lacks the {size:.1f} GiB for a copy of what a checkpoint holds ({described(error)}); set "
            "checkpoint.asynchronous=false, or with parallel=fsdp or hsdp start more processes"
        ) from error


def split_state(state: State) -> tuple[State, dict[str, Tensor]]:
    """A run's state without its weights and moments, and those, by keys such as optimizer.exp_avg.wte.weight."""
    names, optimizer = state["parameters"], state["optimizer"]
    tensors = {f"model.{name}": x for name, x in state["model"].items()}
    for i, of_one in optimizer["state"].items():
        tensors |= {f"optimizer.{moment}.{names[i]}": of_one[moment] for moment in MOMENTS}
    scalars = {i: {k: x for k, x in of_one.items() if k not in MOMENTS} for i, of_one in optimizer["state"].items()}
    return state | {"model": {}, "optimizer": optimizer | {"state": scalars}}, tensors


def join_state(rest: State, tensors: dict[str, Tensor]) -> State:
    """What split_state took apart."""
    names, optimizer = rest["parameters"], rest["optimizer"]
    moments = {
        i: scalars | {moment: tensors[f"optimizer.{moment}.{names[i]}"] for moment in MOMENTS}
        for i, scalars in optimizer["state"].items()
    }
    weights = {name: tensors[f"model.{name}"] for name in names}
    return rest | {"model": weights, "optimizer": optimizer | {"state": moments}}
