"""Train a GPT-2 whose attention is one switch: python train.py attention=flash2 (help: python train.py --help).

Read it from top to bottom: main joins the processes, train assembles a run, loop takes steps, train_step shows a step.
"""

import time
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from conf.cli import given_keys, launch, output_dir, wandb_labels
from conf.commands import next_commands
from conf.resume import changed_settings, recorded, run_settings
from conf.schema import Config
from data.loader import document_options
from data.tokenizers import end_of_text
from data.tokens import TokenSet, open_tokens
from trainer.batch_size import check_batch_size, with_batch_size
from trainer.build import build_loader, build_meter, build_model, compile_model, fix_randomness, open_logs, run_shape
from trainer.checkpoint.files import State
from trainer.checkpoint.load import check_finished, check_shared
from trainer.checkpoint.policy import Checkpoints, check_folder, is_branch, open_checkpoints
from trainer.distributed.parallel import check_sharding, data_parallel, shard, synchronise_gradients
from trainer.distributed.world import ALONE, World, join
from trainer.evaluation import validate
from trainer.folders import claimed
from trainer.graphs import MicroStep, MicroStepGraphs, capture, check_graphs
from trainer.loading import load_weights
from trainer.loggers import Loggers, Metrics, check_loggers
from trainer.memory import explaining_out_of_memory
from trainer.optimizer import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from trainer.precision import Compute, choose_compute
from trainer.signals import StopRequest
from trainer.state import TrainState
from trainer.summary import describe, first_step_message, last_words, sample
from trainer.watch import Watch


def main(composed: DictConfig) -> None:
    """Join the processes that torchrun or Slurm started, and train. A resumed run takes its checkpoint's settings."""
    config, resumed = run_settings(composed)
    with join(config.parallel, config.device, config.train.timeout_s) as world:
        check_shared(resumed, world)
        folder = world.from_first(output_dir())
        with claimed({folder: "hydra.run.dir", config.checkpoint.folder(folder): "checkpoint.dir"}, world):
            stop = train(config, resumed, folder, world)
    stop.end_process()


def train(config: Config, resumed: State | None, folder: Path, world: World = ALONE) -> StopRequest:
    """Assemble a run from its settings, and train it. It leaves metrics, checkpoints and a sample in its folder."""
    began = time.monotonic()
    compute = choose_compute(config.device, config.precision, world)
    check_batch_size(config.train, compute)
    check_graphs(config.train, compute)
    check_sharding(config.optimizer.name, compute)
    config.wandb = check_loggers(config.wandb, config.tensorboard)
    saves_to, resumed_step = config.checkpoint.folder(folder), resumed["step"] if resumed else None
    check_folder(saves_to, resumed)
    branches = world.from_first(is_branch(folder, saves_to, resumed))
    tokens = world.first_ahead(lambda: open_tokens(config.data))  # the first process may have to make the files
    fix_randomness(config.train)
    config.model = run_shape(config.model, tokens, resumed, given_keys("model"))
    config.train = with_batch_size(config, compute, train_step, micro_step)
    changes = changed_settings(resumed["config"], recorded(config, compute)) if resumed else {}
    check_finished(resumed, changes, config.train.max_steps)
    model = build_model(config.model, config.attention, config.train, compute, config.data.document_mask)
    if config.model.pretrained is not None and not resumed:
        load_weights(model, config.model.pretrained, world)
    model = shard(model, compute, config.train.reshard_after_forward)
    optimizer = build_optimizer(model, config.optimizer)
    checkpoints = open_checkpoints(folder, config.checkpoint, model, optimizer, compute, config.train.timeout_s)
    with build_loader(config.train, tokens, config.model, compute) as loader:
        kept = {"config": recorded(config, compute), "world": world}
        state = TrainState(model, optimizer, compute.grad_scaler(), loader, tokens.tokenizer, **kept)
        world.draw_apart(config.train.seed + (resumed_step or 0))
        if resumed:
            state.load_state_dict(resumed)
            resumed.clear()  # 12 bytes of host memory per parameter
        options = {"max_steps": config.train.max_steps, "run_config": state.config, "resumed_step": resumed_step}
        options |= {"tensorboard": config.tensorboard, "wandb": config.wandb, "evaluated": state.evaluated}
        options |= {"labels": wandb_labels(config, compute.precision), "is_branch": branches}
        with (
            open_logs(folder, compute, changes, **options) as log,
            StopRequest(world) as stop,
            checkpoints.saving(state, log.message),
            explaining_out_of_memory(model, config.train, compute),
        ):
            parts = config.attention, config.train, config.optimizer, compute, config.data.document_mask
            log.message(describe(state, tokens, *parts, folder))
            log.settings_changed(state.step, state.tokens, changes)
            checkpoints.check_best(state, branches)
            watch = Watch(state, config.train, checkpoints, folder / "replay", log.message)
            loop(config, state, tokens, compute, checkpoints, watch, log, stop)
            # The processes must agree, because they sample together: a signal may reach one of them first.
            text = "" if stop.is_requested() else sample(model, tokens, config.train, compute) + "\n\n"
            places, seconds = (folder, checkpoints.newest), time.monotonic() - began
            commands = next_commands(config, *places, is_stopped=stop.signal is not None)
            log.summary(text + last_words(state, watch.loss, stop.signal, seconds, *places, commands))
    return stop


