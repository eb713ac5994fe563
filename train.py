"""Train a GPT-2 whose attention is one switch: python train.py attention=flash2 (see python train.py --help)."""

if __name__ == "__main__":
    from errors import before_imports

    before_imports()

import json
import math
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from conf.cli import chosen, is_output_dir_given, is_sweep, launch, output_dir, sweep_name
from conf.schema import Config
from data.loader import IGNORED, DataError, document_options, validation_batches
from data.tokenizers import end_of_text, get_tokenizer
from data.tokens import TokenSet, open_tokens
from errors import UserError, two_sentences
from model.attention import check_attention
from model.generate import generate
from model.gpt2 import GPT2, ModelConfig
from trainer.anomalies import IN_A_ROW, Watch, are_finite, read_record
from trainer.checkpoint import CheckpointError, Checkpoints, State
from trainer.distributed.parallel import data_parallel, shard, synchronise_gradients
from trainer.distributed.world import ALONE, World, join, started
from trainer.evaluation import perplexity, score
from trainer.folders import claimed, refuse_another_jobs
from trainer.graphs import MicroStepGraphs, are_graphs_wanted, check_graphs
from trainer.loading import load_model
from trainer.loggers import Loggers, WandbConfig, finite, start_loggers
from trainer.memory import out_of_memory
from trainer.optimizer import build_optimizer, learning_rate, optimizer_step
from trainer.parts import (
    build_loader,
    build_meter,
    build_model,
    compile_model,
    is_compiled,
    load_resumed,
    open_checkpoints,
    reset_process,
    tokens_in_step,
)
from trainer.precision import Compute, choose_compute
from trainer.signals import StopRequest
from trainer.state import TrainState


def main(config: Config) -> None:
    """Trains, or evaluates alone, or runs one batch again."""
    if config.eval_only and config.replay is not None:
        raise UserError(f"eval_only=true and replay={config.replay} are two things to do; leave one of them out")
    if config.eval_only:
        return evaluate_only(config)
    if config.replay is not None:
        return replay(config)
    if config.checkpoint.load is not None:
        raise UserError(
            f"checkpoint={config.checkpoint.load} is what eval_only=true evaluates; to train on from it set "
            "checkpoint.resume, or model.pretrained for Hugging Face weights"
        )
    with join(config.parallel, config.device, config.train.timeout_s) as world:
        train(config, world)


def train(config: Config, world: World = ALONE) -> None:
    """One run: from its configuration to metrics, checkpoints and a sample of what was learnt."""
    compute, folder = choose_compute(config.device, config.precision, world), world.from_first(output_dir())
    config.train.share(world.size)  # refused here, if it is to be
    check_graphs(config.train, compute)
    tokens = world.first_ahead(lambda: open_tokens(config.data))
    where = Path(config.checkpoint.dir or folder / "checkpoints")
    if is_sweep() and config.checkpoint.resume == "auto":
        refuse_another_jobs(where, folder)
    resumed = load_resumed(config, where, bool(config.checkpoint.dir) or is_output_dir_given(), world)
    writes_to = {folder: "hydra.run.dir", where: "checkpoint.dir"} if world.is_first else {}
    reset_process(config.train, compute)
    model = shard(build_model(config, compute, tokens, resumed), compute, config.train.reshard_after_forward)
    checkpoints = open_checkpoints(where, config.checkpoint, model, compute, config.train.timeout_s)
    with build_loader(config, compute, tokens, model) as loader, ExitStack() as own:
        world.agreed(lambda: own.enter_context(claimed(writes_to)))
        resumed_step = resumed["step"] if resumed else None
        checkpoints.refuse_later_than(resumed_step or 0)
        optimizer = build_optimizer(model, config.optimizer)
        state = TrainState(model, optimizer, compute.grad_scaler(), loader, tokens.tokenizer, config=asdict(config))
        if resumed:
            state.load_state_dict(resumed)
            del resumed  # 12 bytes of the host's memory a parameter
        world.draw_apart(config.train.seed + state.step)
        logs = world.agreed(lambda: open_logs(config, compute, folder, resumed_step))
        with logs as log, StopRequest() as stop, checkpoints.saving(log.message):
            if world.is_first:
                OmegaConf.save(OmegaConf.structured(config), folder / "config.yaml")
            log.message(describe(config, compute, state, tokens))
            watch = Watch(folder / "replay", config.train.spike_factor, state.norms, writes=world.is_first)
            path = guarded(Run(config, compute, state, tokens, checkpoints, watch, log, stop))
            if not world.is_stopped(stop):
                log.message(sample(config, compute, model, tokens))
            else:
                log.message(f"{stop.signal.name} after step {state.step}; continue with checkpoint.resume={path}")
            log.message(f"outputs in {folder}")
    if stop.signal is not None:
        stop.end_process()


