"""Several processes that train one model together, one per device: who they are, and how they join, agree and part.

torchrun, or submitit on a Slurm cluster, starts the processes and tells each its place. All of them run train.py alike;
what only one may do, such as logging, the first does. Alone, a process pays for none of this.
"""

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from errors import UserError, first_line
from trainer.signals import StopRequest

PARALLEL = ("none", "ddp", "fsdp", "hsdp")
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among those that train together; by default it is alone."""

    rank: int = 0
    size: int = 1
    parallel: str = "none"
    """none, ddp, fsdp or hsdp."""
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
        """The sum over all processes, in place."""
        if self.parallel != "none":
            dist.all_reduce(x)
        return x

    def mean(self, x: Tensor) -> Tensor:
        """The mean over all processes, in place."""
        return self.sum(x).div_(self.size)

    def from_first(self, value: T) -> T:
        """What the first process has for `value`, which may be any small object."""
        if self.parallel == "none":
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def agreed(self, act: Callable[[], T]) -> T:
        """What `act` returns, which all processes call alike; a UserError of one is raised in all.

        So they are all after the same step, and can save together what one alone could not.
        """
        if self.parallel == "none":
            return act()
        result, refusal = None, None
        try:
            result = act()
        except UserError as error:
            refusal = error
        if self.sum(torch.tensor(0 if refusal is None else 1)):
            refusals = [None] * self.size
            dist.all_gather_object(refusals, refusal)
            raise next(filter(None, refusals))
        return result

    def first_ahead(self, act: Callable[[], T]) -> T:
        """As `agreed`, but the first process acts before the others, who then find its files."""
        found = self.agreed(lambda: act() if self.is_first else None)
        return self.agreed(lambda: found if self.is_first else act())

    def is_stopped(self, stop: StopRequest) -> bool:
        """Whether any process was asked to stop; then all of them are, by the same signal and after the same step.

        The processes agree through the hosts' memory, so that no GPU is waited for.
        """
        if self.parallel == "none":
            return stop.signal is not None
        number = torch.tensor(0 if stop.signal is None else int(stop.signal))
        dist.all_reduce(number, dist.ReduceOp.MAX)
        if not number:
            return False  # though a signal may have come since, of which the others do not know
        if stop.signal is None:
            stop.heed(number.item())
        return True

    def draw_apart(self, seed: int) -> None:
        """Every process but the first, which draws on as it would alone, draws dropout from a seed of its own."""
        if not self.is_first:
            torch.manual_seed(seed * self.size + self.rank)


ALONE = World()


def local_part(x: Tensor) -> Tensor:
    """What this process holds of x, where it is split among several."""
    return x.to_local() if hasattr(x, "to_local") else x  # a DTensor, whose import takes two seconds


class LostProcess(UserError):
    """Another process ended, or did not come for too long."""


@contextmanager
def join(parallel: str | None, device: str, timeout_s: int) -> Iterator[World]:
    """The processes that were started together, for as long as the context lasts; alone, this process.

    `device` is the setting of that name: on GPUs each process takes the one of its number on its machine.

    Raises:
        UserError: `parallel` does not go with how this process was started, the others did not come, or one of them
            was lost, or kept the others waiting for more than `timeout_s` seconds.
    """
    _export_submitit()
    if (parallel := choose_parallel(parallel)) == "none":
        yield World()
        return
    if missing := [key for key in (*_PLACE, "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]:
        raise UserError(f"the environment names a process of several, but not {', '.join(missing)}; start by torchrun")
    rank, size, local_rank, ranks_per_node = (int(os.environ[key]) for key in _PLACE)
    if parallel == "hsdp" and size % ranks_per_node:
        raise UserError(
            f"parallel=hsdp needs as many processes on every node, and {size} are no multiple of {ranks_per_node}; "
            "start as many on each, or set parallel=fsdp"
        )
    on_gpus = device != "cpu" and torch.cuda.is_available()
    if on_gpus:
        _take_gpu(local_rank, ranks_per_node)
    _meet(on_gpus, timeout_s)
    try:
        yield World(rank, size, parallel, ranks_per_node)
    except Exception as error:
        if not _is_of_communication(error):
            raise
        raise LostProcess(
            f"process {rank} of {size} lost another, or waited for it for more than train.timeout_s={timeout_s} "
            f"({first_line(error)}); mend the error of that process, or set train.timeout_s higher"
        ) from error
    atexit.unregister(dist.destroy_process_group)
    atexit.register(dist.destroy_process_group)  # not here: the next job of a sweep finds the processes joined


def failed_in_all(error: Exception, job: int) -> bool:
    """Whether all processes failed in the job of a sweep that this one failed in; then they meet anew in the next.

    Not where this one lost another, nor where the others do not say so within the time-out of that job.
    """
    if not dist.is_initialized():  # it is alone, or it refused before they met, as all do
        return True
    if isinstance(error, LostProcess):
        return False
    rank, size = started()
    try:
        _meeting.store.set(f"job {job} failed {rank}", "")
        _meeting.store.wait([f"job {job} failed {other}" for other in range(size)], _meeting.timeout)
    except dist.DistError:
        return False
    atexit.unregister(dist.destroy_process_group)
    dist.destroy_process_group()  # with what some of them may have sent in that job, and others not
    return True


_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def choose_parallel(asked: str | None) -> str:
    """How the processes share the work: as asked, or by default ddp where there are several.

    Raises:
        UserError: the way is unknown, or does not go with how this process was started.
    """
    _, size = started()
    if asked not in (None, *PARALLEL):
        raise UserError(f"parallel={asked} is unknown; choose one of {', '.join(PARALLEL)}")
    if asked == "none" and size > 1:
        raise UserError(f"parallel=none, but {size} processes were started; leave it out, or start python train.py")
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if asked != "none" and tasks > 1 and "RANK" not in os.environ:
        raise UserError(
            f"srun started {tasks} tasks, which know nothing of each other; start one on each node that runs torchrun, "
            "or let hydra/launcher=slurm start them; parallel=none trains alone, in a shell of srun's too"
        )
    if asked not in (None, "none") and "RANK" not in os.environ:
        raise UserError(
            f"parallel={asked} needs a process for each GPU; start it by torchrun --nproc_per_node=GPUS train.py ..."
        )
    return asked or ("ddp" if size > 1 else "none")


def started() -> tuple[int, int]:
    """The number of this process, and of how many that were started together; (0, 1) for one alone."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def restarted() -> bool:
    """Whether torchrun started this process in the place of one that had ended."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def is_of_submitit() -> bool:
    """Whether submitit started this process, as a job of Slurm's or, to try that out, of this machine's."""
    return "SUBMITIT_EXECUTOR" in os.environ


def _export_submitit() -> None:
    """Says where submitit put this process in the variables by which torchrun would."""
    if is_of_submitit() and "RANK" not in os.environ:
        from submitit.helpers import TorchDistributedEnvironment  # an optional dependency, there if its job runs

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)


def _take_gpu(local_rank: int, ranks_per_node: int) -> None:
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"{ranks_per_node} processes were started on a machine with {torch.cuda.device_count()} GPUs; start as "
            "many as it has GPUs, or set device=cpu"
        )
    torch.cuda.set_device(local_rank)


@dataclass
class _Meeting:
    """How the processes meet: through what, how often so far, and how long they wait for each other."""

    store: dist.Store | None = None
    number: int = 0
    timeout: timedelta | None = None


_meeting = _Meeting()


def _meet(on_gpus: bool, timeout_s: int) -> None:
    """Joins the process group, unless an earlier job did: NCCL for GPUs' tensors, gloo for those of the hosts."""
    _meeting.timeout = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else None
    rank, size = started()
    try:
        if _meeting.store is None:
            # torchrun keeps its store for processes that it starts again, which must not find the addresses of the dead
            # (pytorch/pytorch#135712). Those of other machines have the same count, if they ended too.
            life = f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
            store, _, _ = next(dist.rendezvous("env://", timeout=_meeting.timeout))
            _meeting.store = dist.PrefixStore(life, store)
        store = dist.PrefixStore(f"meeting {_meeting.number}", _meeting.store)
        options = {"store": store, "rank": rank, "world_size": size, "timeout": _meeting.timeout, "device_id": device}
        dist.init_process_group(backend, **options)
        _meeting.number += 1
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise UserError(
            f"process {os.environ['RANK']} did not meet all {os.environ['WORLD_SIZE']} at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} within train.timeout_s={timeout_s} seconds; see that every node was started "
            "and reaches that address"
        ) from error


def _is_of_communication(error: Exception) -> bool:
    """Whether another process is the cause; gloo has no class of errors of its own."""
    of_gloo = any(word in str(error) for word in ("gloo", "pair closure"))
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and of_gloo)
