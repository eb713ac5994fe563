import json
import math
from types import SimpleNamespace

import pytest

from errors import UserError
from trainer.config import TrainConfig
from trainer.watch import Watch, read_record


def watching(spike_factor: float | None = 4.0, scaled: bool = False) -> Watch:
    """Return the watch of a run that has a loss scale or not, without checkpoints and logs."""
    counts = {"broken_in_a_row": 0, "overflows_in_a_row": 0}
    state = SimpleNamespace(norms=[], scaler=SimpleNamespace(is_enabled=lambda: scaled), **counts)
    return Watch(state, TrainConfig(spike_factor=spike_factor), None, None, print)


@pytest.fixture
def watch() -> Watch:
    return watching()


def test_a_spike_is_measured_by_the_median_of_earlier_norms(watch):
    assert [watch._spike(norm) for norm in [50.0, *[1.0] * 18, 50.0]] == [None] * 20, "too few to tell"
    assert watch._spike(4.0) is None
    assert watch._spike(4.5) == 4.5
    assert watch._spike(math.inf) is None and watch._spike(math.nan) is None
    assert [watch._spike(norm) for norm in [*[1.0] * 100, *[3.0] * 60]] == [None] * 160
    assert watch._spike(9.0) is None, "the usual has risen to 3"
    assert watch._spike(15.0) == 5.0


def test_norms_of_zero_have_no_multiple(watch):
    assert [watch._spike(norm) for norm in [*[0.0] * 30, 1.0]] == [None] * 31


def test_without_a_factor_nothing_is_a_spike():
    watch = watching(spike_factor=None)
    assert [watch._spike(norm) for norm in [*[1.0] * 30, 1e9]] == [None] * 31


def test_steps_that_are_not_finite_are_counted_in_a_row(watch):
    steps = [(1.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (2.0, 1.0), (math.inf, math.nan)]
    counts = [(watch._is_broken(*step), watch.state.broken_in_a_row) for step in steps]
    assert counts == [(False, 0), (True, 1), (True, 2), (False, 0), (True, 1)]


def test_an_overflow_is_normal_for_fp16_unless_the_loss_is_not_finite():
    watch = watching(scaled=True)
    assert not watch._is_broken(1.0, math.inf)
    assert watch._is_broken(math.nan, math.nan)


def test_a_loss_scale_that_only_falls_is_broken():
    """From 2^16 down to 2^-24, the scale passes everything that fp16 can tell from zero."""
    watch = watching(scaled=True)
    assert [watch._is_broken(1.0, math.inf) for _ in range(45)] == [False] * 40 + [True] * 5
    assert not watch._is_broken(1.0, 1.0) and not watch._is_broken(1.0, math.inf)


RECORD = {"step": 3, "loss": None, "grad_norm": 1.0, "scaler": {}, "config": {}}
LOADER = {"position": 1, "seed": 1, "context_length": 8, "tokens": 99}
WRONG = {
    "position": RECORD | {"loader": LOADER | {"position": -1}},
    "loader": RECORD | {"loader": {"position": 1}},
    "loss": {key: value for key, value in RECORD.items() if key != "loss"} | {"loader": LOADER},
}


def test_a_record_is_read_back(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps(RECORD | {"loader": LOADER}))
    assert read_record(tmp_path / "record.json") == RECORD | {"loader": LOADER}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "3", '{"step": 3}', None, *(pytest.param(json.dumps(WRONG[of]), id=of) for of in WRONG)]
)
def test_a_file_that_is_not_a_record_is_refused(tmp_path, content):
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=f"record={path} .*give a file of a run's replay folder"):
        read_record(path)