def open_logs(config: Config, compute: Compute, folder: Path, resumed_step: int | None) -> Loggers:
    """The loggers of the run, which are the first process's."""
    if not compute.world.is_first:
        return Loggers([])
    return start_loggers(
        folder,
        max_steps=config.train.max_steps,
        wandb=label(config, compute),
        run_config=asdict(config),
        resumed_step=resumed_step,
    )


def label(config: Config, compute: Compute) -> WandbConfig:
    """The settings of wandb, with a group and tags by which variants compare where the user names none."""
    group, tags = config.wandb.group, config.wandb.tags
    if tags is None:
        tags = [config.attention.name, chosen("model"), config.data.name, compute.precision]
    return replace(config.wandb, group=sweep_name() if group is None else group, tags=tags)


@dataclass
class Run:
    """What the loop of a run works with."""

    config: Config
    compute: Compute
    state: TrainState
    tokens: TokenSet
    checkpoints: Checkpoints
    watch: Watch
    log: Loggers
    stop: StopRequest


def guarded(run: Run) -> Path:
    """The checkpoint that the loop ends with, if the data hold and the memory suffices.

    Raises:
        UserError: they do not; it names the remedy, and what was saved or, by a process that is alone, found out.
    """
    compute, state, settings = run.compute, run.state, run.config.train
    try:
        return loop(run)
    except DataError as error:
        raise UserError(f"{error} {told_of_saving(run)}") from error
    except torch.OutOfMemoryError as error:
        told = two_sentences(error)  # not the error, whose traceback holds what fills the memory
    raise UserError(out_of_memory(told, state.model, state.optimizer, compute, settings))


def loop(run: Run) -> Path:
    """Steps until max_steps or a request to stop, and between them metrics, evaluations and checkpoints.

    Returns the checkpoint of the last step.
    """
    config, compute, state, log = run.config, run.compute, run.state, run.log
    settings, tokens_per_step = config.train, tokens_in_step(config.train, state.model.config)
    model = data_parallel(compile_model(state.model, settings, compute), compute.world)
    meter = build_meter(state.model, tokens_per_step, compute, config.attention)
    window: list[Tensor] = []  # loss and gradient norm of every step since the last row, still on the device
    path, saved_step, compiling, graphs = None, None, True, None
    unlogged: dict[str, float] = {}  # metrics of the newest step, where it is judged and in no row
    is_cut_short = state.evaluated < state.step and is_due(state.step, settings.eval_interval, settings.max_steps)
    if is_cut_short and (metrics := validate(run, model)):
        log.log(state.step, state.tokens, metrics)
    while state.step < settings.max_steps and not compute.world.is_stopped(run.stop):
        began = time.perf_counter()
        result, data_wait = train_step(model, state, config, compute, graphs)
        window.append(result)
        state.step += 1
        if compiling:
            meter.start()
            if state.step < settings.max_steps:
                with meter.excluded():
                    graphs = capture(model, state, config, compute)
            compiled = ", compilation included" if is_compiled(settings, compute) else ""
            followed = "; the next ones are CUDA graphs" if graphs else ""
            log.message(f"first step in {time.perf_counter() - began:.1f} s{compiled}{followed}")
            compiling = False
        else:
            meter.step(data_wait)

        intervals = settings.eval_interval, config.checkpoint.interval
        evaluates, saves = (is_due(state.step, interval, settings.max_steps) for interval in intervals)
        metrics = {}
        if is_due(state.step, settings.log_interval, settings.max_steps):
            metrics = read_window(run, window) | meter.read()
            window, unlogged = [], {}
        elif evaluates or saves:
            unlogged = read_window(run, window)  # or a checkpoint would have steps that nobody judges after a kill
            window = []
        try:
            if evaluates:
                with meter.excluded():
                    metrics |= validate(run, model)
        finally:  # an evaluation that fails does not cost what the step itself came to
            if metrics:
                log.log(state.step, state.tokens, metrics)
        if saves:
            with meter.excluded():
                if saved := attempt(run):
                    path, saved_step = saved, state.step
    if window:
        unlogged = read_window(run, window)
    if unlogged:
        log.log(state.step, state.tokens, unlogged)
    if saved_step != state.step:
        return save(run)
    compute.world.agreed(run.checkpoints.settle)
    return path


