"""The commands that a run prints at its end."""

from pathlib import Path

import pytest

from conf.commands import next_commands
from tests.conf.test_schema import composed


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], []),
        (["data.dir=std", "data.split_seed=7"], ["data.dir=std", "data.split_seed=7"]),
        (["data.val_fraction=0.2"], ["data.val_fraction=0.2"]),
        (["data.val_fraction=null"], ["data.val_fraction=null"]),
        (["data=fineweb-edu-10bt", "data.split_seed=7"], ["data=fineweb-edu-10bt"]),
        (
            ["data=tokens", "data.dir=mine", "data.tokenizer=byte"],
            ["data=tokens", "data.dir=mine", "data.tokenizer=byte"],
        ),
    ],
    ids=" ".join,
)
def test_a_run_is_evaluated_on_its_own_data(overrides, words):
    """Without the seed of its split, a run was evaluated on text that it had trained on."""
    checkpoint = Path("run/checkpoints/step-00000006.pt")
    _, evaluation = next_commands(composed(*overrides), Path("run"), checkpoint, is_stopped=False)
    assert evaluation[3:] == words
