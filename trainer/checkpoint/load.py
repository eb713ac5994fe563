"""Reading checkpoints: one of them, or the newest complete one of a folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from errors import UserError, is_out_of_memory
from model.attention import restore_pattern
from trainer.checkpoint.config import CheckpointConfig
from trainer.checkpoint.files import CheckpointError, State
from trainer.checkpoint.folder import candidates, find, read_checked
from trainer.checkpoint.sharded import read_parts
from trainer.distributed.world import World, print_in_first, restarts, started_by_submitit
from trainer.loggers.base import describe_changes

SHAPE = ("context_length", "n_layer", "n_head", "n_kv_head", "n_embd", "vocab_size")
"""The sizes of a model that a resumed run cannot change."""

TRAINING = ("attention.", "data.document_mask", "model.", "optimizer.", "precision.", "train.")
BESIDE_TRAINING = (
    *("train.max_steps", "train.eval_interval", "train.eval_tokens", "train.log_interval"),
    *("train.sample_tokens", "train.spike_factor", "train.timeout_s", "train.compile", "train.cuda_graphs"),
    *("train.activation_checkpointing", "train.reshard_after_forward"),
)
"""The settings of TRAINING that a finished run may change."""


def sizes_of(model_config: dict[str, object]) -> dict[str, object]:
    """Return the sizes in SHAPE. Checkpoints from before n_kv_head have n_head key heads."""
    sizes = model_config | {"n_kv_head": model_config.get("n_kv_head") or model_config["n_head"]}
    return {key: sizes[key] for key in SHAPE}


def load(
    source: str | Path, key: str = "checkpoint", tell: Callable[[str], None] = print_in_first, whole: bool = True
) -> State:
    """Return the state in a checkpoint or in the newest complete one of a folder, on the CPU, with its "path".

    Errors name the setting `key`. `tell` prints which newer checkpoints are damaged. With whole=False, the tensors of a
    sharded checkpoint stay on the disk, in the state's "folder".
    """
    refused: list[CheckpointError] = []
    for path in candidates(source):
        try:
            state = read_checked(path)
            if "parts" in state:
                state["folder"] = path
                state = read_parts(state) if whole else state
        except CheckpointError as error:
            refused.append(error)
            continue
        if refused:
            tell(f"{', '.join(map(str, refused))}; using {path} instead")
        state["path"] = str(path)
        return state
    if refused:
        raise UserError(f"{', '.join(map(str, refused))}; give another one with {key}=...")
    raise UserError(
        f"{key}={source} is neither a checkpoint nor a folder of checkpoints; give a step-*.pt or its folder"
        f"{', or null to start a new run' if key == 'checkpoint.resume' else ''}"
    )


def restore_pattern_of(state: State) -> None:
    """Let the checkpoint's matrix take the place of the file that its attention.pattern names.

    Call this if the run continues or the model is used. A new run from the weights has its own pattern.
    """
    if state.get("pattern") is not None:
        with of_this_version(state):
            pattern = state["config"]["attention"]["pattern"]
            if restore_pattern(pattern, state["pattern"]):
                print_in_first(f"attention.pattern={pattern} has changed; using the matrix in {state['path']}")


def load_resumed(settings: CheckpointConfig, output: Path, is_given: bool) -> State | None:
    """Return the checkpoint that checkpoint.resume names, or None.

    `is_given` says that the folder `output` is the same at the next start. The processes have not joined yet, because
    the checkpoint holds the settings for joining.
    """
    source, folder = settings.resume, settings.folder(output)
    if source != "auto" and restarts():
        print_in_first(
            "torchrun restarted the processes, and this run begins again; hydra.run.dir=FOLDER checkpoint.resume=auto "
            "continues from the newest checkpoint"
        )
    if source == "auto":
        # Slurm puts a job back into the queue with the same folder.
        if not (is_given or settings.dir or started_by_submitit()):
            raise UserError(
                "checkpoint.resume=auto needs a folder that is the same at every start; give hydra.run.dir=FOLDER, or "
                "hydra.sweep.dir=FOLDER with -m, or checkpoint.dir=FOLDER"
            )
        source = folder if find(folder) else None
    if source is None:
        return None
    state = load(source, key="checkpoint.resume", whole=False)
    restore_pattern_of(state)
    return state


def check_shared(state: State | None, world: World) -> None:
    """Refuse to go on if a process has found another checkpoint than the first one."""
    mine = state and state["path"]
    if (first := world.from_first(mine)) != mine:
        raise UserError(
            f"checkpoint.resume is {mine} in process {world.rank}, but {first} in the first process; put the "
            "checkpoints where all processes see them, or give one of them"
        )


def check_resumable(state: State, shape: dict[str, object], tokenizer: str) -> None:
    """Refuse to continue a checkpoint with another model or tokenizer."""
    source = state["path"]
    if state["tokenizer"] != tokenizer:
        raise UserError(
            f"checkpoint.resume={source} was trained on {state['tokenizer']} tokens, not on {tokenizer} tokens; choose "
            f"data of the {state['tokenizer']} tokenizer"
        )
    with of_this_version(state):
        saved, asked = sizes_of(state["model_config"]), sizes_of(shape)
    if differing := next((key for key in SHAPE if saved[key] != asked[key]), None):
        raise UserError(
            f"model.{differing}={asked[differing]}, but checkpoint.resume={source} has {saved[differing]}; set "
            f"model.{differing}={saved[differing]}"
        )


def check_finished(state: State | None, changes: dict[str, list], max_steps: int) -> None:
    """Refuse to change the settings of training if no step is left: the old curves would get the new settings."""
    untrained = {key: x for key, x in changes.items() if key.startswith(TRAINING) and key not in BESIDE_TRAINING}
    if untrained and state["step"] == max_steps:
        raise UserError(
            f"checkpoint.resume={state['path']} has trained all train.max_steps={max_steps} steps with other settings "
            f"({describe_changes(untrained)}); raise train.max_steps to train on with the new settings, leave them "
            "out, or start a new run in another folder"
        )


@contextmanager
def of_this_version(state: State) -> Iterator[None]:
    """Raise a CheckpointError if the code inside finds that a part of the state is missing or has another form."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error) or (isinstance(error, RuntimeError) and type(error) is not RuntimeError):
            raise  # a GPU or another process failed, not the checkpoint
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"{state['path']} is not from this version of the trainer ({why}); use the version that wrote it"
        ) from error
