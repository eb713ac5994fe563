import itertools
import json

import pytest
import torch

from bench import tune
from bench.common.command_line import launch
from errors import UserError
from kernels.flash2 import dispatch, tiles
from kernels.flash2.tiles import HOPPER_CONFIGS, TABLE, TileConfig, hopper_config_for, plain_tiles_for
from tests.e2e import largest_file

TILE = {"queries": 64, "keys": 32, "warps": 4, "stages": 3}
SMALL = {
    "conservative": [{"head_dim": 64, "forward": TILE, "key_gradient": TILE, "query_gradient": TILE}],
    "hopper": [{"pass": "backward", "head_dim": 64, "max_seq_len": None, "fused": True}],
}
LENGTHS = {512: 512, 1024: 1000, 4096: 4096, None: 4097}  # a length for each limit in the table


def test_the_settings_of_a_kernel_are_rendered_on_one_line_and_read_back_the_same():
    text = tune.render(SMALL)
    assert json.loads(text) == SMALL and text.endswith("}\n")
    assert '      "forward": {"queries": 64, "keys": 32, "warps": 4, "stages": 3},' in text.splitlines()
    assert '    {"pass": "backward", "head_dim": 64, "max_seq_len": null, "fused": true}' in text.splitlines()


def test_the_shipped_table_is_as_tune_writes_it():
    assert TABLE.read_text() == tune.render(json.loads(TABLE.read_text()))


def test_without_a_gpu_tune_refuses_in_one_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["tune", f"out={tmp_path / 'tiles.json'}"])
    with pytest.raises(SystemExit, match="2"):
        launch(tune.run, tune.TuneSettings)
    assert capsys.readouterr().err.startswith("error: bench.tune finds no GPU")
    assert not any(tmp_path.iterdir())


def test_a_head_size_without_tiles_is_refused():
    with pytest.raises(UserError, match="head_dims=65 is unknown; choose one of 16, 32, 64, 128, 256"):
        tune.TuneSettings(head_dims=[64, 65])


def test_what_tune_writes_is_what_the_kernels_launch():
    rows = json.loads(TABLE.read_text())["plain"]
    assert rows
    for row in rows:
        kind = row["mask"] != "full", LENGTHS[row["max_seq_len"]], row["mask"] == "dropout"
        found = plain_tiles_for(row["arch"], row["head_dim"], torch.bfloat16, *kind)
        assert {name: tile._asdict() for name, tile in found._asdict().items()}.items() <= row.items()


def test_an_architecture_that_nobody_tuned_gets_the_conservative_tiles():
    rows = {row["head_dim"]: row for row in json.loads(TABLE.read_text())["conservative"]}
    for (head_dim, padded), causal in itertools.product([(16, 16), (40, 64), (80, 128), (256, 256)], (True, False)):
        found = plain_tiles_for("sm_999", head_dim, torch.float16, causal, 10000)
        assert {name: tile._asdict() for name, tile in found._asdict().items()}.items() <= rows[padded].items()


def test_a_candidate_runs_the_kernel_that_it_is_for():
    assert tune.with_tile("query_gradient", (64, 32, 4, 3)) == tune.SAFE._replace(
        query_gradient=TileConfig(64, 32, 4, 3)
    )
    for pass_, candidates in tune.HOPPER_CANDIDATES.items():
        for candidate in candidates:
            assert isinstance(tune.with_tile(f"{pass_} hopper", candidate), HOPPER_CONFIGS[pass_])


def test_what_tune_writes_for_the_hopper_kernels_is_what_is_launched():
    rows = json.loads(TABLE.read_text())["hopper"]
    written = {(row["pass"], row["head_dim"], row["mask"], row["max_seq_len"]): row for row in rows}
    for key in itertools.product(HOPPER_CONFIGS, (48, 64, 80, 128), tune.HOPPER_MASKS, LENGTHS):
        pass_, head_dim, mask, longest = key
        read = hopper_config_for(pass_, head_dim, mask, LENGTHS[longest])
        assert (read is None) == (key not in written)
        assert read is None or read._asdict().items() <= written[key].items()


@pytest.fixture
def rtx_4090(monkeypatch, tmp_path):
    """Pretend to be on a GPU without rows in the table, where large tiles are fast. Return a copy of the table."""
    table = tmp_path / "tiles.json"
    table.write_text(TABLE.read_text())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "arch_of", lambda device: "sm_89")
    monkeypatch.setattr(tune, "right_ones", lambda jobs: [job for job in jobs if job[0] != "query_gradient"])
    monkeypatch.setattr(tune, "times_of", lambda *job: {t: 1 / (t[0] * t[1] * t[3]) for t in job[4]})
    monkeypatch.setattr(tiles, "TABLE", table)
    yield table
    for cached in (tiles.read_table, plain_tiles_for):
        cached.cache_clear()


def test_a_card_that_is_not_in_the_table_gets_rows_that_the_kernels_then_use(rtx_4090):
    """If no candidate of a kernel is right, its conservative tile stays."""
    before = plain_tiles_for("sm_89", 64, torch.float16, True, 1024)
    tune.run(tune.TuneSettings(head_dims=[64], out=str(rtx_4090)))
    for cached in (tiles.read_table, plain_tiles_for):
        cached.cache_clear()
    for seq_len, mask in itertools.product((512, 1024, 4096, 10**6), tune.MASKS):
        found = plain_tiles_for("sm_89", 64, torch.float16, mask != "full", seq_len, mask == "dropout")
        assert found.forward[:2] == (128, 128) and found.key_gradient[:2] == (128, 128)
        assert found.query_gradient == before.query_gradient
    shipped, written = json.loads(TABLE.read_text()), json.loads(rtx_4090.read_text())
    assert len(written["plain"]) == len(shipped["plain"]) + 12
    assert [row for row in written["plain"] if row["arch"] != "sm_89"] == shipped["plain"]
    assert {**written, "plain": []} == {**shipped, "plain": []}


def test_a_full_disk_leaves_the_old_table(rtx_4090):
    """A cut table would stop flash2 on every GPU."""
    with largest_file(10_000), pytest.raises(UserError, match=r"tiles.json cannot be written \(File too large\)"):
        tune.run(tune.TuneSettings(head_dims=[64], out=str(rtx_4090)))
    assert rtx_4090.read_text() == TABLE.read_text()


def test_a_card_without_kernels_is_refused(rtx_4090, monkeypatch):
    monkeypatch.setattr(dispatch, "arch_of", lambda device: "sm_75")
    with pytest.raises(UserError, match="finds no kernels to tune: the kernels need sm_80 .*; use attention=sdpa"):
        tune.run(tune.TuneSettings(out=str(rtx_4090)))
    assert rtx_4090.read_text() == TABLE.read_text()


@pytest.mark.gpu
def test_the_conservative_tiles_are_right_on_this_gpu():
    for kernel, tile in zip(tune.KERNELS, tune.SAFE, strict=True):
        assert tune.is_right((kernel, 64, "causal", tuple(tile)))
