import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

import conf
from conf.schema import (
    Config,
    EvaluateConfig,
    ExportConfig,
    PrepareConfig,
    ReplayConfig,
    SampleConfig,
    TrainConfig,
    register,
)
from errors import UserError
from model.attention import VARIANTS
from trainer.optimizer import learning_rate

FOLDER = Path(conf.__file__).parent
OPTIONS = [f"{path.parent.name}={path.stem}" for path in sorted(FOLDER.glob("*/*.yaml"))]
ROOTS = {
    "config": Config,
    "prepare": PrepareConfig,
    "inspect": PrepareConfig,
    "sample": SampleConfig,
    "evaluate": EvaluateConfig,
    "replay": ReplayConfig,
    "export": ExportConfig,
}


def composed(*overrides: str, name: str = "config"):
    """Return the configuration of a program for this command line."""
    register()
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        return OmegaConf.to_object(compose(name, list(overrides)))


def assert_holds(config: object, chosen: dict) -> None:
    """Assert that the typed configuration holds every value that a YAML file gives."""
    for key, value in chosen.items():
        if isinstance(value, dict):
            assert_holds(getattr(config, key), value)
        elif value != "???":
            assert getattr(config, key) == value, key


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_gives_a_typed_configuration_that_holds_it(option):
    group, _, name = option.partition("=")
    own = ["attention.function=module:function"] if option == "attention=custom" else []
    config = composed(option, "data.dir=somewhere", *own)
    assert isinstance(config, Config)
    chosen = OmegaConf.to_container(OmegaConf.load(FOLDER / group / f"{name}.yaml"))
    chosen.pop("defaults", None)
    chosen.get("data", {}).pop("dir", None)
    if group == "data":
        chosen.pop("dir")
    assert_holds(config if group == "experiment" else getattr(config, group), chosen)


def test_the_learning_rate_is_that_of_the_model_unless_it_is_given():
    """A recipe or the command line can give it."""
    rates = {name: composed(f"model={name}").optimizer.lr for name in ("gpt2-nano", "gpt2", "gpt3-2.7b")}
    assert rates == {"gpt2-nano": 4e-3, "gpt2": 6e-4, "gpt3-2.7b": 1.6e-4}
    for file in (FOLDER / "model").glob("*.yaml"):
        assert (FOLDER / "optimizer" / "of" / file.name).is_file(), file.stem
    assert composed("model=gpt2", "optimizer.lr=3e-5").optimizer.lr == 3e-5
    assert composed("experiment=gpt2-124m", "model=gpt2-medium").optimizer.lr == 6e-4


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("config", []),
        ("prepare", ["data.dir=somewhere"]),
        ("inspect", ["data.dir=somewhere"]),
        ("sample", ["checkpoint=somewhere"]),
        ("evaluate", ["checkpoint=somewhere"]),
        ("replay", ["record=somewhere"]),
        ("export", ["checkpoint=somewhere", "to=elsewhere"]),
    ],
)
def test_every_program_gets_its_type_and_the_defaults_of_its_schema(name, overrides):
    assert type(composed(*overrides, name=name)) is ROOTS[name]


@pytest.mark.parametrize(
    ("name", "overrides", "missing"),
    [
        ("config", ["data=tokens"], "data.dir"),
        ("prepare", [], "data.dir"),
        ("sample", [], "checkpoint"),
        ("evaluate", [], "checkpoint"),
        ("evaluate", ["checkpoint=somewhere", "data=tokens"], "data.dir"),
        ("replay", [], "record"),
        ("export", ["checkpoint=somewhere"], "to"),
    ],
)
def test_what_has_no_default_must_be_given(name, overrides, missing):
    with pytest.raises(MissingMandatoryValue, match=missing):
        composed(*overrides, name=name)