def validate(run: Run, model: nn.Module) -> dict[str, float]:
    """Loss and perplexity of validation after the last step, saved if it is the best so far; see evaluate."""
    state = run.state
    metrics = evaluate(model, state.model.config, run.config, run.compute, run.tokens, run.stop)
    if metrics:
        state.evaluated = state.step
    if metrics.get("val/loss", math.inf) < state.best_loss:
        state.best_loss = metrics["val/loss"]
        attempt(run, is_best=True)
    return metrics


def save(run: Run) -> Path:
    """The checkpoint of the state, which is whole when this returns in any process.

    Raises:
        CheckpointError: the disk refused it, or as sound_state says; in all processes alike.
    """

    def act() -> Path:
        try:
            run.checkpoints.settle()
        except CheckpointError as error:  # of what was under way, for which this one must not suffer
            run.log.message(str(error))
        path = run.checkpoints.save(run.state.step, sound_state(run))
        run.checkpoints.settle()
        return path

    return run.compute.world.agreed(act)


def sound_state(run: Run) -> State:
    """The state to be saved.

    Raises:
        CheckpointError: weights are not finite, as a step of too high a rate leaves them; in all processes alike.
    """
    if run.compute.world.sum(torch.tensor(0 if are_finite(run.state.model) else 1)):
        told = f"the weights are not finite after step {run.state.step}, and are not saved; lower optimizer.lr"
        raise CheckpointError(f"{told}, and {run.checkpoints.remedy()}")
    return run.state.state_dict()


def told_of_saving(run: Run) -> str:
    """Saves the state of a run that ends early, and tells where, or why not."""
    try:
        return f"The state is saved in {save(run)}."
    except CheckpointError as error:
        return f"The state is lost: {error}."


def attempt(run: Run, is_best: bool = False) -> Path | None:
    """Saves the state, or begins to when the save before it is done; None where the disk refused it.

    Raises:
        CheckpointError: it refused this or the one before, or as sound_state says, and checkpoint.on_error=stop.
    """
    path, checkpoints, step = None, run.checkpoints, run.state.step
    write = checkpoints.save_best if is_best else partial(checkpoints.save, step)
    for act in (lambda: checkpoints.settle(before=step), lambda: write(sound_state(run))):
        try:
            path = run.compute.world.agreed(act)  # or those that go on would wait for the one that does not
        except CheckpointError as error:
            if run.config.checkpoint.on_error == "stop":
                raise
            run.log.message(f"{error}; training goes on, as checkpoint.on_error=continue")
    return path


def is_due(step: int, interval: int, max_steps: int) -> bool:
    return step % interval == 0 or step == max_steps


def train_step(
    model: nn.Module, state: TrainState, config: Config, compute: Compute, graphs: MicroStepGraphs | None = None
) -> tuple[Tensor, float]:
    """One optimizer step. The mean loss and the gradient norm, (2,) on the device, and the seconds spent on data.

    The loss is of this process's share of the global batch, the gradient of the whole.
    """
    _, micro_steps = config.train.share(compute.world.size)
    run = graphs or partial(micro_step, model, state, config, compute)
    loss_sum = torch.zeros((), device=compute.device)
    if not state.model.training:  # asked first, since it goes over all modules: 1 ms of the host
        model.train()
    asked = time.perf_counter()
    batches = state.loader.next_batches(micro_steps, compute.world.agreed)
    data_wait = time.perf_counter() - asked
    for i, (inputs, targets) in enumerate(batches):
        synchronise_gradients(model, wanted=i == micro_steps - 1)
        loss_sum += run(inputs, targets)
    lr = learning_rate(state.step, config.optimizer, config.train.max_steps)
    norm = optimizer_step(state.optimizer, state.scaler, lr, config.optimizer.grad_clip)
    return torch.stack((loss_sum / micro_steps, norm)), data_wait


