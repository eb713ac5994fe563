import json
import math

import pytest

from errors import UserError
from trainer.anomalies import Watch, read_record


@pytest.fixture
def watch(tmp_path) -> Watch:
    return Watch(tmp_path, spike_factor=4.0, norms=[])


def test_a_spike_is_told_by_the_median_of_the_norms_before_it(watch):
    assert [watch.spike(norm) for norm in [50.0, *[1.0] * 18, 50.0]] == [None] * 20, "too few to tell"
    assert watch.spike(4.0) is None
    assert watch.spike(4.5) == 4.5
    assert watch.spike(math.inf) is None and watch.spike(math.nan) is None
    assert [watch.spike(norm) for norm in [*[1.0] * 100, *[3.0] * 60]] == [None] * 160
    assert watch.spike(9.0) is None, "the usual has risen to 3"
    assert watch.spike(15.0) == 5.0


def test_of_norms_that_are_zero_nothing_is_a_multiple(watch):
    assert [watch.spike(norm) for norm in [*[0.0] * 30, 1.0]] == [None] * 31


def test_without_a_factor_nothing_is_a_spike(tmp_path):
    watch = Watch(tmp_path, spike_factor=None, norms=[])
    assert [watch.spike(norm) for norm in [*[1.0] * 30, 1e9]] == [None] * 31


def test_steps_that_are_not_finite_are_counted_in_a_row(watch):
    steps = [(1.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (2.0, 1.0), (math.inf, math.nan)]
    counts = [(watch.is_broken(*step, overflow_is_normal=False), watch.in_a_row) for step in steps]
    assert counts == [(False, 0), (True, 1), (True, 2), (False, 0), (True, 1)]


def test_an_overflow_is_normal_for_fp16_unless_it_is_the_loss(watch):
    assert not watch.is_broken(1.0, math.inf, overflow_is_normal=True)
    assert watch.is_broken(math.nan, math.nan, overflow_is_normal=True)


def test_a_loss_scale_that_only_falls_is_broken(watch):
    """From 2^16 to 2^-24 it has passed all that fp16 can tell from zero."""
    steps = [watch.is_broken(1.0, math.inf, overflow_is_normal=True) for _ in range(45)]
    assert steps == [False] * 40 + [True] * 5
    assert not watch.is_broken(1.0, 1.0, True) and not watch.is_broken(1.0, math.inf, True)


RECORD = {"step": 3, "loss": None, "grad_norm": 1.0, "checkpoint": None, "scaler": {}, "config": {}}
LOADER = {"position": 1, "seed": 1, "context_length": 8, "tokens": 99}
WRONG = {
    "position": RECORD | {"loader": LOADER | {"position": -1}},
    "loader": RECORD | {"loader": {"position": 1}},
    "checkpoint": RECORD | {"loader": LOADER, "checkpoint": 5},
    "loss": {key: value for key, value in RECORD.items() if key != "loss"} | {"loader": LOADER},
}


def test_a_record_is_read_back(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps(RECORD | {"loader": LOADER}))
    assert read_record(tmp_path / "record.json") == RECORD | {"loader": LOADER}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "3", '{"step": 3}', None, *(pytest.param(json.dumps(WRONG[of]), id=of) for of in WRONG)]
)
def test_what_is_no_record_is_refused(tmp_path, content):
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=f"replay={path} .*give a file of a run's replay folder"):
        read_record(path)
