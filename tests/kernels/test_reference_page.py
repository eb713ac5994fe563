"""The interactive page in headless Chromium: its numbers and its bytes, compared with algorithms.py and bench/paper."""

import itertools
import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from playwright.sync_api import Page, expect
from torch import Tensor

from bench.paper import byte_counts
from kernels.flash2.tiles import PlainTiles, TileConfig
from kernels.reference import __main__ as program
from kernels.reference import algorithms, walk

KINDS = list(itertools.product(("flash1", "flash2"), ("forward", "backward"), (False, True)))


class Sizes(NamedTuple):
    """The number fields of the page."""

    N: int
    d: int
    B_r: int
    B_c: int
    seed: int


EXAMPLE = Sizes(4, 2, 2, 2, 0)
UNEVEN = Sizes(5, 3, 2, 3, 1)  # the last tiles are smaller, and the mask hides one tile of six


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory) -> Page:
    """Write the page with the command line and open it."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["kernels.reference", "--html", str(path)])
        program.main()
    page, page.noise = browser.new_page(viewport={"width": 1280, "height": 900}), []
    page.on("request", lambda request: page.noise.append(request.url))
    page.on("console", lambda message: page.noise.append(message.text))
    page.on("pageerror", lambda error: page.noise.append(str(error)))
    page.goto(path.as_uri())
    yield page
    page.close()


@pytest.fixture
def page(opened) -> Page:
    """Share one page, because opening it takes seconds. No request may leave it, and no script may fail."""
    choose(opened, "flash1", "forward", False, EXAMPLE)
    yield opened
    opened.set_viewport_size({"width": 1280, "height": 900})
    assert len(opened.noise) == 1 and opened.noise[0].startswith("file://")


def choose(page: Page, algorithm: str, pass_: str, causal: bool, sizes: Sizes) -> None:
    for key, value in ("algorithm", algorithm), ("pass", pass_), ("causal", str(causal).lower()):
        page.click(f"[data-key={key}][data-value={value}]")
    for name, number in sizes._asdict().items():
        page.fill(f"[name={name}]", str(number))
    page.press("[name=seed]", "Enter")


def steps(page: Page) -> tuple[int, int]:
    """Return the current step and the last one."""
    return tuple(map(int, page.locator("#count").inner_text().split(" of ")))


def matrix(page: Page, name: str, memory: str = "hbm") -> Tensor:
    """Return the exact values of a matrix; the titles of its cells have them. A column becomes a vector."""
    rows = page.locator(f"#{memory} [data-name='{name}'] tr")
    titles = rows.evaluate_all("rows => rows.map(row => [...row.cells].map(cell => cell.title))")
    found = torch.tensor([[float(title) for title in row] for row in titles], dtype=torch.float64)
    return found[:, 0] if name[0] in "lmLD" else found


def bytes_shown(page: Page) -> list[list[int]]:
    """Return read, written and total: so far, at the end, and of standard attention."""
    rows = page.locator("#bytes tbody tr").evaluate_all("rows => rows.map(row => row.innerText.match(/[\\d,]+/g))")
    return [[int(number.replace(",", "")) for number in row] for row in rows]


def bytes_of(algorithm: str, pass_: str, causal: bool, sizes: Sizes) -> tuple[int, int]:
    """Return the bytes that the papers' algorithms read and write: terms of all rows, and of each visible tile."""
    n, d, B_r, B_c, _ = sizes
    tiles = [
        (min(B_r, n - i * B_r), min(B_c, n - j * B_c))
        for i, j in itertools.product(range(math.ceil(n / B_r)), range(math.ceil(n / B_c)))
        if not (causal and algorithms.is_hidden(i, j, B_r, B_c))
    ]
    of_queries, of_keys = (sum(column) for column in zip(*tiles, strict=True))
    read, written = {
        ("flash1", "forward"): (2 * n * d + of_queries * (2 * d + 2), of_queries * (d + 2)),
        ("flash1", "backward"): (2 * n * d + of_queries * (4 * d + 2), 2 * n * d + of_queries * d),
        ("flash2", "forward"): (n * d + of_keys * 2 * d, n * d + n),
        ("flash2", "backward"): (4 * n * d + of_queries * (3 * d + 2), n + 2 * n * d + of_queries * d),
    }[algorithm, pass_]
    return 2 * read, 2 * written


