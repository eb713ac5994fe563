"""Scores over a whole token file: every token counts once, and transformers finds the same loss in the same windows."""

import json
import math
import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from data.loader import DataError
from data.token_files import TokenWriter
from data.tokenizers import get_tokenizer
from errors import UserError
from model.attention import BUILT_IN
from tests.e2e import load, run, train
from trainer.checkpoint.files import write_file
from trainer.checkpoint.folder import find
from trainer.evaluation import count_words, perplexity, score, window_sizes, windows

pytest_plugins = ["tests.e2e"]
TEXTS = [
    "The cat sat on the mat. " * 9,
    "naïve 語 🙂\n\nwords  and\twords",
    "",
    "One more document, with <|endoftext|> in it. " * 5,
]
CONTEXT = 64


@given(st.integers(2, 300), st.integers(1, 40), st.data())
def test_every_token_but_the_first_is_scored_once_with_all_the_context_there_is(count, context, data):
    stride = data.draw(st.integers(1, context))
    seen = []
    for start, stop, scored in windows(count, context, stride):
        assert 0 < stop - start <= context and 0 < scored <= stop - start
        for target in range(stop - scored, stop):
            seen.append(target + 1)
            assert target + 1 - start >= min(target + 1, context - stride + 1)
    assert seen == list(range(1, count))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((65, None), "context_length=65 exceeds the model's 64 positions"),
        ((None, 65), "stride=65 exceeds the context of 64 tokens and would leave tokens out"),
        ((8, 9), "stride=9 exceeds the context of 8 tokens"),
    ],
)
def test_windows_that_leave_tokens_out_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        window_sizes(*settings, 64)


def test_a_file_that_is_cut_while_it_is_scored_is_told(tmp_path):
    """Reading the part that is gone would kill the process."""
    path, byte = tmp_path / "val.bin", get_tokenizer("byte")
    np.full(3 * 4096, 7, np.uint16).tofile(path)
    model, compute = nn.Module(), SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext)
    model.config = SimpleNamespace(vocab_size=256)
    model.forward = lambda inputs, targets: (os.truncate(path, 1024), torch.zeros(()))[1]
    sizes = {"context": CONTEXT, "stride": CONTEXT, "batch": 4}
    with pytest.raises(DataError, match=f"{path} went from 24576 to 1024 bytes while in use"):
        score(model, np.memmap(path, np.uint16, "r"), byte, name=str(path), compute=compute, **sizes)


def test_words_are_those_of_the_texts():
    byte = get_tokenizer("byte")
    tokens = np.concatenate([byte.encode_document(text) for text in TEXTS])
    assert count_words(tokens, byte) == sum(len(text.split()) for text in TEXTS)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """Save a small random GPT-2 with transformers."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=CONTEXT, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, gpt2_tokenizer):
    folder = tmp_path_factory.mktemp("tokens")
    with TokenWriter(folder, {"name": "text"}) as writer:
        for split in ("train", "val"):
            for text in TEXTS:
                writer.write(split, gpt2_tokenizer.encode_document(text).tobytes(), 1)
        writer.finish("gpt2")
    return folder


def evaluated(folder, *overrides: str) -> tuple[dict, str]:
    overrides = "device=cpu", "batch_size=2", f"hydra.run.dir={folder}", *overrides
    out = run("evaluate.py", *overrides).ok().out
    return json.loads((folder / "evaluation.json").read_text()), out


@torch.no_grad()
def by_transformers(model, tokens: np.ndarray, stride: int) -> float:
    """Return the mean nats of the tokens after the first, window by window, from transformers' logits."""
    tokens, nats, done = torch.from_numpy(tokens.astype(np.int64)), 0.0, 0
    for start in range(0, len(tokens) - 1, stride):
        stop = min(start + CONTEXT, len(tokens) - 1)
        losses = F.cross_entropy(
            model(tokens[None, start:stop]).logits[0], tokens[start + 1 : stop + 1], reduction="none"
        )
        nats, done = nats + losses[done - start :].double().sum().item(), stop
        if done == len(tokens) - 1:
            return nats / done


