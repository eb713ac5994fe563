"""Files of a dataset on the Hugging Face hub, in its cache on this machine."""

import fnmatch
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from data.config import DataConfig
from data.patience import within
from errors import UserError

TIMEOUT_S = 6.0


def download(config: DataConfig, log: Callable[[str], None]) -> list[Path]:
    """The files that `config` names of a commit of a dataset, sorted; what is in the cache is not loaded again.

    Raises UserError, within seconds, where they are neither all in the cache nor to be had.
    """
    wanted = {"repo_type": "dataset", "revision": config.hub_revision, "allow_patterns": config.hub_files}
    try:
        files = _files(snapshot_download(config.hub_id, local_files_only=True, **wanted), config)
    except LocalEntryNotFoundError:
        files = []
    cached = bool(files) and not _missing(files) and _has_splits(files, config)
    if cached and _numbered(files):
        return files
    try:
        # The download would try for 24 seconds to reach a hub that is not there; this asks once.
        within(TIMEOUT_S, lambda: HfApi().dataset_info(config.hub_id, revision=config.hub_revision, timeout=TIMEOUT_S))
        log(f"downloading {config.hub_id} at {config.hub_revision}")
        return _files(snapshot_download(config.hub_id, **wanted), config)
    except Exception as error:  # the hub's client raises a dozen types for a bad name or no network
        if cached:  # by names that do not tell how many there are
            log(f"the hub is out of reach; taking the {len(files)} files of {config.hub_id} in its cache")
            return files
        raise UserError(
            f"{config.hub_id} is not in the hub's cache and cannot be downloaded: set data.source to a copy of its "
            "files, or HF_HOME (and HF_HUB_OFFLINE=1) to a cache filled on a machine with a network "
            f"({type(error).__name__}: {str(error)[:160]})."
        ) from error


def _files(folder: str, config: DataConfig) -> list[Path]:
    return sorted(path for path in Path(folder).glob(config.hub_files) if path.is_file())


def _has_splits(files: list[Path], config: DataConfig) -> bool:
    """Whether there are files for every split that has its own: another program may have loaded one of them."""
    patterns = [pattern for pattern in (config.train_files, config.val_files) if pattern is not None]
    return all(any(fnmatch.fnmatch(path.name, pattern) for path in files) for pattern in patterns)


def _numbered(files: list[Path]) -> list[tuple[str, int]]:
    """Of the files called like train-00003-of-00080.parquet: train, and 80."""
    matches = [re.fullmatch(r"(.*)-\d{5}-of-(\d{5})(-[0-9a-f]+)?\.parquet", path.name) for path in files]
    return [(match[1], int(match[2])) for match in matches if match]


def _missing(files: list[Path]) -> bool:
    """Whether a download was interrupted, by the numbers of its shards."""
    return any(found < count for (_, count), found in Counter(_numbered(files)).items())
