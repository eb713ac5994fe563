"""Reading checkpoints: one of them, or the newest complete one of a folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from errors import UserError, is_of_memory
from model.attention import restore_pattern
from trainer.checkpoint.files import CheckpointError, State
from trainer.checkpoint.folder import candidates, find, read_checked
from trainer.checkpoint.sharded import read_parts
from trainer.distributed.world import ALONE, World, is_of_submitit, restarts

SHAPE = ("context_length", "n_layer", "n_head", "n_embd", "vocab_size")  # a resumed run cannot change these


def load(source: str | Path, key: str = "checkpoint", tell: Callable[[str], None] = print, whole: bool = True) -> State:
    """Return the state in a checkpoint or in the newest complete one of a folder, on the CPU, with its "path".

    Errors name the setting `key`. `tell` prints which newer checkpoints are damaged. With whole=False, the tensors of a
    sharded checkpoint stay on the disk, in the state's "folder".
    """
    refused: list[CheckpointError] = []
    for path in candidates(source):
        try:
            state = read_checked(path)
            if "parts" in state:
                state |= {"folder": path}
                state = read_parts(state) if whole else state
        except CheckpointError as error:
            refused.append(error)
            continue
        if refused:
            tell(f"{'; '.join(map(str, refused))}; using {path} instead")
        state |= {"path": str(path)}
        if state.get("pattern") is not None:  # it takes the place of the file that attention.pattern names
            with of_this_version(state):
                pattern = state["config"]["attention"]["pattern"]
                if restore_pattern(pattern, state["pattern"]):
                    tell(f"attention.pattern={pattern} has changed; using the matrix in {path}")
        return state
    if refused:
        raise UserError(f"{'; '.join(map(str, refused))}; give another one with {key}=")
    raise UserError(
        f"{key}={source} is neither a checkpoint nor a folder of checkpoints; give a step-*.pt or its folder"
    )


def load_resumed(
    source: str | None, folder: Path, is_given: bool, max_steps: int, world: World = ALONE
) -> State | None:
    """Return the checkpoint that checkpoint.resume=`source` names, the same for all processes, or None.

    `folder` holds this run's own checkpoints. `is_given` says that it is the same at the next start.
    """
    if source != "auto" and restarts() and world.is_first:
        print(
            "torchrun restarted the processes, and this run begins again; hydra.run.dir=FOLDER checkpoint.resume=auto "
            "continues from the newest checkpoint"
        )
    if source == "auto":
        if not is_given and not is_of_submitit():  # Slurm puts a job back into the queue with the same folder
            raise UserError(
                "checkpoint.resume=auto needs a folder that is the same at every start; give hydra.run.dir=FOLDER, or "
                "hydra.sweep.dir=FOLDER with -m, or checkpoint.dir=FOLDER"
            )
        source = world.from_first(folder if find(folder) else None)
    if source is None:
        return None
    tell = print if world.is_first else lambda text: None
    state = load(source, key="checkpoint.resume", tell=tell, whole=not world.is_sharded)
    if state["step"] > max_steps:
        raise UserError(
            f"checkpoint.resume={state['path']} is at step {state['step']}, past train.max_steps={max_steps}; raise "
            "train.max_steps, or resume from an earlier checkpoint"
        )
    return state


def check_resumable(state: State, shape: dict[str, object], tokenizer: str) -> None:
    """Refuse to continue a checkpoint with another model or tokenizer."""
    source = state["path"]
    if state["tokenizer"] != tokenizer:
        raise UserError(
            f"checkpoint.resume={source} was trained on {state['tokenizer']} tokens, not on {tokenizer} tokens; choose "
            f"data of the {state['tokenizer']} tokenizer"
        )
    with of_this_version(state):
        saved = {key: state["model_config"][key] for key in SHAPE}
    if differing := next((key for key in SHAPE if saved[key] != shape[key]), None):
        raise UserError(
            f"model.{differing}={shape[differing]}, but checkpoint.resume={source} has {saved[differing]}; set "
            f"model.{differing}={saved[differing]}"
        )


@contextmanager
def of_this_version(state: State) -> Iterator[None]:
    """Raise a CheckpointError if the code inside finds a state of `load` without a part, or with another form of it."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if is_of_memory(error) or (isinstance(error, RuntimeError) and type(error) is not RuntimeError):
            raise  # a GPU or another process failed, not the checkpoint
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"{state['path']} is not from this version of the trainer ({why}); use the version that wrote it"
        ) from error