def micro_step(
    model: nn.Module, state: TrainState, config: Config, compute: Compute, inputs: Tensor, targets: Tensor
) -> Tensor:
    """The loss of a micro-batch, whose part of the step's gradient is added to the others'."""
    _, micro_steps = config.train.share(compute.world.size)
    options = document_options(inputs, end_of_text(config.data.tokenizer), config.data.document_mask)
    with compute.autocast():
        loss = model(inputs, targets, **options)
    state.scaler.scale(loss / micro_steps).backward()
    return loss.detach()


def capture(model: nn.Module, state: TrainState, config: Config, compute: Compute) -> MicroStepGraphs | None:
    """The micro-steps of the steps to come as CUDA graphs, if they are to be; after a step, which tells what it takes.

    Raises:
        UserError: they cannot be.
    """
    if not are_graphs_wanted(config.train, compute):
        return None
    shape = config.train.batch_size, state.model.config.context_length
    captured = partial(micro_step, model, state, config, compute)
    return MicroStepGraphs(captured, state.model, shape, accumulates=config.train.micro_steps > 1)


@torch.no_grad()
def evaluate(
    model: nn.Module, shape: ModelConfig, config: Config, compute: Compute, tokens: TokenSet, stop: StopRequest
) -> dict[str, float]:
    """Loss and perplexity over the run's fixed validation tokens, of which each process reads its part.

    Nothing where a process is asked to stop meanwhile: the grace that it has is to save in.
    """
    model.eval()
    batches = validation_batches(
        tokens.val,
        batch_size=config.train.share(compute.world.size)[0],
        context_length=shape.context_length,
        max_tokens=config.train.eval_tokens,
        device=compute.device,
        vocab_size=shape.vocab_size,
        name=str(tokens.dir / "val.bin"),
        rank=compute.world.rank,
        ranks=compute.world.size,
    )
    total, count = torch.zeros(2, dtype=torch.float64, device=compute.device)
    while batch := compute.world.agreed(lambda: next(batches, None)):
        if compute.world.is_stopped(stop):
            return {}
        inputs, targets = batch
        options = document_options(inputs, end_of_text(config.data.tokenizer), config.data.document_mask)
        counted = (targets != IGNORED).sum()
        with compute.autocast():
            loss = model(inputs, targets, **options)
        total += torch.where(counted > 0, loss * counted, 0)  # without a target the mean loss is no number
        count += counted
    total, count = compute.world.sum(torch.stack((total, count))).tolist()
    loss = total / count
    return {"val/loss": loss, "val/perplexity": perplexity(loss)}