def expected(page: Page, algorithm: str, pass_: str, causal: bool, sizes: Sizes) -> dict[str, Tensor]:
    """Return the results of algorithms.py for the inputs that the page shows."""
    Q, K, V = (matrix(page, name) for name in "QKV")
    tiles = {"B_r": sizes.B_r, "B_c": sizes.B_c, "causal": causal}
    if algorithm == "flash1":
        O, *statistics = algorithms.flash_attention(Q, K, V, **tiles)
        backward, names = algorithms.flash_attention_backward, "lm"
    else:
        O, *statistics = algorithms.flash_attention_2(Q, K, V, **tiles)
        backward, names = algorithms.flash_attention_2_backward, "L"
    results = {"O": O, **dict(zip(names, statistics, strict=True))}
    if pass_ == "backward":
        gradients = backward(Q, K, V, O, matrix(page, "dO"), *statistics, **tiles)
        results |= dict(zip(("dQ", "dK", "dV"), gradients, strict=True))
    return results


def check_end(page: Page, *kind) -> None:
    """Compare the last step with algorithms.py and with the closed formula of the traffic."""
    results = expected(page, *kind)
    shown = {name: matrix(page, name) for name in results}
    torch.testing.assert_close(shown, results, atol=1e-12, rtol=1e-12)
    read, written = bytes_of(*kind)
    so_far, at_the_end, _ = bytes_shown(page)
    assert so_far == at_the_end == [read, written, read + written]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_stepping_to_the_end_gives_the_results_of_the_algorithms(page, kind):
    choose(page, *kind, UNEVEN)
    assert steps(page)[0] == 0 and bytes_shown(page)[0] == [0, 0, 0]
    for _ in range(steps(page)[1]):
        page.keyboard.press("ArrowRight")
    assert len(set(steps(page))) == 1
    check_end(page, *kind, UNEVEN)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("sizes", [EXAMPLE, Sizes(16, 8, 5, 3, 2), Sizes(7, 1, 3, 16, 999)], ids=str)
def test_the_end_of_other_sizes(page, kind, sizes):
    choose(page, *kind, sizes)
    page.keyboard.press("End")
    check_end(page, *kind, sizes)
    if sizes == EXAMPLE:
        assert torch.equal(matrix(page, "Q"), walk.Q) and torch.equal(matrix(page, "V"), walk.V)


def test_bytes_agree_with_the_counts_of_the_benchmarks(page):
    """n = 8, d = 2. 64 bytes on chip are tiles of 4 keys. flash2's kernels keep L in 4 bytes, the page in 2."""
    sizes = Sizes(8, 2, 4, 4, 0)
    for pass_ in "forward", "backward":
        for causal, share in (False, 1.0), (True, 3 / 4):
            choose(page, "flash1", pass_, causal, sizes)
            _, (*_, found), (*_, standard) = bytes_shown(page)
            assert found == byte_counts.flash(8, 2, 64, share)[pass_]
            assert standard == byte_counts.standard(8, 2)[pass_]
    tiles = PlainTiles(*[TileConfig(4, 4, 4, 1)] * 3)
    for causal, share in (False, 1.0), (True, 3 / 4):
        choose(page, "flash2", "forward", causal, sizes)
        kernel = byte_counts.plain_traffic(8, 2, tiles, lambda *_, share=share: share)
        assert bytes_shown(page)[1][2] == kernel["forward"] - 2 * 8


def test_the_first_tile_on_the_chip(page):
    """Line 11 of the example's first tile: S = 1, 0; 1, 2. So m is 1 and 2, and l is 1 + exp(-1) in both rows."""
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#line")).to_contain_text("Line 11 (i = 1, j = 1): On chip, compute minew = max(mi, m̃ij)")
    assert page.locator("#listing [aria-current]").get_attribute("value") == "11"
    assert matrix(page, "S_ij", "chip").tolist() == [[1, 0], [1, 2]]
    assert matrix(page, "l_i^new", "chip").tolist() == pytest.approx([1 + math.exp(-1)] * 2)
    kept = page.locator("#hbm tr.kept").evaluate_all("rows => rows.map(row => row.closest('table').dataset.name)")
    assert kept == [name for name in "QKVOlm" for _ in range(2)]
    assert page.locator("#hbm tr.moved").count() == 0
    assert page.locator("#chip .empty").count() == 0
    page.keyboard.press("ArrowRight")
    assert page.locator("#hbm [data-name=O] tr.moved").count() == 2
    assert bytes_shown(page)[0] == [2 * (8 + 8 + 4), 2 * 4, 48]


# The lines of the papers' listings that move data: names as in the papers, for loads and for stores.
PAPER_LOADS = {
    ("flash1", "forward"): {6: "K V", 8: "Q O l m"},
    ("flash1", "backward"): {7: "K V", 10: "Q O dO dQ l m"},
    ("flash2", "forward"): {4: "Q", 7: "K V"},
    ("flash2", "backward"): {4: "O dO", 6: "K V", 9: "Q O dO dQ L D", 15: "dQ"},
}
PAPER_STORES = {
    ("flash1", "forward"): {12: "O", 13: "l m"},
    ("flash1", "backward"): {21: "dQ", 24: "dK dV"},
    ("flash2", "forward"): {14: "O", 15: "L"},
    ("flash2", "backward"): {4: "D", 15: "dQ", 18: "dK dV"},
}


