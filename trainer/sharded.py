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
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
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
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from trainer.checkpoint import REST, CheckpointError, Checkpoints, State, put_aside, write_file

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("model", *(f"optimizer.{moment}" for moment in MOMENTS))  # of tensors, before the name of their parameter
DTYPES = {torch.float32: "F32"}  # the only one that weights and moments are kept in


class ShardedCheckpoints(Checkpoints):
    """The checkpoints of a run whose weights are split: step-00000100, ..., and best, a link to one of them.

    All processes call every method, in the same order. A save returns when the process's part is copied to the host's
    memory, which is set aside once and must hold weights and moments of the part; a thread writes it from there. One
    save is under way at a time, the next waits for it and raises what went wrong, in all processes alike.
    """

    def __init__(self, folder: Path, keep: int, writes: bool, model: nn.Module, timeout_s: int):
        super().__init__(folder, keep, writes)
        self._tell: Callable[[str], None] = print
        self._saved: int | None = None  # the step under way, or else the last one that is whole
        self._under_way: Future | None = None
        # Its own group: the thread's messages must not mix with those of training, nor go through NCCL.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        parts = {name: _local(parameter.detach()) for name, parameter in model.named_parameters()}
        self._host = {  # for a GPU's part pinned, which takes a second for some GiB, and so is done before training
            f"{kind}.{name}": torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            for kind, (name, part) in product(KINDS, parts.items())
        }

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
        if self._under_way is None or (before is not None and before == self._saved):
            return
        under_way, self._under_way = self._under_way, None
        try:
            under_way.result()
        except BaseException:
            self._saved = None
            raise

    def save(self, step: int, state: State) -> Path:
        """Begins to write the state after `step` steps, unless that is done or under way.

        When it is whole, all older ones go but the newest `keep` - 1 and the best.

        Raises:
            CheckpointError: the disk refused the one before.
        """
        path = self.folder / f"step-{step:08d}"
        if step != self._saved:
            self._begin(path, state, is_best=False)
        return path

    def save_best(self, state: State) -> Path:
        """The same, with `best` a link to it when it is whole."""
        path = self.folder / f"step-{state['step']:08d}"
        self._begin(path, state, is_best=True)
        return path

    def _begin(self, path: Path, state: State, is_best: bool) -> None:
        """Copies this process's part, for which training waits, and leaves the rest to the thread."""
        self.settle()
        self._saved = state["step"]
        rest, tensors = _split(state)
        rest = tree_map(lambda x: x.to("cpu", copy=True) if isinstance(x, Tensor) else x, rest) if self.writes else {}
        parts = {key: _local(x) for key, x in tensors.items()}
        for key, part in parts.items():
            self._host[key].copy_(part, non_blocking=True)
        if any(part.is_cuda for part in parts.values()):
            torch.cuda.current_stream().synchronize()
        self._under_way = self._thread.submit(self._write, path, rest, tensors, is_best)

    def _write(self, path: Path, rest: State, tensors: dict[str, Tensor], is_best: bool) -> None:
        """What the thread does: all parts, then the rest, then the name by which it counts as a checkpoint.

        Of `tensors` only their split is looked at, not what they hold by now.
        """
        began, partial = time.monotonic(), path.with_suffix(".partial")

        def finish(parts: dict[str, str]) -> None:
            write_file(partial / REST, rest | {"parts": parts})
            self._name(partial, path, is_best)
            self.prune(rest["step"])

        writer = _Writer(partial, self._host, finish)
        try:
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            if self.writes:
                shutil.rmtree(partial, ignore_errors=True)
            failures = [failure for failure, _ in error.failures.values()]
            disk = next((failure for failure in failures if isinstance(failure, OSError)), None)
            raise failures[0] if disk is None else self.refusal(path, disk) from error
        self._tell(f"saved {path}, in {time.monotonic() - began:.1f} s beside training")

    def _name(self, partial: Path, path: Path, is_best: bool) -> None:
        """Gives what is whole the name of a checkpoint."""
        if path.exists():  # damaged, or of the same run, which continued it: another's would have been refused
            put_aside(path)
        os.rename(partial, path)
        if is_best:
            link = self.folder / "best.partial"
            link.unlink(missing_ok=True)
            link.symlink_to(path.name)
            os.replace(link, self.folder / "best")
            (self.folder / "best.pt").unlink(missing_ok=True)  # of a run whose weights were whole


class _Writer(StorageWriter):
    """How dcp.save writes to `folder`: every process its items of `host` to one file, and the first then `finish`es.

    That takes the SHA-256 of every file by its name.
    """

    def __init__(self, folder: Path, host: dict[str, Tensor], finish: Callable[[dict[str, str]], None]):
        self._folder, self._host, self._finish = folder, host, finish

    def prepare_global_plan(self, plans: list) -> list:
        """In the first process, before any writes: of a run that was killed here nothing may stay."""
        shutil.rmtree(self._folder, ignore_errors=True)
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


def _local(x: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def _split(state: State) -> tuple[State, dict[str, Tensor]]:
    """A run's state without its weights and moments, and those, by keys such as optimizer.exp_avg.wte.weight."""
    names, optimizer = state["parameters"], state["optimizer"]
    tensors = {f"model.{name}": x for name, x in state["model"].items()}
    for i, of_one in optimizer["state"].items():
        tensors |= {f"optimizer.{moment}.{names[i]}": of_one[moment] for moment in MOMENTS}
    scalars = {i: {k: x for k, x in of_one.items() if k not in MOMENTS} for i, of_one in optimizer["state"].items()}
    return state | {"model": {}, "optimizer": optimizer | {"state": scalars}}, tensors


def read_parts(state: State, model: nn.Module | None = None) -> State:
    """The state that checkpoint.load gives without `whole`, with the tensors from its folder.

    Whole, on the CPU; or split as `model` is: then a process reads only what it is to hold. (For their checksums
    checkpoint.load has read all parts before, in each process.)

    Raises:
        CheckpointError: the parts do not make up the tensors.
    """
    folder, names = state["folder"], state["parameters"]
    reader = dcp.HuggingFaceStorageReader(str(folder))
    like = {} if model is None else dict(model.named_parameters())
    try:
        saved = reader.read_metadata().state_dict_metadata
        tensors = {}
        for kind, name in product(KINDS, names):
            if (entry := saved.get(f"{kind}.{name}")) is not None:
                empty = torch.empty(entry.size) if model is None else torch.empty_like(like[name].detach())
                tensors[f"{kind}.{name}"] = empty
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process is asked what it reads
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        return _joined(state, tensors)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder} is no readable checkpoint ({str(error).splitlines()[0]})") from error


def _joined(state: State, tensors: dict[str, Tensor]) -> State:
    """What _split took apart."""
    names, optimizer = state["parameters"], state["optimizer"]
    moments = {
        i: scalars | {moment: tensors[f"optimizer.{moment}.{names[i]}"] for moment in MOMENTS}
        for i, scalars in optimizer["state"].items()
    }
    weights = {name: tensors[f"model.{name}"] for name in names}
    whole = state | {"model": weights, "optimizer": optimizer | {"state": moments}}
    return {key: value for key, value in whole.items() if key not in ("folder", "parts")}
