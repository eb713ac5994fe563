"""Several processes, started by torchrun or submitit, that train one model together: how they join and agree."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from errors import UserError, check_choice, first_line

PARALLEL = ("none", "ddp", "fsdp", "hsdp")
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process and the number of processes that train together; by default one."""

    rank: int = 0
    size: int = 1
    parallel: str = "none"  # one of PARALLEL
    ranks_per_node: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process logs, saves and samples for all."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only a part of the weights."""
        return self.parallel in ("fsdp", "hsdp")

    def sum(self, x: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.parallel != "none":
            dist.all_reduce(x)
        return x

    def maximum(self, x: Tensor) -> Tensor:
        """Take the largest numbers of all processes, in place."""
        if self.parallel != "none":
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def from_first(self, value: T) -> T:
        """Return the first process's `value`, which may be any small object."""
        if self.parallel == "none":
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every process, which may be any small object, in the order of their ranks."""
        if self.parallel == "none":
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def agreed(self, act: Callable[[], T]) -> T:
        """Call `act` in all processes and return its result. If one raises a UserError, all processes raise it."""
        if self.parallel == "none":
            return act()
        result = refusal = None
        try:
            result = act()
        except UserError as error:
            refusal = error
        if self.sum(torch.tensor(0 if refusal is None else 1)):
            raise next(filter(None, self.gather(refusal)))
        return result

    def first_ahead(self, act: Callable[[], T]) -> T:
        """Like `agreed`, but the first process acts before the others, which then find its files."""
        found = self.agreed(lambda: act() if self.is_first else None)
        return self.agreed(lambda: found if self.is_first else act())

    def largest(self, number: int) -> int:
        """Return the largest `number` of all processes, through the hosts' memory."""
        return int(self.maximum(torch.tensor(number)))

    def draw_apart(self, seed: int) -> None:
        """Give each process except the first its own seed for dropout. The first draws as a single process does."""
        if not self.is_first:
            torch.manual_seed(seed * self.size + self.rank)


ALONE = World()


def local_part(x: Tensor) -> Tensor:
    """Return this process's part of x, or x itself if it is not split."""
    return x.to_local() if hasattr(x, "to_local") else x  # x is a DTensor, but importing that class takes two seconds.


@contextmanager
def join(parallel: str | None, device: str, timeout_s: int) -> Iterator[World]:
    """Join the processes that were started together. Each takes the GPU of its rank unless device=cpu."""
    if started_by_submitit() and "RANK" not in os.environ:
        from submitit.helpers import TorchDistributedEnvironment  # an optional dependency

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    if (parallel := choose_parallel(parallel)) == "none":
        yield World()
        return
    if missing := [key for key in (*PLACE, "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]:
        raise UserError(f"torchrun's environment lacks {', '.join(missing)}; start the program with torchrun")
    rank, size, local_rank, ranks_per_node = (_variable(key) for key in PLACE)
    if parallel == "hsdp" and size % ranks_per_node:
        raise UserError(
            f"parallel=hsdp needs the same number of processes on every node, and {size} is not a multiple of "
            f"{ranks_per_node}; start {ranks_per_node} on each node, or set parallel=fsdp"
        )
    if on_gpus := device != "cpu" and torch.cuda.is_available():
        if local_rank >= (gpus := torch.cuda.device_count()):
            raise UserError(
                f"{ranks_per_node} processes were started on a machine with {gpus} GPUs; start one process per GPU, or "
                "set device=cpu"
            )
        torch.cuda.set_device(local_rank)
    _init_process_group(on_gpus, timeout_s)
    try:
        yield World(rank, size, parallel, ranks_per_node)
    except Exception as error:
        of_gloo = isinstance(error, RuntimeError) and re.search("gloo|pair closure", str(error))  # gloo has no class
        if not (isinstance(error, dist.DistError) or of_gloo):
            raise
        raise UserError(
            f"process {rank} of {size} lost another process, or waited more than train.timeout_s={timeout_s} seconds "
            f"for it ({first_line(error)}); fix the error of that process, or raise train.timeout_s"
        ) from error
    dist.destroy_process_group()  # Not after an error: NCCL would wait for processes that have ended.


def choose_parallel(asked: str | None) -> str:
    """Return the setting `parallel`, or its default: ddp with several processes, else none."""
    _, size = started()
    started_on_node()  # refuse a wrong number now, and not when the run ends and prints the command to continue
    if asked is not None:
        check_choice("parallel", asked, PARALLEL)
    if asked == "none" and size > 1:
        raise UserError(f"parallel=none does not fit {size} processes; remove parallel=none, or start one process")
    is_without_rank = asked != "none" and "RANK" not in os.environ
    if is_without_rank and (tasks := _variable("SLURM_STEP_NUM_TASKS", 1)) > 1:
        raise UserError(
            f"srun started {tasks} tasks without ranks; start torchrun once per node with srun, or use -m "
            "hydra/launcher=slurm, or set parallel=none to train with one process"
        )
    if is_without_rank and asked is not None:
        raise UserError(
            f"parallel={asked} needs a process for each GPU; start torchrun --nproc_per_node=GPUS train.py ..., or set "
            "parallel=none"
        )
    return asked or ("ddp" if size > 1 else "none")


def started() -> tuple[int, int]:
    """Return the rank of this process and the number of processes, (0, 1) for a single process."""
    return _variable("RANK", 0), _variable("WORLD_SIZE", 1)


def started_on_node() -> int:
    """Return the number of processes that torchrun started on this node, 1 for a single process."""
    return _variable("LOCAL_WORLD_SIZE", 1)


def print_in_first(text: str) -> None:
    """Print a note, unless this process is one of several and not the first of them."""
    if started()[0] == 0:
        print(text)


def _variable(key: str, default: int | None = None) -> int:
    """Return the number in an environment variable, which torchrun or srun sets."""
    value, least = os.environ.get(key, default), 1 if key.endswith("WORLD_SIZE") else 0
    try:
        number = int(value)
    except ValueError:
        number = -1
    if number < least:
        raise UserError(
            f"{key}={value} is not an integer of at least {least}; start the program with torchrun, or unset {key}"
        )
    return number


def refuse_several(program: str) -> None:
    """Raise a UserError if torchrun started several processes of a program that needs one."""
    if (size := started()[1]) > 1:
        raise UserError(f"{program} runs in one process, but {size} were started; start it with python {program}")


def restarts() -> int:
    """Return how often torchrun has restarted the processes after one of them failed."""
    return _variable("TORCHELASTIC_RESTART_COUNT", 0)


def started_by_submitit() -> bool:
    """Return whether submitit started this process, on a Slurm cluster or, for tests, on this machine."""
    return "SUBMITIT_EXECUTOR" in os.environ


def _init_process_group(on_gpus: bool, timeout_s: int) -> None:
    timeout = timedelta(seconds=timeout_s)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else None
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        # torchrun keeps its store when it restarts the processes. Without a prefix they would find the addresses of
        # the processes that have ended (pytorch/pytorch#135712). All nodes have the same count.
        options = {"store": dist.PrefixStore(f"life {restarts()}", store), "rank": rank, "world_size": size}
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        dist.init_process_group(backend, timeout=timeout, device_id=device, **options)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise UserError(
            f"process {os.environ['RANK']} did not reach all {os.environ['WORLD_SIZE']} processes at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within train.timeout_s={timeout_s} seconds; "
            "check that every node was started and can reach that address"
        ) from error
