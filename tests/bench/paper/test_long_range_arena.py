"""The table `lra`: its cells, and the Markdown of made-up rows."""

import pytest

from bench.lra.tasks import TASKS
from bench.lra.training import Score, Scores
from bench.paper import runner
from bench.paper.classifier_steps import step_row
from bench.paper.settings import PaperSettings
from bench.paper.tables import long_range_arena as lra
from tests.bench.stopwatch import Stopwatch

FULL = PaperSettings()


def timed(task: str, attention: str, ms: float | None, compiled: bool = False, **values) -> dict:
    """Return a row of a step. Without ms it ran out of memory."""
    row = {"measured": "step", "task": task, **step_row(attention, 32, compiled)}
    status = "oom" if ms is None else "ok"
    return row | {"ms": ms, "peak_gib": ms, "graph": True, "status": status} | values


def long(task: str, attention: str, batch_size: int, ms: float | None, **values) -> dict:
    return timed(task, attention, ms) | {"measured": "long", "batch_size": batch_size} | values


def learned(task: str, attention: str, accuracy: float, seed: int = 1) -> dict:
    row = lra.accuracy_cell(task, attention, FULL, seed)
    return row | {"accuracy": accuracy, "status": "ok"}


def lines_of(rows: list[dict]) -> list[str]:
    return lra.markdown(rows).splitlines()


def test_every_attention_has_its_cells_and_no_two_cells_are_the_same():
    cells = lra.cells(FULL)
    assert all(not runner.belongs(a, b) for a in cells for b in cells if a is not b)
    kinds = [cell["measured"] for cell in cells]
    assert [kinds.count(kind) for kind in ("step", "long", "accuracy")] == [5, 2 * 11, 12 + 3 + 5]
    lists = [(c["attention"], c["seed"], c["steps"]) for c in cells if c.get("steps") and c["task"] == "listops"]
    assert [seed for name, seed, _ in lists if name == "flash2"] == [1, 2, 3] and {x[2] for x in lists} == {5000}


def test_an_interrupted_table_goes_on_with_the_cells_that_are_missing():
    cells = lra.cells(FULL)
    rows = [{**cell, "status": "ok"} for cell in cells if cell != cells[-2]]
    assert runner.missing(cells, rows) == [cells[-2]]


def test_the_speedup_is_the_geometric_mean_over_the_tasks():
    """2 and 8 times as fast are 4 times as fast; 1.999 x 1.999 is rounded down for ours."""
    rows = [timed("listops", "naive", 16.0), timed("text", "naive", 80.0)]
    rows += [timed("listops", "linear", 8.0), timed("text", "linear", 10.0)]
    rows += [timed("listops", "flash2", 16 / 1.999), timed("text", "flash2", 80 / 1.999)]
    rows += [timed("listops", "smyrf", 4.0), timed("text", "smyrf", None)]
    lines = lines_of(rows)
    assert "| attention | ListOps, ms | GiB | Text, ms | GiB | x naive, eager | paper, x |" in lines
    assert "| `naive`, eager | 16.00 | 16.00 | 80.00 | 80.00 | 1.00 | - |" in lines
    assert "| `linear` | 8.00 | 8.00 | 10.00 | 10.00 | 4.00 | 2.3 |" in lines
    assert "| `flash2` | 8.01 | 8.01 | 40.03 | 40.03 | 1.99 | - |" in lines
    assert "| `smyrf` | 4.00 | 4.00 | OOM | OOM | - | 1.7 |" in lines


def test_the_compiled_baseline_has_a_row_of_its_own():
    rows = [timed("listops", "naive", 16.0), timed("listops", "naive", 8.0, compiled=True)]
    assert "| `naive`, compiled | 8.00 | 8.00 | 2.00 | - |" in lines_of(rows)


def test_a_step_without_a_graph_has_a_star_and_a_reason():
    rows = [timed("listops", "naive", 4.0), timed("listops", "reformer", 8.0, graph=False, message="it waits")]
    made = lra.markdown(rows)
    assert "| `reformer` | 8.00* | 8.00 | 0.50 | 1.3 |" in made
    assert "Steps are CUDA graphs. *: not a graph, because the capture failed (`reformer`: it waits)." in made
    assert "graph" not in lra.markdown([row | {"graph": None} for row in rows]).partition("Paper")[2]
    rows[1] |= {"ms": None, "status": "oom"}  # a step that does not fit has no star, and so no reason
    assert "*" not in lra.markdown(rows)


