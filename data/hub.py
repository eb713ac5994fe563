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
from errors import UserError, described

TIMEOUT_S = 6.0
SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})(-[0-9a-f]+)?\.parquet")  # train-00003-of-00080.parquet: train, 80


def download(config: DataConfig, log: Callable[[str], None]) -> list[Path]:
    """Return the dataset files that `config` names, sorted. Only files that are not in the cache are downloaded.

    Raises:
        UserError: the cache is incomplete and the hub does not answer within seconds.
    """

    def snapshot(**options) -> list[Path]:
        options |= {"repo_type": "dataset", "revision": config.hub_revision, "allow_patterns": config.hub_files}
        folder = snapshot_download(config.hub_id, **options)
        return sorted(path for path in Path(folder).glob(config.hub_files) if path.is_file())

    try:
        files = snapshot(local_files_only=True)
    except LocalEntryNotFoundError:
        files = []
    # Another program may have downloaded only one split, or a download may have been interrupted.
    names, splits = [path.name for path in files], (config.train_files, config.val_files or "*")
    shards = Counter((match[1], int(match[2])) for match in map(SHARD.fullmatch, names) if match)
    is_cached = all(fnmatch.filter(names, split) for split in splits)
    is_cached &= all(found >= count for (_, count), found in shards.items())
    if is_cached and shards:
        return files
    try:
        # Ask the hub once. snapshot_download would try for 24 seconds to reach a hub that does not answer.
        within(TIMEOUT_S, lambda: HfApi().dataset_info(config.hub_id, revision=config.hub_revision, timeout=TIMEOUT_S))
        log(f"downloading {config.hub_id} at {config.hub_revision}")
        return snapshot()
    except Exception as error:  # the hub's client raises a dozen types for a bad name or no network
        if is_cached:  # The file names have no numbers, so the cache may be incomplete.
            log(f"the hub does not answer; using the {len(files)} files of {config.hub_id} in its cache")
            return files
        raise UserError(
            f"data.hub_id={config.hub_id} is not in the hub's cache and cannot be downloaded ({described(error)}); set "
            "data.source to a copy of its files, or HF_HOME (and HF_HUB_OFFLINE=1) to a complete cache"
        ) from error