def test_the_recipe_of_gpt2_124m_is_nanogpts_and_gives_way_to_the_command_line():
    """600,000 steps of 480 sequences of 1,024 tokens, up to 6e-4 in 2,000 steps and down to a tenth of it."""
    recipe = composed("experiment=gpt2-124m")
    assert recipe.train.batch_size * recipe.train.micro_steps * recipe.model.context_length == 491_520
    optimizer = recipe.optimizer
    assert (recipe.train.max_steps, optimizer.warmup_steps, optimizer.decay_steps) == (600_000, 2_000, None)
    assert learning_rate(600_000, optimizer, recipe.train.max_steps) == pytest.approx(6e-5)
    assert (optimizer.lr, optimizer.beta2, optimizer.weight_decay) == (6e-4, 0.95, 0.1)
    changed = composed("experiment=gpt2-124m", "model=gpt2-medium", "train.batch_size=4", "optimizer.lr=1e-3")
    assert (changed.model.n_embd, changed.train.batch_size, changed.optimizer.lr) == (1024, 4, 1e-3)
    assert changed.train.max_steps == 600_000


def test_checkpoints_are_as_frequent_as_evaluations_unless_told_otherwise():
    assert composed("train.eval_interval=7").checkpoint.interval == 7
    assert composed("experiment=gpt2-124m").checkpoint.interval == 1000
    assert composed("train.eval_interval=7", "checkpoint.interval=3").checkpoint.interval == 3


@pytest.mark.parametrize(
    "override",
    [
        "model.layers=3",
        "train.batchsize=3",
        "colour=red",
        "train.max_steps=1.5",
        "wandb.tags=a",
    ],
)
def test_an_unknown_key_or_a_wrong_type_is_refused(override):
    with pytest.raises(ConfigCompositionException):
        composed(override)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("attention.name=sdpa", "attention.name=sdpa contradicts attention=flash2; choose a variant with"),
        ("model.n_head=5", "model.n_embd=128 is not a multiple of model.n_head=5; give a multiple, such as 130"),
        ("data.val_fraction=0", "data.val_fraction=0"),
        ("optimizer.beta1=1", "optimizer.beta1=1"),
        ("precision.name=int8", "precision.name=int8 is unknown"),
        ("train.max_steps=0", "train.max_steps=0 is out of range; give at least 1"),
        (
            "train.max_steps=100000000",
            "train.max_steps=100000000 is out of range; give at least 1 and at most 99999999",
        ),
        ("train.batch_size=many", "train.batch_size=many is not a number; set a number, or auto on a GPU"),
        ("train.seed=-1", "train.seed=-1 is out of range; give at least 0"),
        ("optimizer.lr=inf", "optimizer.lr=inf is out of range; give a finite number of at least 0"),
        (
            "train.timeout_s=1000000000000000",
            "train.timeout_s=1000000000000000 is out of range; give at least 1 and at most",
        ),
        ("train.seed=99999999999", "train.seed=99999999999 is out of range; give at least 0 and at most 4294967295"),
        ("model.n_layer=99999", "model.n_layer=99999 is out of range; give at least 1 and at most 10000"),
        (
            "train.batch_size=1000000000000",
            "train.batch_size=1000000000000 is out of range; give at least 1 and at most",
        ),
        (
            "train.grad_accumulation=1000000000000",
            "train.batch_size=8 in 1000000000000 micro-steps makes 8000000000000 sequences",
        ),
        ("checkpoint.keep=0", "checkpoint.keep=0 is out of range; give at least 1"),
        ("wandb.mode=on", "wandb.mode"),
        ("optimizer.name=sgd", "optimizer.name=sgd is unknown; choose one of adamw, muon"),
    ],
)
def test_an_impossible_value_on_the_command_line_is_refused_in_our_words(override, sentence):
    with pytest.raises(UserError, match=sentence):
        composed(override)