@pytest.mark.parametrize("kind", PAPER_LOADS, ids=str)
def test_each_line_moves_what_the_papers_line_moves(page, kind):
    """The page loads nothing else. Only in line 9 of FlashAttention-2's backward pass it loads less, and says so."""
    choose(page, *kind, False, EXAMPLE)
    touched = "Object.entries(run(settings, EXAMPLE, %d).machine.touched)"
    run = f"JSON.stringify({touched}.map(([name, tiles]) => [name, tiles.map(tile => tile.how)]))"
    read, written = {}, {}
    for step in range(1, steps(page)[1] + 1):
        line = page.evaluate(f"run(settings, EXAMPLE, {step}).line")
        for name, hows in json.loads(page.evaluate(run % step)):
            for how in hows:
                {"read": read, "written": written}[how].setdefault(line, set()).add(name)
    loads = {line: set(names.split()) for line, names in PAPER_LOADS[kind].items()}
    if kind == ("flash2", "backward"):
        loads[9] -= {"O", "dQ"}
        expect(page.locator("#differs")).to_contain_text("The paper's line 9 also loads Oi and dQi.")
    assert read == loads
    assert written == {line: set(names.split()) for line, names in PAPER_STORES[kind].items()}


@pytest.mark.parametrize(
    ("kind", "last", "left_out"),
    [
        (("flash1", "forward"), 16, set()),
        (("flash1", "backward"), 26, {1, 12, 14, 15, 18}),
        (("flash2", "forward"), 17, set()),
        (("flash2", "backward"), 20, set()),
    ],
    ids=str,
)
def test_the_listing_has_the_papers_lines(page, kind, last, left_out):
    choose(page, *kind, False, EXAMPLE)
    numbers = page.locator("#listing li").evaluate_all("items => items.map(item => item.value)")
    assert numbers == [number for number in range(1, last + 1) if number not in left_out]
    for number in left_out:
        assert re.search(rf"\b{number}\b", page.inner_text("#differs"))


def test_keys_and_buttons_move_and_stop_at_both_ends(page):
    last = steps(page)[1]
    keyboard = page.keyboard.press, "ArrowLeft", "ArrowRight"
    buttons = lambda title: page.click(f"[title='{title}']", force=True), "←", "→"  # force: at an end it is disabled
    for push, left, right in keyboard, buttons:
        seen = []
        for key in (left, right, right, left, "End", right, left, "Home"):
            push(key)
            seen.append(steps(page)[0])
        assert seen == [0, 1, 2, 1, last, last, last - 1, 0]
    page.focus("[name=N]")
    page.keyboard.press("ArrowRight")
    assert steps(page)[0] == 0, "arrow keys in a number field move its cursor"


def test_a_number_out_of_bounds_is_refused(page):
    page.keyboard.press("End")
    for value, problem in ("17", "N=17 must be a whole number from 1 to 16."), ("2.5", "N=2.5"), ("", "N= must be"):
        page.fill("[name=N]", value)
        expect(page.locator("#problem")).to_contain_text(problem)
        assert page.get_attribute("[name=N]", "aria-invalid") == "true"
    assert len(matrix(page, "Q")) == 4 and len(set(steps(page))) == 1
    page.fill("[name=N]", "3")
    expect(page.locator("#problem")).to_be_empty()
    assert len(matrix(page, "Q")) == 3


@pytest.mark.parametrize("width", [390, 1280])
def test_the_largest_example_fits(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    choose(page, "flash2", "backward", True, Sizes(16, 8, 16, 16, 0))
    page.keyboard.press("End")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    controls = page.locator("button, input")
    assert controls.evaluate_all("all => all.every(one => (one.ariaLabel || one.innerText).trim())")
    assert controls.evaluate_all("all => all.every(one => one.getBoundingClientRect().right <= innerWidth)")


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kernels.reference", "--html"])
    program.main()
    assert capsys.readouterr().out == "flash-attention.html\n" and Path("flash-attention.html").stat().st_size > 20_000
    for arguments, message in (
        (["--html", "missing/page.html"], "--html=missing/page.html cannot be written (No such file or directory)"),
        (["--wat"], "unrecognized arguments: --wat"),
        (["page.html"], "unrecognized arguments: page.html"),
    ):
        monkeypatch.setattr(sys, "argv", ["kernels.reference", *arguments])
        with pytest.raises(SystemExit, match="2"):
            program.main()
        assert message in capsys.readouterr().err