def test_long_tasks_have_batch_one_and_the_largest_batch_that_fits():
    rows = [long("path_x", "flash1", size, ms) for size, ms in [(1, 1.0), (4, 4.0), (16, 15.999), (64, None)]]
    rows += [long("path_256", "flash1", 1, 2500.0)]
    rows += [long(task, "naive", 1, None) for task in lra.LONG_TASKS]
    refused = {"status": "unsupported", "message": "a row is too long"}
    rows += [long("path_x", "fused_softmax", 1, 3.0), long("path_256", "fused_softmax", 1, None, **refused)]
    lines = lines_of(rows)
    flash1 = "| `flash1` | 1.00 | 1.00 | 16 | 16.00 | 16.00 | 61.4 |"
    assert f"{flash1} 2,500.00 | 2,500.00 | 1 | 2,500.00 | 2,500.00 | ✗ |" in lines
    assert "| `naive`, eager | OOM | OOM | - | - | - | ✗ | OOM | OOM | - | - | - | ✗ |" in lines
    fused = "| `fused_softmax` | 3.00 | 3.00 | 1 | 3.00 | 3.00 | - |"
    assert f"{fused} UNSUPPORTED | UNSUPPORTED | - | - | - | - |" in lines
    assert "UNSUPPORTED: `fused_softmax`: a row is too long." in lines[-1]


def test_batches_grow_until_memory_runs_out(monkeypatch):
    sizes = []

    def time_steps(rows, *rest):
        (row,) = rows
        sizes.append(row["batch_size"])
        row["status"] = "ok" if row["batch_size"] < 16 else "oom"

    monkeypatch.setattr(lra, "time_steps", time_steps)
    rows = list(lra.measure({"measured": "long", "task": "path_x", "attention": "naive"}, Stopwatch(), FULL))
    assert sizes == [1, 4, 16] and [row["status"] for row in rows] == ["ok", "ok", "oom"]


def test_accuracies_stand_beside_the_papers_and_the_seeds_show_the_noise():
    rows = [learned("listops", "flash2", 0.3701), learned("listops", "flash2", 0.361, seed=2)]
    rows += [learned("listops", "performer", 0.35), learned("pathfinder", "performer", 0.7)]
    rows += [learned("listops", "naive", 0.0) | {"accuracy": None, "status": "failed", "message": "lost"}]
    lines = lines_of(rows)
    assert "| `naive` | FAILED | - | - | - | - | 36.0 | 63.6 | 81.6 | 42.3 | 72.7 |" in lines
    assert "| `flash2` | 37.0 | - | - | - | - | - | - | - | - | - |" in lines
    assert "| `flash2`, seed 2 | 36.1 | - | - | - | - | - | - | - | - | - |" in lines
    assert "| `performer` | 35.0 | - | - | - | 70.0 | 36.8 | 63.6 | 82.2 | 42.1 | 69.9 |" in lines
    error = "With 2,000 test examples, the standard error on ListOps is 1.1 points."  # sqrt(0.37 x 0.63 / 2,000)
    assert f"{error} 2 seeds of `flash2` differ by up to 0.9 points." in lines[-1]
    assert "Steps: ListOps 5,000, Pathfinder 62,400." in lines[-1] and "draws the Pathfinder images" in lines[-1]
    made = lra.markdown([learned("listops", "flash2", 0.3701)])
    assert f"{error} A dash" in made and "Pathfinder images" not in made and "training examples" not in made
    seen = learned("pathfinder", "linformer", 0.57, seed=2) | {"train_accuracy": 0.987}
    note = "Accuracy on the first training examples, of the same number: Pathfinder: `linformer` with seed 2 98.7 %."
    assert lra.markdown([*rows, seen]).endswith(note)


@pytest.mark.parametrize("kind", ["step", "long", "accuracy"])
def test_a_process_that_failed_leaves_a_page(kind):
    """Its row has only the keys of the cell."""
    (cell, *_) = [cell for cell in lra.cells(FULL) if cell["measured"] == kind]
    row = cell | {"status": "failed", "message": "the process was killed by signal 9"}
    lra.markdown([row])
    ok = timed("text", "naive", 1.0)
    assert "| `naive`, eager | 1.00 | 1.00 | 1.00 | - |" in lines_of([row, ok])


def test_an_accuracy_comes_from_training_with_the_cells_task_steps_and_seed(monkeypatch):
    asked = {}

    def train_and_evaluate(task, attention, train_set, test_set, compute, **options):
        asked.update(task=task, attention=attention, sets=(train_set, test_set), compute=compute, **options)
        return Scores(test=Score(accuracy=0.36, loss=1.7), train=Score(accuracy=0.4, loss=1.6))

    monkeypatch.setattr(lra, "train_and_evaluate", train_and_evaluate)
    monkeypatch.setattr(lra, "load", lambda task, split: (task.name, split))
    cell = lra.accuracy_cell("listops", "performer", FULL, seed=2)
    scores = {"accuracy": 0.36, "loss": 1.7, "train_accuracy": 0.4, "train_loss": 1.6}
    assert list(lra.measure(cell, Stopwatch(), FULL)) == [{**scores, "status": "ok"}]
    assert asked["task"] == TASKS["listops"] and asked["sets"] == (("listops", "train"), ("listops", "test"))
    assert (asked["attention"], asked["steps"], asked["seed"], asked["compiled"]) == ("performer", 5000, 2, False)
    assert asked["compute"].precision == "bf16"
    list(lra.measure(lra.accuracy_cell("pathfinder", "naive", FULL), Stopwatch(), FULL))
    assert (asked["steps"], asked["compiled"]) == (62_400, True)