@pytest.mark.parametrize("key", ["batch_size", "max_steps", "eval_interval", "eval_tokens", "log_interval"])
@pytest.mark.parametrize("value", [0, -1])
def test_the_loop_needs_at_least_one_of_each(key, value):
    with pytest.raises(UserError, match=f"train.{key}={value} is out of range; give at least 1"):
        TrainConfig(**{key: value})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"grad_accumulation": 0}, "train.grad_accumulation=0 is out of range; give at least 1"),
        ({"sample_tokens": -1}, "train.sample_tokens=-1 is out of range; give at least 0"),
        ({"activation_checkpointing": "some"}, "train.activation_checkpointing=some is unknown; choose one of none, "),
        ({"on_nan": "ignore"}, "train.on_nan=ignore is unknown; choose one of stop, skip"),
        ({"spike_factor": 1.0}, "train.spike_factor=1.0 is not above 1; give a larger number, or null"),
        (
            {"batch_size": 16, "global_batch_size": 32, "grad_accumulation": 3},
            "makes 2 micro-steps, not train.grad_accumulation=3",
        ),
    ],
)
def test_an_impossible_loop_is_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        TrainConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "micro_steps"),
    [
        ({}, 1),
        ({"grad_accumulation": 5}, 5),
        ({"global_batch_size": 16}, 1),
        ({"global_batch_size": 48}, 3),
        ({"global_batch_size": 48, "grad_accumulation": 3}, 3),
    ],
    ids=str,
)
def test_the_global_batch_is_another_way_to_give_the_micro_steps(settings, micro_steps):
    """A micro-step has 16 sequences."""
    assert TrainConfig(batch_size=16, **settings).micro_steps == micro_steps


@pytest.mark.parametrize("whole", [-3, 0, 1, 11, 13, 17, 18, 30, 100])
def test_a_global_batch_that_does_not_divide_is_refused_with_one_that_does(whole):
    with pytest.raises(UserError, match=f"train.global_batch_size={whole} is not a multiple of") as refusal:
        TrainConfig(batch_size=12, global_batch_size=whole)
    remedy = int(re.search(r"set train.global_batch_size=(-?\d+)", str(refusal.value))[1])
    assert abs(remedy - whole) <= 6 or remedy == 12
    assert TrainConfig(batch_size=12, global_batch_size=remedy).micro_steps == remedy / 12


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"name": "sdpa", "backend": "xformers"}, "attention.backend=xformers is unknown; choose one of auto, .*cudnn"),
        ({"name": "local", "window": 0}, "attention.window=0 is out of range; give at least 1"),
    ],
)
def test_an_impossible_attention_is_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        VARIANTS[settings["name"]](**settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_samples", 0),
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
    ],
    ids=str,
)
def test_an_impossible_sample_is_refused(key, value):
    with pytest.raises(UserError, match=f"{key}={value} is out of range; give"):
        SampleConfig(checkpoint="somewhere", **{key: value})


@pytest.mark.parametrize("key", ["context_length", "stride", "batch_size"])
def test_an_impossible_evaluation_is_refused(key):
    with pytest.raises(UserError, match=f"{key}=0 is out of range; give at least 1"):
        EvaluateConfig(checkpoint="somewhere", **{key: 0})


def config_classes(*roots: type) -> Iterator[type]:
    for root in roots:
        yield root
        yield from config_classes(*(hint for hint in get_type_hints(root).values() if is_dataclass(hint)))


@pytest.mark.parametrize("cls", sorted(set(config_classes(*ROOTS.values())), key=lambda cls: cls.__name__))
def test_every_setting_says_below_it_what_it_means(cls):
    """The docstring of its class documents a group of settings."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert ast.get_docstring(body), f"{cls.__name__} has no docstring"
    groups = {name for name, hint in get_type_hints(cls).items() if is_dataclass(hint)}
    for node, below in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and node.target.id not in groups:
            documented = isinstance(below, ast.Expr) and isinstance(getattr(below.value, "value", None), str)
            assert documented and below.value.value.strip(), f"{cls.__name__}.{node.target.id} has no docstring"