def evaluate_only(config: Config) -> None:
    """Prints loss and perplexity of a trained model over all validation tokens, and writes evaluation.json."""
    if config.checkpoint.load is None:
        raise UserError("eval_only=true needs a model; give checkpoint=FILE, a run's folder, or a Hugging Face GPT-2")
    refuse_several("eval_only=true")
    compute, folder = choose_compute(config.device, config.precision), output_dir()
    tokens = open_tokens(config.data)
    model, tokenizer = load_model(config.checkpoint.load, config.attention)
    shape = model.config
    if tokenizer != tokens.tokenizer:
        raise UserError(
            f"checkpoint={config.checkpoint.load} was trained on {tokenizer} tokens, and {tokens.dir} holds "
            f"{tokens.tokenizer} tokens; prepare the data with data.tokenizer={tokenizer}"
        )
    documents = config.data.document_mask
    context, stride = config.evaluation.sizes(shape.context_length)
    kind = {"head_dim": shape.head_dim, "dtype": compute.dtype, "dropout_p": 0.0, "documents": documents}
    check_attention(config.attention, device=compute.device, context_length=context, **kind)
    sizes = {"context": context, "stride": stride, "batch": config.train.batch_size}
    options = {"compute": compute, "document_mask": documents, "name": str(tokens.dir / "val.bin")}
    result = score(model.to(compute.device), tokens.val, get_tokenizer(tokenizer), **sizes, **options)
    print(
        f"{tokens.dir / 'val.bin'} by {config.checkpoint.load}, {config.attention.name} attention, {compute}, context "
        f"{context}, stride {stride}:\n"
        f"loss {result.loss:.4f} nats, perplexity {result.perplexity:.3f} over {result.tokens:,} tokens; "
        f"{result.word_perplexity:.3f} per word, over {result.words:,} words"
    )
    metrics = {"val/loss": result.loss, "val/perplexity": result.perplexity, "tokens": result.tokens}
    metrics |= {"val/word_perplexity": result.word_perplexity, "words": result.words} | sizes
    where = {"checkpoint": config.checkpoint.load, "data": str(tokens.dir), "attention": config.attention.name}
    where |= {key: finite(value) for key, value in metrics.items()}
    (folder / "evaluation.json").write_text(json.dumps(where, indent=2, allow_nan=False) + "\n")
    print(f"outputs in {folder}")


def refuse_several(setting: str) -> None:
    """UserError where more than one process was started for what one does."""
    if (size := started()[1]) > 1:
        raise UserError(f"{setting} takes one process, and {size} were started; start it with python train.py")


