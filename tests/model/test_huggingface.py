"""Import from and export to transformers, whose GPT-2 is the reference for the arithmetic."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from errors import UserError
from model.attention import EXACT, VARIANTS, build_attention
from model.gpt2 import GPT2, ModelConfig
from model.huggingface import (
    CONFIG,
    WEIGHTS,
    find_pretrained,
    load_pretrained,
    read_config,
    save_pretrained,
    save_tokenizer,
)
from tests.data.conftest import gpt2_tokenizer

__all__ = ["gpt2_tokenizer"]
BIN = "pytorch_model.bin"

SHAPE = {"n_layer": 3, "n_head": 3, "n_embd": 48, "n_positions": 64, "vocab_size": 211}


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """Do what HF_HUB_OFFLINE=1 does before the import, with an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def randomise(model: torch.nn.Module) -> None:
    """Draw all weights with visible sizes, also biases and LayerNorms."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "ln_" in name and name.endswith("weight"):
                parameter += 1


def release(folder: Path, **changes) -> GPT2LMHeadModel:
    """Save a GPT-2 of transformers like the released ones, and return it."""
    model = GPT2LMHeadModel(GPT2Config(**SHAPE | {"bos_token_id": 210, "eos_token_id": 210} | changes)).eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


def load(folder: Path, attention: str = "naive", asked: ModelConfig | None = None) -> GPT2:
    folder = find_pretrained(str(folder))
    model = GPT2(read_config(folder, asked), build_attention(VARIANTS[attention]())).eval()
    load_pretrained(model, folder)
    return model


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> tuple[Path, GPT2LMHeadModel]:
    folder = tmp_path_factory.mktemp("released")
    return folder, release(folder)


@pytest.fixture
def copy(released, tmp_path) -> Path:
    """Return a copy of the released folder that a test may damage."""
    return Path(shutil.copytree(released[0], tmp_path / "copy"))


def tokens_of(length: int = 65) -> torch.Tensor:
    return torch.randint(211, (2, length), generator=torch.Generator().manual_seed(4))


def assert_same_model(ours: GPT2, theirs: GPT2LMHeadModel, length: int = 64) -> None:
    """Compare logits, to 1e-5 of their norm, and the loss."""
    tokens = tokens_of(length)
    with torch.no_grad():
        expected = theirs(tokens, labels=tokens)  # which shifts the labels itself
        logits = ours(tokens)
        loss = ours(tokens[:, :-1], tokens[:, 1:])
    assert logits.shape == expected.logits.shape == (2, length, 211)
    assert (logits - expected.logits).norm() < 1e-5 * expected.logits.norm()
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)


@pytest.mark.parametrize("attention", EXACT)
def test_their_weights_give_their_logits_and_loss_here(released, attention):
    folder, theirs = released
    assert_same_model(load(folder, attention), theirs)


def test_their_weights_get_their_gradients_here(released):
    """The tied table gets gradients from the embedding and from the head."""
    folder, theirs = released
    ours, tokens = load(folder), tokens_of()[:, :64]
    ours(tokens[:, :-1], tokens[:, 1:]).backward()
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    names, parameters = zip(*theirs.named_parameters(), strict=True)
    gradients = torch.autograd.grad(theirs(tokens, labels=tokens).loss, parameters)
    assert len(names) == len(found)
    for name, expected in zip(names, gradients, strict=True):
        ours_of = found[name.removeprefix("transformer.")]
        ours_of = ours_of.T if "c_" in name and name.endswith("weight") else ours_of
        error = (ours_of[: len(expected)] - expected).norm() / expected.norm()
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("attention", EXACT)
def test_our_weights_give_our_logits_and_loss_there(tmp_path, attention):
    config = ModelConfig(n_layer=3, n_head=3, n_embd=48, context_length=64, vocab_size=211)
    ours = GPT2(config, build_attention(VARIANTS[attention]())).eval()
    randomise(ours)
    save_pretrained(config, ours.state_dict(), tmp_path / "new" / "export", eot=210)
    theirs, info = GPT2LMHeadModel.from_pretrained(tmp_path / "new" / "export", output_loading_info=True)
    assert not any(info.values()), info
    assert theirs.config.eos_token_id == theirs.config.bos_token_id == 210
    assert theirs.transformer.wte.weight.shape == (211, 48), "the padding stays here"
    assert_same_model(ours, theirs.eval())


def test_an_import_and_export_changes_no_weight(released, tmp_path):
    folder, _ = released
    ours = load(folder)
    save_pretrained(ours.config, ours.state_dict(), tmp_path / "export", eot=210)
    before, after = load_file(folder / WEIGHTS), load_file(tmp_path / "export" / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_padding_of_an_imported_table_is_zero(released):
    table = load(released[0]).wte.weight
    assert table.shape == (256, 48)
    assert torch.all(table[211:] == 0)


@pytest.fixture
def sharded(copy) -> Path:
    """Return the released folder with its weights in two shards and an index."""
    weights, places = load_file(copy / WEIGHTS), {}
    for i, name in enumerate(sorted(weights)):
        places[name] = f"model-0000{i % 2 + 1}-of-00002.safetensors"
    for shard in set(places.values()):
        save_file({name: weights[name] for name in places if places[name] == shard}, copy / shard)
    (copy / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (copy / WEIGHTS).unlink()
    return copy


def pickled(folder: Path) -> None:
    """Replace the safetensors of a folder by pickles, as old releases have them."""
    for path in folder.glob("*.safetensors"):
        torch.save(load_file(path), folder / f"pytorch_{path.stem}.bin")
        path.unlink()
    for path in folder.glob("*.index.json"):
        text = path.read_text().replace(".safetensors", ".bin").replace("model-", "pytorch_model-")
        (folder / f"{BIN}.index.json").write_text(text)
        path.unlink()


def test_shards_and_pickles_load(released, copy, sharded):
    """Both fixtures are one folder."""
    assert_same_model(load(sharded), released[1])
    pickled(sharded)
    assert len(list(sharded.glob("*.bin"))) == 2
    assert_same_model(load(sharded), released[1])
    for path in sharded.iterdir():
        path.unlink()
    shutil.copytree(released[0], sharded, dirs_exist_ok=True)
    pickled(sharded)
    assert_same_model(load(sharded), released[1])


def test_a_broken_shard_is_refused_by_name(sharded):
    shard = next(sharded.glob("*-of-*"))
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name} is broken .FileNotFoundError.*; download or export it again"):
        load(sharded)
    (sharded / f"{WEIGHTS}.index.json").write_text("{}")
    with pytest.raises(UserError, match="model.safetensors.index.json is broken .KeyError"):
        load(sharded)


def test_a_pickle_that_runs_code_is_refused(copy):
    class Code:
        def __reduce__(self):
            return Path.touch, (copy / "touched",)

    (copy / WEIGHTS).unlink()
    torch.save({"wte.weight": Code()}, copy / BIN)
    with pytest.raises(UserError, match=f"{BIN} is broken .UnpicklingError: Weights only load failed.; download"):
        load(copy)
    assert not (copy / "touched").exists()


def test_gpt2s_tokenizer_is_saved_as_openai_released_it(gpt2_tokenizer, released, tmp_path):
    tokens = [gpt2_tokenizer.token_bytes(token) for token in range(gpt2_tokenizer.vocab_size)]
    save_tokenizer(tokens, gpt2_tokenizer.eot, 64, tmp_path)
    shutil.copy(released[0] / CONFIG, tmp_path)
    for kind in (AutoTokenizer, GPT2Tokenizer):
        theirs = kind.from_pretrained(tmp_path)
        for text in ("Hello", "Once upon a time,  it's naïve 語\n\n\tx=12345 <html>"):
            assert theirs(text)["input_ids"] == gpt2_tokenizer.encode(text)
        assert theirs("<|endoftext|>")["input_ids"] == [50256] and len(theirs) == 50257
    lines = (tmp_path / "merges.txt").read_text().splitlines()
    assert lines[1:4] == ["Ġ t", "Ġ a", "h e"] and lines[-1] == "Ġg azed" and len(lines) == 50001


def test_weights_saved_without_the_prefix_of_the_language_model_load(released, copy):
    """The hub's gpt2 names its weights h.0..., not transformer.h.0..., and carries attention masks as buffers."""
    weights = {name.removeprefix("transformer."): weight for name, weight in load_file(copy / WEIGHTS).items()}
    weights |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(3)}
    save_file(weights, copy / WEIGHTS)
    assert_same_model(load(copy), released[1])