def loop(
    config: Config,
    state: TrainState,
    tokens: TokenSet,
    compute: Compute,
    checkpoints: Checkpoints,
    watch: Watch,
    log: Loggers,
    stop: StopRequest,
) -> None:
    """Take steps until train.max_steps or a signal; log, evaluate and save at their intervals."""
    settings = config.train
    model = data_parallel(compile_model(state.model, settings, compute), compute.world)
    step = partial(micro_step, model, state, config, compute)
    meter = build_meter(state.model, settings, state.loader, compute)

    def is_due(interval: int) -> bool:
        return state.step % interval == 0 or state.step == settings.max_steps

    def evaluate(row: Metrics) -> None:
        options = {"document_mask": config.data.document_mask, "is_stopped": stop.is_requested}
        if metrics := validate(model, tokens, config.model, settings, compute, **options):
            row |= metrics
            state.evaluated = state.step

    if state.evaluated < state.step and is_due(settings.eval_interval):
        with log.row(state.step, state.tokens) as row:
            evaluate(row)  # a signal cut this evaluation short in the run that is resumed
        checkpoints.save_if_best(state, row)
    while state.step < settings.max_steps and not stop.is_requested():
        began = time.perf_counter()
        watch.note(train_step(model, step, state, config, compute))
        state.step += 1
        if meter.step():  # the first step
            if state.step < settings.max_steps:
                with meter.excluded():
                    step = capture(step, state.model, config.model.context_length, settings, compute)
            seconds, as_graphs = time.perf_counter() - began, isinstance(step, MicroStepGraphs)
            log.message(first_step_message(seconds, settings, compute, as_graphs))
        with log.row(state.step, state.tokens) as row:
            if is_due(settings.log_interval):
                row |= watch.read() | meter.read() | state.fp8_scales.metrics()
            if is_due(settings.eval_interval):
                with meter.excluded():
                    watch.judge()
                    evaluate(row)
        if is_due(settings.eval_interval):
            with meter.excluded():
                checkpoints.save_if_best(state, row)
        if is_due(config.checkpoint.interval):
            with meter.excluded():
                watch.judge()  # now, because a resumed run does not see these steps again
                checkpoints.save(state)
    with log.row(state.step, state.tokens) as row:
        row |= watch.read()  # the last step, if a signal came between two rows
    checkpoints.save_last(state)


def train_step(model: nn.Module, step: MicroStep, state: TrainState, config: Config, compute: Compute) -> Tensor:
    """Take one optimizer step. Return the mean loss and the gradient norm, (2,) on the device.

    The loss is the mean over this process's sequences; the gradient is the mean over all processes.
    """
    _, micro_steps = config.train.share(compute.world.size)
    loss = torch.zeros((), device=compute.device)
    if not state.model.training:  # the check is cheaper than train(), which visits all modules (1 ms)
        model.train()
    for i, (inputs, targets) in enumerate(state.loader.next_batches(micro_steps)):
        synchronise_gradients(model, wanted=i == micro_steps - 1)
        loss += step(inputs, targets)
    norm = clip_gradients(state.optimizer, state.scaler, config.optimizer.grad_clip)
    set_learning_rate(state.optimizer, learning_rate(state.step, config.optimizer, config.train.max_steps))
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.fp8_scales.update()
    state.optimizer.zero_grad(set_to_none=True)
    return torch.stack((loss / micro_steps, norm))


def micro_step(
    model: nn.Module, state: TrainState, config: Config, compute: Compute, inputs: Tensor, targets: Tensor
) -> Tensor:
    """Run forward and backward on a micro-batch (B, T), which adds to the gradients, and return its loss."""
    _, micro_steps = config.train.share(compute.world.size)
    documents = document_options(inputs, end_of_text(config.data.tokenizer), config.data.document_mask)
    with compute.autocast():
        loss = model(inputs, targets, **documents)
    state.scaler.scale(loss / micro_steps).backward()
    return loss.detach()


if __name__ == "__main__":
    launch(main, "config", typed=False)
