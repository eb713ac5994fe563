"""The registry: each variant's settings, and the messages for settings that it does not have."""

import ast
import inspect
import itertools
import sys
import textwrap
from dataclasses import fields

import pytest

from errors import UserError
from model.attention import VARIANTS, AttentionConfig, SdpaConfig, restore_attention, unknown_setting
from model.attention.custom import Fa2Config, Fa3Config, Fa4Config


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_has_a_config_of_its_own_with_documented_settings(name):
    config = VARIANTS[name]
    assert config().name == name and config.__doc__ and issubclass(config, AttentionConfig)
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0].body
    documented = {
        node.target.id
        for node, below in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
    assert {field.name for field in fields(config)} - {"name"} == documented - {"name"}


def test_a_name_that_is_not_the_variants_is_refused():
    with pytest.raises(UserError, match="attention.name=naive contradicts attention=sdpa; choose a variant with"):
        SdpaConfig(name="naive")


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("naive", "window", "attention=naive, which has no settings; use it with attention=local"),
        ("sdpa", "bakend", "attention=sdpa, which has attention.backend; leave it out"),
        ("local", "backend", "which has attention.window, attention.deterministic; use it with attention=sdpa"),
        ("flash1", "deterministic", "use it with attention=flash2, attention=local, attention=block_sparse"),
    ],
)
def test_a_setting_of_another_variant_is_refused_with_what_this_one_has(name, key, message):
    assert f"attention.{key} is not a setting of" in unknown_setting(name, key)
    assert message in unknown_setting(name, key)


def test_a_config_is_written_as_on_the_command_line():
    local = VARIANTS["local"](window=4, deterministic=True)
    assert str(local) == "attention=local attention.window=4 attention.deterministic=true"
    assert str(SdpaConfig()) == "attention=sdpa"
    assert str(VARIANTS["custom"](function="a:b")) == "attention=custom attention.function=a:b"


def test_a_title_names_the_setting_that_decides_what_is_computed():
    configs = (
        VARIANTS["local"](window=4, deterministic=True),
        VARIANTS["block_sparse"](),
        VARIANTS["custom"](function="a:b"),
    )
    assert [config.title for config in configs] == ["local (window 4)", "block_sparse (butterfly)", "custom (a:b)"]
    assert [config.title for config in (SdpaConfig("sdpa", "cudnn"), VARIANTS["naive"]())] == ["sdpa (cudnn)", "naive"]


def test_a_record_of_an_older_version_is_restored_without_settings_of_other_variants():
    recorded = {"name": "local", "backend": "auto", "window": 9, "pattern": None, "deterministic": False}
    assert restore_attention(recorded, None) == VARIANTS["local"](window=9)
    with pytest.raises(
        UserError, match="attention=flash9 of the record is unknown to this version; use the version that"
    ):
        restore_attention({"name": "flash9"}, None)


@pytest.mark.parametrize("config", [Fa2Config, Fa3Config, Fa4Config])
def test_a_missing_package_is_named_with_the_command_that_installs_it(config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="does not run on a CPU; use attention=flash2"):
        config().build()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UserError, match=f"needs the package {config.package}; run pip install .*flash-att"):
        config().build()


def test_flash_attention_4_alone_is_not_flash_attention_2(tmp_path, monkeypatch):
    """Its package is flash_attn.cute, in a folder flash_attn that FlashAttention-2 would fill."""
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    (tmp_path / "flash_attn/cute/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    Fa4Config().build()
    del sys.modules["flash_attn"]  # imported by the search for flash_attn.cute
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UserError, match="attention=fa2 needs the package flash_attn; run pip install"):
        Fa2Config().build()
