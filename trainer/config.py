"""The settings of the loop (group `train`)."""

from dataclasses import dataclass

from errors import UserError
from model.gpt2 import CHECKPOINTING

LARGEST_BATCH = 2**20  # of sequences, which are drawn one by one
LARGEST_STEP = 2**24  # of sequences, which are all read before it begins
LONGEST_TIMEOUT_S = 365 * 24 * 3600


@dataclass
class TrainConfig:
    """The loop."""

    batch_size: int = 8
    """Sequences per device and micro-step; fewer where several processes share a smaller global batch."""
    grad_accumulation: int | None = None
    """Micro-steps per optimizer step of one process; null is 1, or what train.global_batch_size asks for. Several
    processes share the same batch_size times grad_accumulation sequences."""
    global_batch_size: int | None = None
    """Sequences per optimizer step, of all processes together; another way to give grad_accumulation."""
    max_steps: int = 1200
    """Optimizer steps in all."""
    eval_interval: int = 200
    """Steps between two evaluations; one more ends the run."""
    eval_tokens: int = 65536
    """Validation tokens of an evaluation, always the same; best a multiple of batch_size times context_length."""
    log_interval: int = 25
    """Steps between two rows of metrics."""
    seed: int = 1337
    """Of the weights, the order of the data and dropout."""
    compile: bool | None = None
    """torch.compile the model; null is true on a GPU, false on a CPU, where compiling outlasts a short run."""
    cuda_graphs: bool | None = None
    """Micro-steps as CUDA graphs, which the host queues at once instead of kernel by kernel: faster where micro-batches
    are small. null is true for a compiled model in one process, without full activation checkpointing, on a GPU that
    has as much memory free as a step takes, since what graphs need of it is theirs alone."""
    activation_checkpointing: str = "none"
    """What the backward pass recomputes instead of finding it in memory: none; selective, GELU's output, which saves a
    quarter of the activations for about a percent of the time; full, whole blocks but their attention: several times
    the context or batch in the same memory, at less speed."""
    deterministic: bool = False
    """Only deterministic kernels, so that a resumed run on a GPU repeats bit for bit; slower."""
    on_nan: str = "stop"
    """After a step whose loss or gradient is not finite, which the weights never take: stop, or skip it; ten in a row
    stop in any case."""
    spike_factor: float | None = 10.0
    """A gradient norm above this many times the median of the last hundred is recorded for replay; null for never."""
    sample_tokens: int = 200
    """Length of the sample that ends a run, in tokens; 0 for none."""
    reshard_after_forward: bool = True
    """For parallel=fsdp and hsdp: give a block's gathered weights up after its forward pass and gather them again for
    its backward pass; false saves that and costs the memory of all weights in the precision of the products."""
    timeout_s: int = 600
    """Seconds that one of several processes waits for another before the run ends, a checkpoint's writing included."""

    def __post_init__(self):
        for key in ("batch_size", "max_steps", "eval_interval", "eval_tokens", "log_interval", "timeout_s"):
            if getattr(self, key) < 1:
                raise UserError(f"train.{key}={getattr(self, key)} must be at least 1")
        if self.batch_size > LARGEST_BATCH:
            raise UserError(f"train.batch_size={self.batch_size} must be at most {LARGEST_BATCH}")
        if self.timeout_s > LONGEST_TIMEOUT_S:
            raise UserError(f"train.timeout_s={self.timeout_s} must be at most {LONGEST_TIMEOUT_S}, a year")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"train.seed={self.seed} must be at least 0 and below 2**32")
        if self.grad_accumulation is not None and self.grad_accumulation < 1:
            raise UserError(f"train.grad_accumulation={self.grad_accumulation} must be at least 1")
        if self.sample_tokens < 0:
            raise UserError(f"train.sample_tokens={self.sample_tokens} must be at least 0")
        if self.on_nan not in ("stop", "skip"):
            raise UserError(f"train.on_nan={self.on_nan} is unknown; choose stop or skip")
        if self.activation_checkpointing not in CHECKPOINTING:
            raise UserError(
                f"train.activation_checkpointing={self.activation_checkpointing} is unknown; choose one of "
                f"{', '.join(CHECKPOINTING)}"
            )
        if self.spike_factor is not None and not self.spike_factor > 1:
            raise UserError(f"train.spike_factor={self.spike_factor} must be above 1, or null")
        if self.global_batch_size is not None:
            self._divide_global_batch()
        if self.sequences > LARGEST_STEP:
            raise UserError(
                f"an optimizer step of {self.sequences} sequences is more than {LARGEST_STEP}; lower "
                "train.grad_accumulation or train.global_batch_size"
            )

    def _divide_global_batch(self) -> None:
        whole, part = self.global_batch_size, self.batch_size
        if whole < part or whole % part:
            nearest = max(1, round(whole / part)) * part
            raise UserError(
                f"train.global_batch_size={whole} is no multiple of train.batch_size={part}; "
                f"set train.global_batch_size={nearest}, or a train.batch_size that divides {whole}"
            )
        if self.grad_accumulation not in (None, whole // part):
            raise UserError(
                f"train.global_batch_size={whole} with train.batch_size={part} makes {whole // part} micro-steps, not "
                f"train.grad_accumulation={self.grad_accumulation}; leave one of the two out"
            )

    @property
    def micro_steps(self) -> int:
        """Forward and backward passes per optimizer step of one process that is alone."""
        if self.global_batch_size is not None:
            return self.global_batch_size // self.batch_size
        return self.grad_accumulation or 1

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step, however many processes share them."""
        return self.batch_size * self.micro_steps

    def share(self, processes: int) -> tuple[int, int]:
        """Sequences per micro-step, and micro-steps per optimizer step, of each of so many processes.

        The micro-steps are as few as make equal ones of at most batch_size sequences.

        Raises:
            UserError: the global batch does not divide.
        """
        mine, rest = divmod(self.sequences, processes)
        if rest or not mine:
            raise UserError(
                f"the global batch of {self.sequences} sequences does not divide among {processes} processes; set "
                f"train.global_batch_size={max(1, round(self.sequences / processes)) * processes} and a "
                "train.batch_size that divides it"
            )
        steps = next(n for n in range(-(-mine // self.batch_size), mine + 1) if mine % n == 0)
        return mine // steps, steps
