"""Rerun the batch of a recorded training step: python replay.py record=RUN/replay/step-00000100.json (help: --help)."""

import json
import math
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from conf.cli import launch, output_dir
from conf.schema import Config, ReplayConfig
from data.tokens import open_tokens
from errors import UserError, problem_of
from model.attention import restore_attention
from train import micro_step, train_step
from trainer.build import build_loader, check_fp8, compile_model, fix_randomness
from trainer.checkpoint.folder import newest_before, step_of
from trainer.distributed.world import refuse_several
from trainer.folders import write_text
from trainer.loading import load_model, saved_scales
from trainer.loggers import finite
from trainer.optimizer import build_optimizer
from trainer.precision import choose_compute
from trainer.state import TrainState
from trainer.watch import read_record


def replay(config: ReplayConfig) -> None:
    """Print loss and gradient norm of the recorded step's batch beside the run's, and write replay.json.

    They equal the run's bit for bit if the kernels are deterministic, the weights are from just before the step, and
    there is no dropout.
    """
    refuse_several("replay.py")
    recorded = read_record(Path(config.record))
    attention = restore_attention(recorded["config"]["attention"], config.function)
    run_config = recorded["config"] | {"attention": attention}
    settings: Config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), run_config))
    saved = settings.checkpoint.folder(Path(config.record).absolute().parent.parent)
    source = config.checkpoint or newest_before(saved, recorded["step"])
    if source is None:
        raise UserError(f"record={config.record} has no checkpoint in {saved}; give one as checkpoint=...")
    precision = settings.precision if config.precision.name == "auto" else config.precision
    compute, folder = choose_compute(config.device, precision), output_dir()
    tokens = open_tokens(settings.data)
    fix_randomness(settings.train)
    options = {"any_pairs": True, "fp8": compute.fp8}
    model, tokenizer, _ = load_model(source, settings.attention, settings.train.activation_checkpointing, **options)
    if tokenizer != tokens.tokenizer:
        raise UserError(
            f"checkpoint={source} was trained on {tokenizer} tokens, but record={config.record} has {tokens.tokenizer} "
            "tokens; give a checkpoint of the recorded run"
        )
    check_fp8(model.config, compute)
    model.to(compute.device)
    with build_loader(settings.train, tokens, model.config, compute) as loader:
        state = TrainState(model, build_optimizer(model, settings.optimizer), compute.grad_scaler(), loader, tokenizer)
        try:
            loader.load_state_dict(recorded["loader"])
        except UserError as error:
            remedy = "restore the data of the run, or give a checkpoint of the run"
            raise UserError(f"record={config.record} does not fit: {problem_of(error)}; {remedy}") from error
        if recorded["scaler"]:
            state.scaler.load_state_dict(recorded["scaler"])
        if compute.fp8:
            state.fp8_scales.load_state_dict(saved_scales(source))
        compiled = compile_model(model, settings.train, compute)
        step = partial(micro_step, compiled, state, settings, compute)
        loss, norm = train_step(compiled, step, state, settings, compute).tolist()
    loss_then, norm_then = (math.nan if x is None else x for x in (recorded["loss"], recorded["grad_norm"]))
    is_later = not config.checkpoint and step_of(Path(source)) > recorded["step"]
    print(
        f"the batch of step {recorded['step']} with {source}{' (of a later step)' if is_later else ''}, "
        f"{settings.attention.title} attention, {compute}: loss {loss:.6f} nats, gradient norm {norm:.6f}; in the run "
        f"{loss_then:.6f} and {norm_then:.6f}"
    )
    row = {"record": config.record, "checkpoint": str(source), "loss": finite(loss), "grad_norm": finite(norm)}
    write_text(folder / "replay.json", json.dumps(row, indent=2) + "\n")
    print(f"outputs in {folder}")


if __name__ == "__main__":
    launch(replay, "replay")