def test_a_shorter_context_takes_the_first_positions(released):
    folder, theirs = released
    asked = ModelConfig(n_layer=1, n_head=1, n_embd=1, context_length=20, dropout=0.1, pretrained="this")
    ours = load(folder, asked=asked)
    assert ours.config == ModelConfig(
        n_layer=3, n_head=3, n_embd=48, context_length=20, vocab_size=211, dropout=0.1, pretrained="this"
    )
    assert_same_model(ours, theirs, length=20)


def test_a_context_beyond_the_position_table_is_refused(released):
    with pytest.raises(UserError, match="model.context_length=65 exceeds .* set model.context_length=64 or less"):
        load(released[0], asked=ModelConfig(context_length=65))


def test_another_architecture_is_refused(copy):
    (copy / CONFIG).write_text(json.dumps({"model_type": "llama", "n_positions": 64}))
    with pytest.raises(UserError, match="has model_type=llama, not GPT-2's gpt2"):
        load(copy)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_function": "relu"},
        {"layer_norm_epsilon": 1e-2},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"tie_word_embeddings": False},
        {"n_inner": 96},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_gpt2_with_other_options_is_refused_or_computed(tmp_path, changes):
    """config.json can ask for a variant with the same weights, such as stanford-crfm's scaling by layer."""
    theirs = release(tmp_path, **changes)
    try:
        ours = load(tmp_path)
    except UserError:
        return
    assert_same_model(ours, theirs)


