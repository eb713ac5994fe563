"""Checkpoints of weights that are split over processes: folders, to which each writes its part beside training.

    step-00000100/part-00000.safetensors    what process 0 holds of weights and moments, and where in them that lies
    step-00000100/rest.pt                   all else, in the format of trainer/checkpoint.py, and every part's SHA-256
    best -> step-00000100                   the one with the best validation loss

torch.distributed.checkpoint plans which process writes what, takes an error of one to all, and reads parts into any
other split by its HuggingFaceStorageReader. Neither of its writers serves: FileSystemWriter leaves a pickle, which runs
code when it is read, and HuggingFaceStorageWriter builds a part twice in memory, with the interpreter's lock held
meanwhile (1.6 s for a GiB), for which training would wait. Ours writes the same format from where the tensors lie.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from errors import first_line
from trainer.background import KINDS, BackgroundCheckpoints, join_state
from trainer.checkpoint import BEFORE, REST, CheckpointError, State, remove, sync_folder, write_file
from trainer.distributed.world import local_part

DTYPES = {torch.float32: "F32"}  # the only one that weights and moments are kept in


class ShardedCheckpoints(BackgroundCheckpoints):
    """The checkpoints of a run whose weights are split: step-00000100, ..., and best, a link to one of them.

    All processes call every method, in the same order; what goes wrong in one is raised in all alike.
    """

    def __init__(self, folder: Path, keep: int, writes: bool, model: nn.Module, timeout_s: int):
        super().__init__(folder, keep, writes, model)
        # Its own group: the thread's messages must not mix with those of training, nor go through NCCL.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def _parts(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: local_part(parameter.detach()) for name, parameter in model.named_parameters()}

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, state: State) -> Path:
        """Begins to write the state after `step` steps, unless that is done or under way.

        When it is whole, all older ones go but the newest `keep` - 1 and the best.

        Raises:
            CheckpointError: the disk refused the one before.
        """
        path = self.path_of(step)
        if (tensors := self._copy(state)) is not None:
            self._submit(path, lambda: self._write(path, tensors, is_best=False))
        return path

    def save_best(self, state: State) -> Path:
        """The same, with `best` a link to it when it is whole."""
        path = self.path_of(state["step"])
        self._copied = None  # it is written anew, if it was saved before it was known to be the best
        tensors = self._copy(state)
        self._submit(path, lambda: self._write(path, tensors, is_best=True))
        return path

    def _write(self, path: Path, tensors: dict[str, Tensor], is_best: bool) -> None:
        """What the thread does: all parts, then the rest, then the name by which it counts as a checkpoint.

        Of `tensors` only their split is looked at, not what they hold by now.
        """
        partial = path.with_suffix(".partial")

        def finish(parts: dict[str, str]) -> None:
            write_file(partial / REST, self._rest | {"parts": parts})
            self._name(partial, path, is_best)
            self.prune(self._rest["step"])

        writer = _Writer(partial, self._host, finish)
        try:
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            if self.writes:
                shutil.rmtree(partial, ignore_errors=True)
            failures = [failure for failure, _ in error.failures.values()]
            disk = next((failure for failure in failures if isinstance(failure, OSError)), None)
            raise failures[0] if disk is None else self.refusal(path, disk) from error

    def _name(self, partial: Path, path: Path, is_best: bool) -> None:
        """Gives what is whole the name of a checkpoint; one that has it counts by another name until it is pruned."""
        if path.exists():  # damaged, or of the same run, which continued it: another's would have been refused
            before = path.with_suffix(BEFORE)
            remove(before)
            os.rename(path, before)
        os.rename(partial, path)
        sync_folder(self.folder)
        if is_best:
            link, best = self.folder / "best.partial", self.folder / "best"
            remove(link)
            link.symlink_to(path.name)
            if not best.is_symlink():  # a copy of a run has a folder for the link, which none replaces
                remove(best)
            os.replace(link, best)
            (self.folder / "best.pt").unlink(missing_ok=True)  # of a run whose weights were whole


class _Writer(StorageWriter):
    """How dcp.save writes to `folder`: every process its items of `host` to one file, and the first then `finish`es.

    That takes the SHA-256 of every file by its name.
    """

    def __init__(self, folder: Path, host: dict[str, Tensor], finish: Callable[[dict[str, str]], None]):
        self._folder, self._host, self._finish = folder, host, finish

    def prepare_global_plan(self, plans: list) -> list:
        """In the first process, before any writes: of a run that was killed here nothing may stay."""
        remove(self._folder)
        self._folder.mkdir(parents=True)
        return plans

    def write_data(self, plan, planner) -> torch.futures.Future:
        """Of an hsdp part, which several hold, the plan has given each item to one of them."""
        items = [item for item in plan.items if item.tensor_data.chunk.sizes.numel()]
        done, name = torch.futures.Future(), f"part-{dist.get_rank():05d}.safetensors"
        digest = _write_part(self._folder / name, items, self._host) if items else None
        done.set_result([WriteResult(item.index, 0, (name, digest)) for item in items])
        return done

    def finish(self, metadata, results: list[list[WriteResult]]) -> None:
        self._finish(dict(result.storage_data for of_one in results for result in of_one))

    def reset(self, checkpoint_id=None) -> None:
        """Nothing: each writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args, **kwargs) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan):
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return True


def _write_part(path: Path, items: list[WriteItem], host: dict[str, Tensor]) -> str:
    """A file as HuggingFaceStorageWriter's: the length of a header, the header (JSON), the tensors; its SHA-256.

    Neither hashing nor writing holds the interpreter's lock.
    """
    header, places, size = {}, {}, 0
    for item in items:
        key, x = item.index.fqn, host[item.index.fqn]
        header[key] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [size, size + x.nbytes]}
        places[key] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        size += x.nbytes
    described = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}}
    head = json.dumps(described | header).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for block in (len(head).to_bytes(8, "little"), head, *(host[key].view(-1).numpy() for key in header)):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def read_parts(state: State, model: nn.Module | None = None) -> State:
    """The state that checkpoint.load gives without `whole`, with the tensors from its folder.

    Whole, on the CPU; or split as `model` is: then a process reads only what it is to hold. (For their checksums
    checkpoint.load has read all parts before, in each process.)

    Raises:
        CheckpointError: the parts do not make up the tensors.
    """
    folder = state["folder"]
    reader = dcp.HuggingFaceStorageReader(str(folder))
    like = {} if model is None else dict(model.named_parameters())
    try:
        names = state["parameters"]
        saved = reader.read_metadata().state_dict_metadata
        tensors = {}
        for kind, name in product(KINDS, names):
            if (entry := saved.get(f"{kind}.{name}")) is not None:
                empty = torch.empty(entry.size) if model is None else torch.empty_like(like[name].detach())
                tensors[f"{kind}.{name}"] = empty
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process is asked what it reads
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        whole = join_state(state, tensors)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder} is no readable checkpoint ({first_line(error)})") from error
    return {key: value for key, value in whole.items() if key not in ("folder", "parts")}
