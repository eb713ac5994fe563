"""The settings of checkpoints (group `checkpoint`)."""

from dataclasses import dataclass
from pathlib import Path

from errors import check_choice, check_range


@dataclass
class CheckpointConfig:
    """When to save the state of a run, and to which folder."""

    dir: str | None = None
    """Folder of the checkpoints; null is `checkpoints` in the run's output folder."""
    interval: int = 100
    """Steps between two checkpoints. conf/config.yaml sets it to train.eval_interval. The end saves one more."""
    keep: int = 2
    """How many of the newest checkpoints stay. The checkpoint with the best validation loss stays too: as best.pt, or
    with split weights as the link best."""
    resume: str | None = None
    """null starts a new run. auto continues from the newest checkpoint in checkpoint.dir, or starts a new run if it
    finds none; it needs hydra.run.dir or checkpoint.dir. A path continues from that checkpoint, or from the newest
    complete one in that folder. The checkpoint gives all settings that the command line does not, except this group's
    dir."""
    asynchronous: bool | None = None
    """Write in the background. Training then waits only for a copy to host memory (12 bytes per parameter). null is
    true on a GPU and false on a CPU. parallel=fsdp and hsdp always write in the background."""
    on_error: str = "stop"
    """If the disk refuses a checkpoint: stop, or continue until the next one. The last checkpoint must succeed."""

    def folder(self, output: Path) -> Path:
        """Return the folder of the checkpoints of a run whose outputs are in `output`."""
        return Path(self.dir or output / "checkpoints")

    def __post_init__(self):
        for key in ("interval", "keep"):
            check_range(f"checkpoint.{key}", getattr(self, key), 1)
        check_choice("checkpoint.on_error", self.on_error, ("stop", "continue"))
