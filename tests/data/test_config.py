import pytest
from omegaconf import OmegaConf

from data.config import DataConfig
from errors import UserError

STDLIB = {"name": "stdlib", "dir": "tokens/stdlib", "tokenizer": "byte"}


def test_is_a_schema_that_omegaconf_can_check():
    config = OmegaConf.merge(OmegaConf.structured(DataConfig), STDLIB | {"val_fraction": 0.05})
    assert OmegaConf.to_object(config) == DataConfig(**STDLIB, val_fraction=0.05)


@pytest.mark.parametrize(
    "change",
    [{"name": "wikitext"}, {"val_fraction": 0.0}, {"val_fraction": 1.5}, {"split_seed": -1}, {"on_bad_row": "warn"}],
)
def test_impossible_settings_are_refused_by_name(change):
    with pytest.raises(UserError, match=f"data.{next(iter(change))}"):
        DataConfig(**STDLIB | change)
