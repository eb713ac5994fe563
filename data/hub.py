"""Files of a dataset on the Hugging Face hub, in its cache on this machine."""

import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from data.config import DataConfig
from errors import UserError

TIMEOUT_S = 8.0


def download(config: DataConfig, log: Callable[[str], None]) -> list[Path]:
    """The files that `config` names of a commit of a dataset, sorted; what is in the cache is not loaded again.

    Raises UserError, within seconds, where they are neither all in the cache nor to be had.
    """
    wanted = {"repo_type": "dataset", "revision": config.hub_revision, "allow_patterns": config.hub_files}
    try:
        files = _files(snapshot_download(config.hub_id, local_files_only=True, **wanted), config)
    except LocalEntryNotFoundError:
        files = []
    if files and not _missing(files):
        return files
    try:
        # The download would try for 24 seconds to reach a hub that is not there; this asks once.
        HfApi().dataset_info(config.hub_id, revision=config.hub_revision, timeout=TIMEOUT_S)
        log(f"downloading {config.hub_id} at {config.hub_revision}")
        return _files(snapshot_download(config.hub_id, **wanted), config)
    except Exception as error:  # the hub's client raises a dozen types for a bad name or no network
        raise UserError(
            f"{config.hub_id} is not in the hub's cache and cannot be downloaded: set data.source to a copy of its "
            "files, or HF_HOME (and HF_HUB_OFFLINE=1) to a cache filled on a machine with a network "
            f"({type(error).__name__}: {str(error)[:160]})."
        ) from error


def _files(folder: str, config: DataConfig) -> list[Path]:
    return sorted(path for path in Path(folder).glob(config.hub_files) if path.is_file())


def _missing(files: list[Path]) -> bool:
    """Whether a download was interrupted, by the names of its shards: train-00003-of-00080.parquet."""
    series: dict[tuple[str, int], int] = {}
    for path in files:
        if numbered := re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.parquet", path.name):
            key = numbered[1], int(numbered[2])
            series[key] = series.get(key, 0) + 1
    return any(found < count for (_, count), found in series.items())
