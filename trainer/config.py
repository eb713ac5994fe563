"""The settings of the loop (group `train`)."""

from dataclasses import dataclass

from errors import UserError, check_choice, check_range
from model.gpt2 import CHECKPOINTING

AUTO = "auto"
LARGEST_STEP = 2**24  # sequences, which are all read before the step begins
POSITIVE = ("grad_accumulation", "eval_interval", "eval_tokens", "log_interval")
BOUNDS = {key: (1, None) for key in POSITIVE} | {
    "batch_size": (1, 2**20),  # the loader draws the sequences one by one
    "max_steps": (1, 10**8 - 1),  # the names of checkpoints have eight digits
    "seed": (0, 2**32 - 1),
    "sample_tokens": (0, None),
    "timeout_s": (1, 365 * 24 * 3600),
}


@dataclass
class TrainConfig:
    """The loop."""

    batch_size: int | str = 8
    """Sequences per device and micro-step; fewer if several processes share a smaller global batch. auto: the largest
    number that fits on the GPU, see trainer/batch_size.py. The run's settings then hold the number."""
    grad_accumulation: int | None = None
    """Micro-steps per optimizer step of one process; null is 1, or what train.global_batch_size asks for. Several
    processes share batch_size times grad_accumulation sequences."""
    global_batch_size: int | None = None
    """Sequences per optimizer step, of all processes together; another way to give grad_accumulation."""
    max_steps: int = 1200
    """Optimizer steps in all."""
    eval_interval: int = 200
    """Steps between two evaluations. The last step is evaluated too."""
    eval_tokens: int = 65536
    """Validation tokens of an evaluation, always the same; preferably a multiple of batch_size times context_length."""
    log_interval: int = 25
    """Steps between two rows of metrics."""
    seed: int = 1337
    """Seed of the weights, the order of the data and dropout."""
    compile: bool | None = None
    """torch.compile the model. null is true on a GPU and false on a CPU: there, compiling takes longer than a short
    run."""
    cuda_graphs: bool | None = None
    """Run micro-steps as CUDA graphs. Small micro-batches are faster with graphs. null is true for a compiled model on
    a GPU, in one process and without full activation checkpointing, if the free GPU memory holds a second step."""
    activation_checkpointing: str = "none"
    """Activations that the backward pass recomputes. none stores all activations. selective recomputes the output of
    GELU: it saves a quarter of the activations and takes about 1 % more time. full recomputes whole blocks except their
    attention: the same memory then holds several times the context or batch."""
    deterministic: bool = False
    """Use only deterministic kernels, so that a resumed run on a GPU repeats bit for bit; slower."""
    on_nan: str = "stop"
    """After a step whose loss or gradient is not finite: stop, or skip the step. The weights never take such a step,
    and ten in a row always stop the run."""
    spike_factor: float | None = 10.0
    """Record a step for replay if its gradient norm is above this many times the median of the last hundred; null
    records none."""
    sample_tokens: int = 200
    """Length of the sample at the end of a run, in tokens; 0 for none."""
    reshard_after_forward: bool = True
    """For parallel=fsdp and hsdp: free a block's gathered weights after its forward pass and gather them again for its
    backward pass. false is faster and needs memory for all weights in the dtype of the matrix products."""
    timeout_s: int = 600
    """Seconds that a process waits for the other processes, also while one of them writes a checkpoint."""

    def __post_init__(self):
        if isinstance(self.batch_size, str) and self.batch_size != AUTO:
            raise UserError(f"train.batch_size={self.batch_size} is not a number; set a number, or auto on a GPU")
        for key, bounds in BOUNDS.items():
            if getattr(self, key) != AUTO:
                check_range(f"train.{key}", getattr(self, key), *bounds)
        check_choice("train.on_nan", self.on_nan, ("stop", "skip"))
        check_choice("train.activation_checkpointing", self.activation_checkpointing, CHECKPOINTING)
        if self.spike_factor is not None and not self.spike_factor > 1:
            raise UserError(f"train.spike_factor={self.spike_factor} is not above 1; give a larger number, or null")
        if self.batch_size == AUTO:
            return  # the number is checked when it is known
        if self.global_batch_size is not None:
            self._check_global_batch()
        if self.sequences > LARGEST_STEP:
            raise UserError(
                f"train.batch_size={self.batch_size} in {self.micro_steps} micro-steps makes {self.sequences} "
                f"sequences per optimizer step, and the most is {LARGEST_STEP}; lower train.grad_accumulation or "
                "train.global_batch_size"
            )

    def _check_global_batch(self) -> None:
        whole, part = self.global_batch_size, self.batch_size
        if whole < part or whole % part:
            nearest = max(1, round(whole / part)) * part
            raise UserError(
                f"train.global_batch_size={whole} is not a multiple of train.batch_size={part}; "
                f"set train.global_batch_size={nearest}, or a train.batch_size that divides {whole}"
            )
        if self.grad_accumulation not in (None, whole // part):
            raise UserError(
                f"train.global_batch_size={whole} with train.batch_size={part} makes {whole // part} micro-steps, not "
                f"train.grad_accumulation={self.grad_accumulation}; set train.grad_accumulation=null"
            )

    @property
    def micro_steps(self) -> int:
        """Micro-steps per optimizer step of a single process."""
        if self.global_batch_size is not None:
            return self.global_batch_size // self.batch_size
        return self.grad_accumulation or 1

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step, of all processes together."""
        return self.batch_size * self.micro_steps

    def share(self, processes: int) -> tuple[int, int]:
        """Return each process's sequences per micro-step and micro-steps per optimizer step.

        There are as few micro-steps as possible. All have the same size, at most batch_size.
        """
        mine, rest = divmod(self.sequences, processes)
        if rest or not mine:
            given = "train.global_batch_size"
            if self.global_batch_size is None:
                given = "train.batch_size" if self.micro_steps == 1 else "train.batch_size x train.grad_accumulation"
            raise UserError(
                f"{given}={self.sequences} does not divide among {processes} processes; set "
                f"train.global_batch_size={max(1, round(self.sequences / processes)) * processes} and a "
                "train.batch_size that divides it"
            )
        steps = next(n for n in range(-(-mine // self.batch_size), mine + 1) if mine % n == 0)
        return mine // steps, steps