@pytest.mark.parametrize(("name", "said"), [(CONFIG, CONFIG), (WEIGHTS, f"{WEIGHTS} or {BIN}, in one file")])
def test_a_folder_without_one_of_its_files_is_refused_by_its_name(copy, name, said):
    (copy / name).unlink()
    with pytest.raises(UserError, match=f"model.pretrained=.* has no {said}"):
        load(copy)


@pytest.mark.parametrize("share", [0, 0.0001, 0.02, 0.5, 0.999], ids=lambda share: f"{share:.2%} of it")
def test_truncated_weights_are_refused_by_name(copy, share):
    whole = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=f"{WEIGHTS} is broken"):
        load(copy)


@pytest.mark.parametrize(
    "text",
    ["", '{"model_type": "gpt2", "n_lay', '{"model_type": "gpt2"}', "null", "[1]", '"gpt2"'],
    ids=["empty", "torn", "without its sizes", "null", "a list", "a text"],
)
def test_a_broken_description_is_refused_by_name(copy, text):
    (copy / CONFIG).write_text(text)
    with pytest.raises(UserError, match=CONFIG):
        load(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_embd", 96), ("n_layer", 4), ("n_layer", 2), ("n_positions", 128), ("vocab_size", 250), ("vocab_size", 130)],
    ids=lambda value: str(value),
)
def test_a_config_that_does_not_fit_the_weights_is_refused(copy, key, value):
    """Otherwise missing weights would stay random, and extra weights would be ignored."""
    description = json.loads((copy / CONFIG).read_text())
    (copy / CONFIG).write_text(json.dumps(description | {key: value}))
    with pytest.raises(UserError, match=WEIGHTS):
        load(copy)


@pytest.mark.parametrize(("key", "value"), [("n_layer", "one"), ("n_positions", None)])
def test_a_size_that_is_not_a_number_is_refused(copy, key, value):
    description = json.loads((copy / CONFIG).read_text())
    (copy / CONFIG).write_text(json.dumps(description | {key: value}))
    with pytest.raises(UserError, match=f"{CONFIG} has {key}={value}, not a number; download"):
        load(copy)


GIVE = r"give a run's folder, a step-\*\.pt file, a folder saved by save_pretrained"


@pytest.mark.parametrize(
    "source",
    [
        *("./no/such/folder", "/no/such/folder", "~/no/such/folder"),
        *("runs/a/checkpoints", "a/step-00000999.pt", "step-00000999.pt"),
    ],
)
def test_a_missing_path_is_not_looked_up_on_the_hub(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"model.pretrained={source} does not exist; {GIVE}, or a hub id"):
        find_pretrained(source)


def test_a_file_is_not_a_folder():
    with pytest.raises(UserError, match=f"model.pretrained={__file__} is not a folder; {GIVE}, or a hub id"):
        find_pretrained(__file__)


@pytest.mark.parametrize("key", ["checkpoint", "model.pretrained"])
def test_a_name_in_a_local_folder_is_not_looked_up_on_the_hub(key, tmp_path, monkeypatch):
    """It has the form of a hub id. The message was about the network."""
    monkeypatch.chdir(tmp_path)
    Path("outputs/latest").mkdir(parents=True)
    with pytest.raises(UserError, match=f"{key}=outputs/lastest does not exist in the folder outputs; {GIVE}"):
        find_pretrained("outputs/lastest", key)


@pytest.mark.parametrize("source", ["nobody/no-such-gpt2", "no-such-gpt2", "outputs/lastest"])
def test_a_hub_id_without_a_network_is_refused(source, tmp_path, monkeypatch):
    """The name may also be a run's folder with a typing mistake, if the first folder does not exist."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=f"checkpoint={source} is not a folder.*check the name and the network, or {GIVE}"
    ):
        find_pretrained(source, key="checkpoint")
