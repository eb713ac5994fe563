"""Checkpoints of sharded weights. A checkpoint is a folder, and each process writes its part beside training.

    step-00000100/part-00000.safetensors    the weights and moments that process 0 holds, with their places
    step-00000100/rest.pt                   everything else, in the format of files.py, and each part's SHA-256
    best -> step-00000100                   the checkpoint with the best validation loss

torch.distributed.checkpoint (DCP) decides which process writes which tensors, passes an error of one process to all,
and reads the parts into any other sharding. Its FileSystemWriter writes a pickle, and reading a pickle can run code.
Its HuggingFaceStorageWriter holds the interpreter's lock while it writes (1.6 s per GiB). Our writer uses the format of
HuggingFaceStorageWriter without holding the lock.
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
from torch.distributed.checkpoint.storage import WriteResult

from errors import first_line
from trainer.checkpoint.background import KINDS, BackgroundStore, join_state
from trainer.checkpoint.files import PARTIAL, REST, CheckpointError, State, remove, sync_folder, write_file
from trainer.checkpoint.folder import BEFORE, is_checkpoint_folder
from trainer.distributed.world import local_part

DTYPES = {torch.float32: "F32"}  # weights and moments have no other


class ShardedStore(BackgroundStore):
    """The checkpoints of a run with sharded weights. If writing fails in one process, all raise the error."""

    def __init__(self, *args: object, timeout_s: int, **options: object):
        super().__init__(*args, **options)
        # A group of its own: the thread's messages must not mix with those of training, and must not go through NCCL.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def _parts(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: local_part(parameter.detach()) for name, parameter in model.named_parameters()}

    def path_of(self, step: int, best: bool) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, state: State, *, best: bool = False) -> Path:
        """Start to write the state, unless that is done or pending. If it is the best one, link `best` to it."""
        path = self.path_of(state["step"], best)
        if best:
            self._copied = None  # write the checkpoint again if it was saved before the run knew that it is the best
        if (tensors := self._copy(state)) is not None:
            self._submit(path, self._write_parts, tensors, best)
        return path

    def _write_parts(self, path: Path, tensors: dict[str, Tensor], is_best: bool) -> None:
        """Write all parts, then rest.pt, then rename the folder. `tensors` only say how the weights are sharded."""
        partial = path.with_suffix(PARTIAL)

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
        """Rename a complete folder to the checkpoint `path`.

        An older checkpoint of that name gets another name. It still counts as a checkpoint until it is pruned.
        """
        if path.exists():  # damaged, or an earlier save of this run
            before = path.with_suffix(BEFORE)
            remove(before)
            os.rename(path, before)
        os.rename(partial, path)
        sync_folder(self.folder)
        if is_best:
            new_link, best = self.folder / f"best{PARTIAL}", self.folder / "best"
            remove(new_link)
            new_link.symlink_to(path.name)
            if not best.is_symlink() and is_checkpoint_folder(best):  # os.replace does not replace the copy of a link
                remove(best)
            os.replace(new_link, best)
            sync_folder(self.folder)
            (self.folder / "best.pt").unlink(missing_ok=True)  # from a run whose weights were not sharded


class _Writer(dcp.FileSystemWriter):
    """Writes each process's items of `host` to one file in `folder`. Then the first process calls `finish` with the
    SHA-256 of each file by name."""

    def __init__(self, folder: Path, host: dict[str, Tensor], finish: Callable[[dict[str, str]], None]):
        super().__init__(folder)
        self._folder, self._host, self._finish = folder, host, finish

    def prepare_global_plan(self, plans: list) -> list:
        remove(self._folder)
        self._folder.mkdir(parents=True)
        return plans

    def write_data(self, plan, planner) -> torch.futures.Future:
        items = [item for item in plan.items if item.tensor_data.chunk.sizes.numel()]
        done, name = torch.futures.Future(), f"part-{dist.get_rank():05d}.safetensors"
        digest = _write_part(self._folder / name, items, self._host) if items else None
        done.set_result([WriteResult(item.index, 0, (name, digest)) for item in items])
        return done

    def finish(self, metadata, results: list[list[WriteResult]]) -> None:
        self._finish(dict(result.storage_data for of_one in results for result in of_one))


def _write_part(path: Path, items: list[WriteItem], host: dict[str, Tensor]) -> str:
    """Write a file in HuggingFaceStorageWriter's format (header length, JSON header, tensors); return its SHA-256."""
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
    """Add the tensors of its folder to a state that load.load returned with whole=False.

    Without `model`, the tensors are whole and on the CPU. With `model`, they are this process's part of its parameters.
    """
    folder, tensors = state["folder"], {}
    reader = dcp.HuggingFaceStorageReader(str(folder))
    parameters = {} if model is None else dict(model.named_parameters())
    try:
        saved = reader.read_metadata().state_dict_metadata
        for kind, name in product(KINDS, state["parameters"]):
            if (entry := saved.get(key := f"{kind}.{name}")) is not None:
                tensors[key] = torch.empty(entry.size) if model is None else torch.empty_like(parameters[name].detach())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about no_dist
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        whole = join_state(state, tensors)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder} is not a readable checkpoint ({first_line(error)})") from error
    return {key: value for key, value in whole.items() if key not in ("folder", "parts")}
