"""The command line: every mistake is one sentence, at once, with nothing left behind; help names all there is."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from model import generate
from tests.e2e import ROOT, TINY, Fork, run, start, train

pytest_plugins = ["tests.e2e"]

REFUSALS = {
    "unknown attention": ("attention=flash9", ["attention=flash9", "did you mean flash2?", "naive, sdpa"]),
    "misspelt key": ("model.context_lenght=512", ["model.context_lenght", "did you mean context_length?"]),
    "misspelt nested key": ("train.max_step=5", ["train.max_step", "did you mean max_steps?"]),
    "unknown top-level key": ("trian.max_steps=5", ["trian", "did you mean train?"]),
    "unknown top-level key without a like": ("colour=red", ["colour", "attention, model, data"]),
    "wrong type": ("model.n_layer=abc", ["model.n_layer", "abc", "give a value of type int"]),
    "wrong boolean": ("train.compile=maybe", ["train.compile", "maybe", "bool"]),
    "missing token file": ("data.dir=nowhere", ["nowhere/train.bin does not exist", "set data.dir"]),
    "batch that does not divide": (
        "train.global_batch_size=10 train.batch_size=4",
        ["train.global_batch_size=10", "train.batch_size=4", "set train.global_batch_size=8"],
    ),
    "accumulation given twice": (
        "train.global_batch_size=8 train.batch_size=4 train.grad_accumulation=4",
        ["train.global_batch_size=8", "train.grad_accumulation=4", "set train.grad_accumulation=null"],
    ),
    "backend of another attention": (
        "attention=naive attention.backend=flash",
        ["attention.backend is not a setting of attention=naive", "use it with attention=sdpa"],
    ),
    "unknown backend": ("attention=sdpa attention.backend=fast", ["attention.backend=fast", "cudnn"]),
    "backend of another device": (
        "attention=sdpa attention.backend=cudnn",
        ["attention.backend=cudnn", "cpu", "attention.backend=auto"],
    ),
    "head size of another attention": (
        "attention=flash2 model.n_embd=16",
        ["attention=flash2", "which takes 16 to 256", "attention=sdpa"],
    ),
    "width that does not divide": ("model.n_embd=33", ["model.n_embd=33", "model.n_head=2"]),
    "a number of 20 digits": (f"train.max_steps={10**20}", [f"train.max_steps={10**20}", "64 bits"]),
    "no layers": ("model.n_layer=0", ["model.n_layer=0", "at least 1"]),
    "fp16 on a CPU": ("precision=fp16", ["precision=fp16", "precision=fp32"]),
    "unknown device": ("device=tpu", ["device=tpu", "auto, cpu, cuda"]),
    "nothing to resume": ("checkpoint.resume=nowhere", ["checkpoint.resume=nowhere", "step-*.pt", "or null to start"]),
    "unknown wandb mode": ("wandb.mode=sometimes", ["wandb.mode", "sometimes", "online, offline, disabled"]),
    "no equals sign": ("model.n_layer", ["model.n_layer has no value; give model.n_layer=..."]),
    "unknown interpolation": ("model.n_layer=${foo}", ["${foo} names no setting"]),
    "sweep without -m": ("optimizer.lr=choice(1,2)", ["optimizer.lr=choice(1,2) has several values; add -m"]),
    "several choices": ("attention=[naive,sdpa]", ["one choice, such as attention=flash2"]),
    "no choice": ("attention=null", ["the name of a choice, such as attention=flash2"]),
    "unclosed bracket": ("wandb.tags=[a", ["wandb.tags=[a", "key=[a,b]"]),
    "appended key": ("+model.foo=1", ["model.foo", "n_layer"]),
    "context longer than the corpus": ("model.context_length=9999", ["train.bin", "model.context_length"]),
    "token outside the vocabulary": ("model.vocab_size=100", ["model.vocab_size=100", "257", "byte"]),
    "unknown tokenizer": ("data.tokenizer=words", ["data.tokenizer=words", "byte, gpt2"]),
    "negative learning rate": ("optimizer.lr=-1", ["optimizer.lr=-1", "at least 0"]),
    "list of models": ("model=[gpt2]", ["model is a list or has no choice; give one name, model=NAME"]),
    "no model": ("~model", ["model is a list or has no choice; give one name, model=NAME"]),
    "deleted setting": ("~train.seed", ["~train.seed deletes a setting that has to exist; leave it out, or"]),
    "deleted setting with another value": ("~optimizer.lr=3", ["~optimizer.lr=3 deletes a setting that has to exist"]),
    "deleted setting without a value": (
        "~wandb.tags",
        ["~wandb.tags deletes a setting that is null or does not exist;"],
    ),
    "deleted choice that was not made": (
        "~attention=naive",
        ["~attention=naive deletes a choice that was not made; leave it out, or give one choice, attention=NAME"],
    ),
    "group as a list": ("train=[1]", ["error: train is a group; set its keys, train.KEY=..."]),
    "unknown choices": ("attention=[a,b]", ["attention=b is unknown; choose one of block_sparse,", "naive, sdpa"]),
    "list of numbers": ("optimizer=[1]", ["a list; give each group the name of a choice, such as attention=flash2"]),
    "unknown configuration": ("--config-name=nosuch", ["--config-name=nosuch is unknown; choose one of config,"]),
    "unknown recipe": ("experiment=gpt2-124", ["experiment=gpt2-124", "did you mean gpt2-124m?"]),
}


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path != folder / "run"}


def assert_refused(outcome, words: list[str], workplace: Path, before: set[Path]) -> None:
    assert outcome.code != 0
    assert outcome.out == ""
    (sentence,) = outcome.err.splitlines()
    assert sentence.startswith("error: ") and "Traceback" not in sentence
    assert [word for word in words if word not in sentence] == [], sentence
    assert files_below(workplace) == before
    run_folder = workplace / "run"
    assert not run_folder.exists() or not any(run_folder.iterdir())


@pytest.mark.parametrize("mistake", REFUSALS)
def test_mistake_is_refused_in_one_sentence(workplace, mistake):
    overrides, words = REFUSALS[mistake]
    before = files_below(workplace)
    assert_refused(train("run", *overrides.split()), words, workplace, before)


def test_a_new_folder_at_every_start_holds_nothing_to_continue(workplace):
    before = files_below(workplace)
    outcome = run("train.py", *TINY, "checkpoint.resume=auto")
    assert_refused(
        outcome, ["checkpoint.resume=auto", "hydra.run.dir=FOLDER"], workplace, before | {workplace / "outputs"}
    )


def test_ctrl_c_ends_a_program_without_a_traceback(workplace, trained, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "generate", interrupt)
    outcome = run("sample.py", f"checkpoint={trained}", "device=cpu")
    assert outcome.code == 130 and re.fullmatch(r"using \S+ \(step 30\)\ninterrupted\n", outcome.err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that must not be there")
def test_gpu_is_refused_where_there_is_none(workplace):
    before = files_below(workplace)
    assert_refused(train("run", "device=cuda"), ["device=cuda", "device=cpu"], workplace, before)


def test_tokens_without_a_folder_are_refused(workplace):
    before = files_below(workplace)
    overrides = [override for override in TINY if not override.startswith("data.dir")]
    outcome = run("train.py", *overrides, "hydra.run.dir=run")
    assert_refused(outcome, ["data.dir", "data.dir=..."], workplace, before)


def test_validation_tokens_that_fill_no_window_are_refused_before_training(workplace):
    """The first evaluation would find this too late. The check comes before the model, which may be too large."""
    before = files_below(workplace)
    tokens = np.fromfile("tokens/val.bin", dtype="<u2").size
    for context in (tokens, 10**9):
        outcome = train("run", f"model.context_length={context}")
        split = "val" if context == tokens else "train"
        assert_refused(outcome, [f"{split}.bin holds", f"one window takes {context + 1}"], workplace, before)


@pytest.mark.parametrize("place", ["lr=3e-4", "a,b", "#1", "a;b", "a&b", "it's", "f(x)", "{a}", "données"])
def test_text_that_hydras_grammar_refuses_is_told_how_to_be_written(workplace, place):
    """The argument in the sentence can be pasted into a shell."""
    before = files_below(workplace)
    outcome = run("train.py", *TINY, f"data.dir={place}")
    assert_refused(outcome, [f"data.dir={place}"], workplace, before)
    (pasted,) = shlex.split(outcome.err.strip().partition("or as a text: ")[2])
    assert f"{place}/train.bin does not exist" in run("train.py", *TINY, pasted).err


def test_a_tilde_is_the_home_folder_quoted_or_not(workplace, monkeypatch):
    monkeypatch.setenv("HOME", str(workplace))
    folders = ["data.dir=~/tokens", "hydra.run.dir='~/run'", 'checkpoint.dir="~/saved"']
    run("train.py", *TINY, *folders, "train.max_steps=1").ok()
    assert {path.name for path in workplace.iterdir()} == {"tokens", "run", "saved"}
    monkeypatch.setenv("CORPUS", "~/nothing")
    assert f"{workplace}/nothing/train.bin does not exist" in run("train.py", *TINY, "data.dir=${oc.env:CORPUS}").err


@pytest.mark.parametrize("place", ["taken", "a" * 300])
def test_a_folder_that_cannot_be_is_refused_in_a_sentence(workplace, place):
    Path("taken").write_text("a file")
    before = files_below(workplace)
    refused = run("train.py", *TINY, f"hydra.run.dir={place}")
    assert_refused(refused, [place[:5], "choose another place: outputs go to hydra.run.dir=..."], workplace, before)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.context_length=64", ["model.context_length=64", "has 32", "set model.context_length=32"]),
        ("model.n_layer=3", ["model.n_layer=3", "set model.n_layer=2"]),
        ("model.n_embd=64", ["model.n_embd=64", "set model.n_embd=32"]),
        ("train.seed=1", ["seed=1", "set train.seed"]),
    ],
)
def test_checkpoint_of_another_run_is_refused(workplace, trained, override, words):
    before = files_below(workplace)
    outcome = train("run", f"checkpoint.resume={trained}", "train.max_steps=31", override)
    assert_refused(outcome, words, workplace, before)


def test_context_longer_than_the_pretrained_positions_is_refused(workplace, exported):
    before = files_below(workplace)
    words = ["model.context_length=64", "32 positions", "model.pretrained", "set model.context_length=32"]
    outcome = train("run", f"model.pretrained={exported}", "model.context_length=64")
    assert_refused(outcome, words, workplace, before)


def test_token_outside_the_vocabulary_is_refused_with_its_offset(workplace):
    """Such a file holds tokens of GPT-2, and the run reads them as bytes."""
    content = bytearray(Path("tokens/train.bin").read_bytes())
    content[1001] = 7  # token 500 is now above 256
    Path("tokens/train.bin").write_bytes(content)
    outcome = train("run", "train.max_steps=300")
    assert outcome.code == 2
    (sentence,) = outcome.err.splitlines()
    assert "train.bin" in sentence and "byte 1000" in sentence and "data.tokenizer" in sentence


def test_process_refuses_without_a_traceback(workplace):
    """The other tests run the scripts inside their own process."""
    refused = start(str(ROOT / "train.py"), "model.context_lenght=512")
    out, err = refused.communicate(timeout=60)
    assert refused.returncode == 2 and out == ""
    assert err.startswith("error: model.context_lenght is not a setting (did you mean context_length?)")
    assert len(err.splitlines()) == 1


def test_help_can_be_read_as_by_head(workplace):
    helped = Fork("train.py", "--help")
    assert helped.stdout.readline().startswith("Train a GPT-2")
    helped.stdout.close()
    assert (helped.wait(), helped.stderr.read()) == (0, "")
    assert not any(path.is_file() for path in workplace.rglob("outputs/**/*"))


def test_version_is_ours(workplace):
    assert run("train.py", "--version").ok().out == "gpt2-flash 0.1.0\n"


def test_torchruns_report_of_the_failed_processes_ends_with_the_sentence(workplace, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "report.json")
    run("train.py", *TINY, "model.n_head=3")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file="report.json")
    *_, sentence, _ = str(ChildFailedError("train.py", {0: failure})).splitlines()
    assert "model.n_embd=32 is not a multiple of model.n_head=3; give a multiple, such as 33" in sentence


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.seed=3", "RANK=a is not an integer of at least 0; start the program with torchrun, or"),
        ("model.n_head=3", "model.n_embd=32 is not a multiple of model.n_head=3"),
    ],
    ids=["no other mistake", "another mistake"],
)
def test_a_rank_that_is_not_a_number_leaves_one_sentence(workplace, monkeypatch, override, sentence):
    """The program reads the rank again when it prints the sentence."""
    monkeypatch.setenv("RANK", "a")
    outcome = run("train.py", *TINY, override)
    assert outcome.code == 2 and outcome.err.startswith(f"error: {sentence}") and len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("batch_size=4", "batch_size is not a setting (did you mean train.batch_size?)"),
        ("attention=naive,sdpa", "add -m to run one job per value"),
        ("train.compile=maybe", "train.compile=maybe has the wrong type; give a value of type bool | None"),
    ],
    ids=["no group", "no -m", "no bool"],
)
def test_a_slip_is_told_with_what_was_meant(workplace, override, sentence):
    (line,) = run("train.py", override).err.splitlines()
    assert sentence in line


def test_a_group_of_another_program_is_refused(workplace):
    (line,) = run("export.py", "precision=fp8").err.splitlines()
    assert line.startswith("error: precision is not a setting of this program; leave it out, or see --help")
    (line,) = run("export.py", "checkpoint=run", "to=model", "+precision=fp8").err.splitlines()
    assert line == "error: precision is not a setting; choose among checkpoint, to"


def test_an_experiment_without_its_header_is_told_the_line(workplace):
    """Hydra put its settings into a group called experiment, which was refused with the names of all settings."""
    Path("mine/experiment").mkdir(parents=True)
    file = Path("mine/experiment/short.yaml")
    file.write_text("train: {max_steps: 3, batch_size: 2}\n")
    (line,) = run("train.py", "--config-dir=mine", "experiment=short").err.splitlines()
    header = "# @package _global_"
    assert line == f"error: experiment=short has no header; make `{header}` the first line of experiment/short.yaml"
    file.write_text(f"{header}\n{file.read_text()}")
    run("train.py", "--config-dir=mine", "experiment=short", "--cfg", "job").ok()
    for given in (["experiment.train=3"], ["experiment=gpt2-124m", "experiment.train.max_steps=3"]):
        (line,) = run("train.py", *given).err.splitlines()
        assert line.startswith("error: experiment is not a setting; choose among")


def test_help_names_every_group_and_choice_and_the_keys_used_most(workplace):
    out = run("train.py", "--help").ok().out
    groups = [folder for folder in (ROOT / "conf").iterdir() if folder.is_dir() and any(folder.glob("*.yaml"))]
    lines = {words[0]: line for line in out.splitlines() if (words := line.split())}
    for group in groups:
        for choice in group.glob("*.yaml"):
            assert choice.stem in lines[group.name], f"{group.name}={choice.stem}"
    keys = ("model.context_length", "train.batch_size", "train.grad_accumulation", "train.max_steps", "optimizer.lr")
    keys += ("train.eval_interval", "train.seed", "train.compile", "checkpoint.resume", "checkpoint.dir", "wandb.mode")
    assert [key for key in (*keys, "device") if key not in out] == []
    assert "python train.py attention=flash2" in out and "checkpoint.resume=auto" in out
    assert max(map(len, out.splitlines())) <= 120


def test_examples_of_help_compose(workplace):
    lines = [line for line in run("train.py", "--help").ok().out.splitlines() if line.startswith("  python train.py ")]
    examples = [shlex.split(line, comments=True)[2:] for line in lines if "[" not in line and " -m " not in line]
    assert len(examples) >= 5
    for example in examples:
        run("train.py", *example, "--cfg", "job").ok()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("sample.py", ["python sample.py checkpoint=", "prompt", "temperature", "top_k", "num_samples"]),
        ("export.py", ["python export.py checkpoint=", "to="]),
        ("data/prepare.py", ["python -m data.prepare data=text", "data.source", "data.tokenizer", "data.val_fraction"]),
    ],
)
def test_other_scripts_help(workplace, script, words):
    out = run(script, "--help").ok().out
    assert [word for word in words if word not in out] == []
    assert not any(path.name != "tokens" for path in workplace.iterdir())


def test_configuration_can_be_shown_without_a_run(workplace):
    out = run("train.py", "--cfg", "job").ok().out
    assert "n_layer: 4" in out and "resume: null" in out
    assert [path.name for path in workplace.iterdir()] == ["tokens"]


@pytest.mark.parametrize("program", ["sample.py", "evaluate.py", "export.py to=new", "replay.py record=record.json"])
def test_a_program_for_one_process_refuses_several(workplace, monkeypatch, program):
    for key, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    name, *settings = program.split()
    outcome = run(name, "checkpoint=run", *settings)
    sentence = f"error: {name} runs in one process, but 2 were started; start it with python {name} (process 1 of 2)\n"
    assert (outcome.code, outcome.err) == (2, sentence)
