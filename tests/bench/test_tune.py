import itertools
import json

import pytest
import torch

from bench import tune
from kernels.flash2.tiles import SPECIALISED, TABLE, Tile, Tiles, specialised_for, tiles_for

SMALL = {
    "any": {"64": [[64, 64, 4, 3], [32, 64, 4, 3], [64, 32, 4, 3]]},
    "sm_90": {"64": {"causal": {"1024": [[128, 64, 8, 2], [32, 64, 4, 3], [64, 64, 4, 3]]}}},
    "specialised": {"backward": {"64": {"causal": {"1024": [64, 64, 4, 2, 2, True]}}}},
}


def test_an_entry_is_rendered_on_one_line_and_read_back_the_same():
    text = tune.render(SMALL)
    assert json.loads(text) == SMALL and text.endswith("}\n")
    assert '    "64": [[64, 64, 4, 3], [32, 64, 4, 3], [64, 32, 4, 3]]' in text.splitlines()
    assert '        "1024": [[128, 64, 8, 2], [32, 64, 4, 3], [64, 64, 4, 3]]' in text.splitlines()
    assert '          "1024": [64, 64, 4, 2, 2, true]' in text.splitlines()


def test_the_shipped_table_is_as_tune_writes_it():
    assert TABLE.read_text() == tune.render(json.loads(TABLE.read_text()))


def test_without_a_gpu_tune_refuses_in_one_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["tune", "--out", str(tmp_path / "tiles.json")])
    with pytest.raises(SystemExit, match="2"):
        tune.main()
    assert capsys.readouterr().err.startswith("error: bench.tune measures on a GPU, and torch sees none here")
    assert not any(tmp_path.iterdir())


def test_what_tune_writes_is_what_the_kernels_launch():
    table = json.loads(TABLE.read_text())
    tuned = [
        (arch, int(head_dim), mask, bucket, tiles)
        for arch, sizes in table.items()
        if arch not in ("any", "specialised")
        for head_dim, masks in sizes.items()
        for mask, buckets in masks.items()
        for bucket, tiles in buckets.items()
    ]
    assert tuned
    for arch, head_dim, mask, bucket, tiles in tuned:
        expected = Tiles(*(Tile(*tile) for tile in tiles))
        kind = mask != "full", bucket, mask == "dropout"
        assert tiles_for(arch, head_dim, torch.bfloat16, *kind) == expected


def test_an_architecture_that_nobody_tuned_gets_the_tiles_of_any():
    table = json.loads(TABLE.read_text())["any"]
    for (head_dim, padded), causal in itertools.product([(16, 16), (40, 64), (80, 128), (256, 256)], (True, False)):
        expected = Tiles(*(Tile(*tile) for tile in table[str(padded)]))
        assert tiles_for("sm_1", head_dim, torch.float16, causal, "long") == expected


def test_a_candidate_runs_the_kernel_that_it_is_for():
    assert tune.with_tile("query_gradient", (64, 32, 4, 3)) == tune.SAFE._replace(query_gradient=Tile(64, 32, 4, 3))
    for pass_, candidates in tune.SPECIALISED_CANDIDATES.items():
        for candidate in candidates:
            assert isinstance(tune.with_tile(f"{pass_} specialised", candidate), SPECIALISED[pass_])


def test_what_tune_writes_of_the_specialised_kernels_is_what_is_launched():
    table = json.loads(TABLE.read_text())["specialised"]
    for pass_, head_dim, mask, bucket in itertools.product(table, (48, 64, 80, 128), tune.MASKS, ("1024", "long")):
        written = table[pass_].get(str(head_dim), {}).get(mask, {}).get(bucket)
        read = specialised_for(pass_, head_dim, mask != "full", bucket, mask == "dropout")
        assert read == (written and tuple(written))


@pytest.mark.gpu
def test_the_conservative_tiles_are_right_on_this_gpu():
    for kernel, tile in zip(tune.KERNELS, tune.SAFE, strict=True):
        assert tune.is_right((kernel, 64, "causal", tuple(tile)))
