"""Read the files that an offline run writes for `wandb sync`. wandb has no reader in Python."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from wandb.proto.wandb_internal_pb2 import Record

HEADER = b":W&B\xe1\xbe\x00"
BLOCK = 2**15
FULL, LAST = 1, 4


def read(folder: Path | str) -> SimpleNamespace:
    """Return the only offline run below the output folder of a training run; see read_all."""
    (only,) = read_all(folder)
    return only


def read_all(folder: Path | str) -> list[SimpleNamespace]:
    """Return the offline runs below the output folder of a training run, ordered by their start.

    A result has the run's `id`, `config`, `group` and `tags`, its `history` (a dict per row, without wandb's own keys),
    and its `step_metrics` (the x axis of each metric).
    """
    return [read_file(path) for path in sorted(Path(folder).glob("wandb/offline-run-*/run-*.wandb"))]


def read_file(path: Path) -> SimpleNamespace:
    history, step_metrics, run = [], {}, None
    for _ in range(600):  # wandb's own process may still write after the run has finished
        found = list(records(path.read_bytes()))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            break
        time.sleep(0.1)
    for record in found:
        kind = record.WhichOneof("record_type")
        if kind == "run" and run is None:
            run = record.run
        elif kind == "metric":
            step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "history":
            history.append(values(record.history.item))
    labels = {"id": run.run_id, "group": run.run_group, "tags": list(run.tags)}
    return SimpleNamespace(config=values(run.config.update), history=history, step_metrics=step_metrics, **labels)


def values(items) -> dict:
    pairs = ((item.key or ".".join(item.nested_key), json.loads(item.value_json)) for item in items)
    return {key: value for key, value in pairs if not key.startswith("_")}


def records(data: bytes) -> Iterator[Record]:
    """Yield the records of LevelDB's log format: blocks of chunks with checksum, length and kind."""
    assert data.startswith(HEADER)
    position, parts = len(HEADER), b""
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:  # no room for a chunk
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if position + 7 + length > len(data):  # not yet complete
            return
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
            parts = b""