def replay(config: Config) -> None:
    """Prints loss and gradient norm of a recorded step's batch, and writes replay.json.

    They are those of the run, to the bit where its kernels are deterministic, if the weights are those from just before
    the step and there is no dropout.
    """
    refuse_several("replay=...")
    recorded = read_record(Path(config.replay))
    settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), recorded["config"]))
    source = config.checkpoint.load or recorded["checkpoint"]
    if source is None or not (config.checkpoint.load or Path(source).exists()):
        raise UserError(
            f"replay={config.replay} names no checkpoint that exists ({source}); give one by checkpoint=..."
        )
    asked = settings.precision if config.precision.name == "auto" else config.precision
    compute, folder = choose_compute(config.device, asked), output_dir()
    tokens = open_tokens(settings.data)
    reset_process(settings.train, compute)
    model, tokenizer = load_model(source, settings.attention, settings.train.activation_checkpointing, any_pairs=True)
    model.to(compute.device)
    with build_loader(settings, compute, tokens, model) as loader:
        state = TrainState(model, build_optimizer(model, settings.optimizer), compute.grad_scaler(), loader, tokenizer)
        loader.load_state_dict(recorded["loader"])
        if recorded["scaler"]:
            state.scaler.load_state_dict(recorded["scaler"])
        result, _ = train_step(compile_model(model, settings.train, compute), state, settings, compute)
    loss, norm = result.tolist()
    in_run = [math.nan if x is None else x for x in (recorded["loss"], recorded["grad_norm"])]
    print(
        f"the batch of step {recorded['step']} by {source}, {settings.attention.name} attention, {compute}: loss "
        f"{loss:.6f} nats, gradient norm {norm:.6f}; in the run {in_run[0]} and {in_run[1]}"
    )
    found = {"loss": finite(loss), "grad_norm": finite(norm)}
    result = {"replay": config.replay, "checkpoint": str(source)} | found
    (folder / "replay.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"outputs in {folder}")


def read_window(run: Run, window: list[Tensor]) -> dict[str, float]:
    """The metrics of the newest step, once all since the last row are judged.

    Raises:
        UserError: as judge says.
    """
    state, config = run.state, run.config
    rows = run.compute.world.mean(torch.stack(window)).tolist()
    for step, (loss, norm) in enumerate(rows, start=state.step - len(rows) + 1):
        judge(run, step, loss, norm)
    loss, norm = rows[-1]
    skipped = {"train/skipped_steps": state.skipped} if config.train.on_nan == "skip" else {}
    return skipped | {
        "train/loss": loss,
        "train/perplexity": perplexity(loss),
        "train/grad_norm": norm,
        "train/lr": learning_rate(state.step - 1, config.optimizer, config.train.max_steps),
    }


def judge(run: Run, step: int, loss: float, norm: float) -> None:
    """Records and tells of a step that was not finite, or whose gradient norm was a spike.

    Raises:
        UserError: it was not finite, and train.on_nan=stop or too many were in a row; the state, which no such step has
            touched, is saved first, if the disk takes it.
    """
    state, settings, watch = run.state, run.config.train, run.watch
    broken, spike = watch.is_broken(loss, norm, state.scaler.is_enabled()), watch.spike(norm)
    if not broken and spike is None:
        return
    stops = broken and (settings.on_nan == "stop" or watch.in_a_row == IN_A_ROW)
    saved = told_of_saving(run) if stops else None
    weights = run.checkpoints.before(step)
    file = watch.record(step, loss, norm, state=state, windows=settings.sequences, weights=weights)
    told = f"the loss was {loss:.6g} and the gradient norm {norm:.6g} at step {step}"
    by = "" if weights else " checkpoint=..., there being none from before it"
    look = f"look at it with python train.py replay={file}{by}" if file else "the disk refused a record of it"
    if stops:
        raise UserError(f"{told}; the weights took no such step. {saved} Lower optimizer.lr, or check the data: {look}")
    if spike is not None:
        run.log.message(f"{told}, {spike:,.1f} times the usual; {look}")
    if broken:
        state.skipped += 1
        run.log.message(f"{told}; the weights did not take it, as train.on_nan=skip ({state.skipped} so far); {look}")


def describe(config: Config, compute: Compute, state: TrainState, tokens: TokenSet) -> str:
    """What is about to be trained, on what and where, in a few lines."""
    shape, settings = state.model.config, config.train
    attention = config.attention.name + (f" ({config.attention.backend})" if config.attention.name == "sdpa" else "")
    start = f"continuing after step {state.step}" if state.step else "starting"
    launched = f"flash2 launches {explain_attention(config, compute, shape)}\n" if attention == "flash2" else ""
    return (
        f"GPT-2 of {sum(p.numel() for p in state.model.parameters()) / 1e6:.1f}M parameters: {shape.n_layer} layers, "
        f"width {shape.n_embd}, {shape.n_head} heads, context {shape.context_length}; {attention} attention; "
        f"{compute}\n"
        f"{launched}"
        f"{tokens.dir}: {len(tokens.train):,} training and {len(tokens.val):,} validation tokens ({tokens.tokenizer})\n"
        f"{start}, to step {settings.max_steps} of {tokens_in_step(settings, shape):,} tokens"
    )


def explain_attention(config: Config, compute: Compute, shape: ModelConfig) -> str:
    """Which kernels flash2 runs here."""
    if compute.device.type == "cpu":
        return "its PyTorch definition"
    from kernels.flash2.launch import arch_of, explain  # needs Triton

    deterministic = config.attention.deterministic or config.train.deterministic
    where = shape.context_length, arch_of(compute.device)
    return explain(shape.head_dim, compute.dtype, True, *where, shape.dropout, deterministic, config.data.document_mask)


def sample(config: Config, compute: Compute, model: GPT2, tokens: TokenSet) -> str:
    """A few lines of what the model has learnt, begun from the end-of-text token."""
    if not config.train.sample_tokens:
        return "no sample, as train.sample_tokens=0"
    try:
        tokenizer = compute.world.agreed(lambda: get_tokenizer(tokens.tokenizer))
    except UserError as error:
        return f"no sample: {error}"
    model.eval()
    # Blocks that are compiled one by one, as under fsdp, would be compiled anew for each layer, and for each length.
    with compute.autocast(), torch.compiler.set_stance("force_eager"):
        text = generate(
            model,
            [tokenizer.eot],
            max_tokens=config.train.sample_tokens,
            temperature=0.8,
            top_k=200,
            generator=torch.Generator().manual_seed(config.train.seed),
            stop=tokenizer.eot,
            vocab_size=tokenizer.vocab_size,
        )
        return "a sample:\n" + tokenizer.decode(text)


if __name__ == "__main__":
    launch(main, "config", short={"checkpoint": "checkpoint.load"})