@pytest.mark.parametrize("attention", BUILT_IN)
@pytest.mark.parametrize("stride", [CONTEXT, 24])
def test_a_hugging_face_model_scores_as_transformers_says(tmp_path, hugging_face, corpus, attention, stride):
    model, folder = hugging_face
    overrides = f"checkpoint={folder}", "data=tokens", f"data.dir={corpus}", f"stride={stride}"
    result, out = evaluated(tmp_path, *overrides, f"attention={attention}")
    tokens = np.fromfile(corpus / "val.bin", dtype="<u2")
    expected = by_transformers(model, tokens, stride)
    words = sum(len(text.split()) for text in TEXTS)
    assert result["val/loss"] == pytest.approx(expected, abs=1e-4)
    assert result["val/perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert result["val/word_perplexity"] == pytest.approx(math.exp(expected * (len(tokens) - 1) / words), rel=1e-3)
    assert f"context {CONTEXT}, stride {stride}" in out and f"over {len(tokens) - 1} tokens" in out


def test_a_checkpoint_of_ours_is_evaluated_on_all_its_tokens(tmp_path, trained):
    data = "data=tokens", f"data.dir={trained.parent / 'tokens'}", "data.tokenizer=byte"
    result, _ = evaluated(tmp_path, f"checkpoint={trained}", *data)
    assert 0 < result["val/loss"] < 5 and result["context"] == 32


def test_an_evaluation_drops_nothing(tmp_path, workplace):
    """The checkpoint keeps the dropout of its training."""
    train("run", "model.dropout=0.5", "train.max_steps=2").ok()
    data = "checkpoint=run", "data=tokens", "data.dir=tokens", "data.tokenizer=byte"
    first, second = (evaluated(tmp_path, *data)[0] for _ in range(2))
    assert first == second


def test_the_checkpoint_behind_a_link_is_printed(tmp_path, workplace, trained):
    """outputs/latest had moved to another run, and nothing said so."""
    Path("link").symlink_to(trained)
    data = "data=tokens", f"data.dir={trained.parent / 'tokens'}", "data.tokenizer=byte"
    _, out = evaluated(tmp_path, "checkpoint=link", *data)
    assert f"val.bin, {trained / 'checkpoints' / 'step-00000030.pt'} (step 30), flash2" in out


def test_a_model_trained_in_a_window_is_not_scored_without_it(tmp_path, workplace):
    """sample.py refuses too. Without the window, the perplexity was wrong, and no message said so."""
    window = "attention=local", "attention.window=4"
    train("run", *window, "train.max_steps=2").ok()
    data = "checkpoint=run", "data=tokens", "data.dir=tokens", "data.tokenizer=byte"
    evaluated(tmp_path, *data, *window)
    for attention in (("attention=flash2",), ("attention=local", "attention.window=8")):
        outcomes = run("evaluate.py", *data, *attention), run("sample.py", data[0], *attention)
        for outcome in outcomes:
            assert outcome.code == 2
            assert "checkpoint=run was trained with attention=local attention.window=4, but" in outcome.err
    resumed = "checkpoint.resume=run/checkpoints", "train.max_steps=9", "optimizer.lr=1e300", "attention=flash2"
    record = re.search(r"record=\S+", train("later", *resumed).err)[0]
    run("replay.py", record, data[0]).ok()  # with the attention of the recorded run
    assert "trained with attention=local attention.window=4" in run("export.py", data[0], "to=exported").ok().out


def test_a_model_trained_with_all_pairs_is_not_scored_in_a_window(workplace, trained, hugging_face):
    """The loss was far too high, and no message said so. A window as long as the context leaves nothing out."""
    data = "data=tokens", f"data.dir={trained.parent / 'tokens'}", "data.tokenizer=byte"
    model, window = (f"checkpoint={trained}", "device=cpu"), "attention=local attention.window=31"
    for script, options in (("evaluate.py", data), ("sample.py", ())):
        refused = run(script, *model, *options, *window.split())
        words = f"error: {window} leaves out pairs of tokens, but checkpoint={trained} was trained with all pairs; set"
        assert refused.code == 2 and f"{words} attention=flash2" in refused.err
    np.save("one.npy", np.ones((1, 1), dtype=bool))
    for same in ("attention=local attention.window=32", "attention=block_sparse attention.pattern=one.npy"):
        run("sample.py", *model, "max_tokens=1", *same.split()).ok()
    state = load(find(trained))
    state["config"]["attention"] = {"name": "custom", "function": "mine:attention"}  # perhaps with this window too
    write_file(Path("custom.pt"), state)
    run("sample.py", "checkpoint=custom.pt", "device=cpu", "max_tokens=1", *window.split()).ok()
    exported = f"checkpoint={hugging_face[1]}", "device=cpu"  # perhaps of a model that was trained in this window
    run("sample.py", *exported, "max_tokens=1", *window.split()).ok()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "checkpoint has no value; give checkpoint=..."),
        (("checkpoint=nowhere", "data=stdlib"), "checkpoint=nowhere is no"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_a_sentence(tmp_path, overrides, message):
    outcome = run("evaluate.py", "device=cpu", f"hydra.run.dir={tmp_path}", *overrides)
    assert outcome.code == 2 and message in outcome.err and len(outcome.err.splitlines()) == 1


def test_other_tokens_than_the_models_are_refused(tmp_path, hugging_face, trained):
    overrides = f"checkpoint={hugging_face[1]}", "data=tokens", "data.tokenizer=byte"
    folder = f"data.dir={trained.parent / 'tokens'}"
    outcome = run("evaluate.py", "device=cpu", f"hydra.run.dir={tmp_path}", folder, *overrides)
    assert outcome.code == 2 and "was trained on gpt2 tokens, but" in outcome.err


def test_a_folder_that_is_not_writable_is_refused_before_the_tokens_are_scored(trained):
    """The whole evaluation was computed first, and then its result was lost."""
    data = "data=tokens", f"data.dir={trained.parent / 'tokens'}", "data.tokenizer=byte"
    outcome = run("evaluate.py", "device=cpu", f"checkpoint={trained}", "hydra.run.dir=/sys/kernel", *data)
    assert outcome.code == 2 and outcome.out == ""
    assert re.match(r"error: hydra.run.dir=/sys/kernel is not writable \(.+\); choose another folder\n$", outcome.err)


def test_the_perplexity_of_a_loss_that_is_no_figure():
    assert perplexity(2.0) == pytest.approx(7.389056) and perplexity(701.0) == perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))
