"""Checkpoints that a thread writes during training. Training waits only for a copy of the state to host memory."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from errors import UserError, described
from trainer.checkpoint.files import State
from trainer.checkpoint.single import SingleFileStore
from trainer.distributed.world import local_part
from trainer.layout import shortened, shown

ADAMW, MUON = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
MOMENTS = (*ADAMW, *MUON)
KINDS = ("model", *(f"optimizer.{moment}" for moment in MOMENTS))  # kinds of tensors; a parameter's name follows


class BackgroundStore(SingleFileStore):
    """A store whose `save` returns after copying the state to host memory, which is allocated once. A thread writes
    the copy. One state is pending at a time: the next save waits for it and raises its error."""

    def __init__(self, folder: Path, keep: int, writes: bool, model: nn.Module, optimizer: torch.optim.Optimizer):
        super().__init__(folder, keep, writes)
        self._copied: int | None = None  # the step whose state is in host memory
        self._rest: State = {}  # that state, without weights and moments
        self._pending: list[Future] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._host = host_memory(self._parts(model), moments_of(model, optimizer))

    def _parts(self, model: nn.Module) -> dict[str, Tensor]:
        return dict(model.named_parameters()) if self.writes else {}

    def settle(self, before: int | None = None) -> None:
        if before is not None and before == self._copied:
            return
        pending, self._pending = self._pending, []
        wait(pending)  # all of them, even if the first fails: the next copy overwrites the memory that they read
        try:
            for future in pending:
                future.result()
        except BaseException:
            self._copied = None
            raise

    def close(self) -> None:
        self._thread.shutdown()

    def save(self, state: State, *, best: bool = False) -> Path:
        """Copy the state and start to write it. The next save, or `settle`, raises the error of this write."""
        path = self.path_of(state["step"], best)
        if self.writes:
            self._copy(state)
            self._submit(path, self._write, join_state(self._rest, self._host), best)
        return path

    def _copy(self, state: State) -> dict[str, Tensor] | None:
        """Copy the state to host memory and return its tensors, or None if the copy is already there."""
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

    def _submit(self, path: Path, write: Callable[..., object], *arguments: object) -> None:
        def act() -> None:
            began = time.monotonic()
            write(path, *arguments)
            self.tell(f"saved {shortened(shown(path), 80)} in {time.monotonic() - began:.1f} s")

        self._pending.append(self._thread.submit(act))


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[str, ...]]:
    """Return which moments the optimizer keeps of each parameter, by the parameter's name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = ((group, MUON if "momentum" in group else ADAMW) for group in optimizer.param_groups)
    return {names[p]: moments for group, moments in groups for p in group["params"]}


def host_memory(parts: dict[str, Tensor], moments: dict[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """Allocate host memory for the weights `parts` and their moments, by the keys of split_state.

    The memory is pinned if the weights are on a GPU.
    """
    like = {f"model.{name}": part for name, part in parts.items()}
    like |= {f"optimizer.{moment}.{name}": part for name, part in parts.items() for moment in moments[name]}
    try:
        return {key: torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda) for key, x in like.items()}
    except RuntimeError as error:
        size = sum(x.nbytes for x in like.values()) / 2**30
        raise UserError(
            f"saving a checkpoint in the background needs {size:.1f} GiB of host memory, which the host lacks "
            f"({described(error)}); set checkpoint.asynchronous=false, or with parallel=fsdp or hsdp start more "
            "processes"
        ) from error


def split_state(state: State) -> tuple[State, dict[str, Tensor]]:
    """Split a state into the part without weights and moments, and these by keys like optimizer.exp_avg.wte.weight."""
    names, optimizer = state["parameters"], state["optimizer"]
    tensors = {f"model.{name}": x for name, x in state["model"].items()}
    for i, of_one in optimizer["state"].items():
        tensors |= {f"optimizer.{moment}.{names[i]}": of_one[moment] for moment in MOMENTS if moment in of_one}
    scalars = {i: {k: x for k, x in of_one.items() if k not in MOMENTS} for i, of_one in optimizer["state"].items()}
    return state | {"model": {}, "optimizer": optimizer | {"state": scalars}}, tensors


def join_state(rest: State, tensors: dict[str, Tensor]) -> State:
    """Undo split_state."""
    names, optimizer = rest["parameters"], rest["optimizer"]
    moments = {
        i: scalars
        | {moment: tensors[key] for moment in MOMENTS if (key := f"optimizer.{moment}.{names[i]}") in tensors}
        for i, scalars in optimizer["state"].items()
    }
    weights = {name: tensors[f"model.{name}"] for name in names}
    return rest | {"model": weights, "optimizer": optimizer | {"state": moments}}
