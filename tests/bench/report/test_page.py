"""The report page in headless Chromium."""

import json
import math
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from bench.common.looks import LOOKS
from bench.report.page import curve_looks, write_page
from bench.report.page_tables import read_tables
from bench.report.runs import read_runs
from tests.bench.report.made_up import save_run
from tests.e2e import ROOT

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> %{x} &lt;"
WINDOW = {"width": 1200, "height": 900}
PHONE = {"width": 390, "height": 844}
PAPER = {"width": 680, "height": 1000}  # A4 without its margins


def metrics(steps: int, loss: float) -> dict[int, dict]:
    """Return a row for every ten steps, with a validation in every second row."""
    rows = {}
    for step in range(10, steps + 1, 10):
        now = loss + 5 / step
        rows[step] = {"train/loss": now, "train/perplexity": math.exp(now), "perf/step_ms": 100 * loss}
        rows[step] |= {"perf/tokens_per_second": 1000 / loss, "perf/tflops": 2.5, "memory/peak_rss_gib": loss}
        if step % 20 == 0:
            rows[step] |= {"val/loss": now, "val/perplexity": math.inf if step == 60 else math.exp(now)}
    return rows


def change_settings(run: Path, step: int, changed: dict) -> None:
    """Add the row that a resume at `step` writes if settings changed."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    before = sum(json.loads(line)["step"] <= step for line in lines)
    lines.insert(before, json.dumps({"step": step, "tokens": 100 * step, "settings_changed": changed}))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """Write a page of three ordinary runs, one with a single row, one without rows, and one with a hostile name."""
    folder = tmp_path_factory.mktemp("report")
    runs = [
        save_run(folder / "naive", metrics(200, 3.0), "naive"),
        save_run(folder / "sdpa", metrics(200, 3.1), "sdpa"),
        save_run(folder / "flash2", metrics(100, 3.2), max_steps=100),
        save_run(folder / "short", metrics(10, 3.3)),
        save_run(folder / "empty", {}),
        save_run(folder / HOSTILE, metrics(200, 3.4)),
    ]
    change_settings(runs[1], 100, {"optimizer.lr": [0.001, 0.004], "data.dir": ["a", HOSTILE]})
    config = runs[-1] / "config.yaml"
    config.write_text(config.read_text().replace("project: null", f"project: {json.dumps(HOSTILE)}"))
    (folder / "results.json").write_text(json.dumps({"environment": {"gpu": HOSTILE}, "rows": [{HOSTILE: HOSTILE}]}))
    out = folder / "report.html"
    write_page(read_runs(list(map(str, runs))), read_tables(str(folder)), out, failed=["3_naive", HOSTILE])
    return out


@pytest.fixture(scope="module")
def opened(browser, report) -> tuple[Page, list[str]]:
    """Open the report; return the page and its requests, messages, errors and dialogs."""
    page, noise = browser.new_page(viewport=WINDOW), []
    page.on("request", lambda request: noise.append(request.url))
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("dialog", lambda dialog: noise.append(dialog.message) or dialog.dismiss())
    page.goto(report.as_uri())
    yield page, noise
    page.close()


@pytest.fixture
def page(opened, report) -> Page:
    """Share one window, because opening it takes seconds. Each test must restore its state."""
    page, noise = opened
    yield page
    page.emulate_media(media="screen", color_scheme="light")
    page.set_viewport_size(WINDOW)
    assert noise == [report.as_uri()]


def chart(page: Page, key: str = "train/loss"):
    return page.locator(f".chart[data-key='{key}']")


def axis(page: Page, name: str, key: str = "train/loss") -> dict:
    return chart(page, key).evaluate(f"element => element.layout.{name}")


def curves(page: Page) -> list[int]:
    """Return the number of curves of each chart."""
    lines = ".scatterlayer .trace:has(.js-line)"
    return page.locator(".chart").evaluate_all(f"all => all.map(one => one.querySelectorAll('{lines}').length)")


def place(page: Page, x: float, y: float) -> tuple[float, float]:
    """Convert fractions of the first chart's plot to window coordinates."""
    area = chart(page).locator(".nsewdrag").bounding_box()
    return area["x"] + x * area["width"], area["y"] + y * area["height"]


def test_failed_jobs_are_named_and_escaped(page):
    assert page.locator("#failed").inner_text() == f"Failed jobs: 3_naive, {HOSTILE}"


def test_pointing_shows_every_runs_value_there(page):
    page.mouse.move(*place(page, 0.5, 0.5))
    shown = chart(page).locator(".hoverlayer")
    expect(shown).to_contain_text("11,000")
    for words in ("3.0455  naive", "3.1455  sdpa", f"3.4455  {HOSTILE}"):
        expect(shown).to_contain_text(words)


def test_a_click_on_a_run_hides_it_in_every_chart_and_another_shows_it(page):
    before = curves(page)
    entry = page.locator("#legend button", has_text="naive").first
    entry.click()
    assert curves(page) == [count - 1 for count in before]
    assert entry.get_attribute("aria-pressed") == "false"
    page.emulate_media(media="print")
    expect(entry).to_be_hidden()
    page.emulate_media(media="screen")
    entry.click()
    assert curves(page) == before and entry.get_attribute("aria-pressed") == "true"


def test_axes_become_logarithmic_and_linear_again(page):
    for name in ("x", "y"):
        switch = page.locator("#controls label", has=page.locator(f"[name=log{name}]"))
        for wanted in ("log", "linear"):
            switch.click()
            kinds = page.locator(".chart").evaluate_all(f"all => all.map(one => one.layout.{name}axis.type)")
            assert set(kinds) == ({wanted} if name == "x" else {wanted, "log"}), "perplexity is always logarithmic"


def test_curves_are_drawn_over_tokens_steps_and_time(page):
    ends = {}
    for over in ("steps", "time", "tokens"):
        page.locator("#controls label", has_text=over).click()
        title = axis(page, "xaxis.title.text")
        ends[title] = chart(page).evaluate("element => element.data.map(curve => curve.x.at(-1))")
    naive, sdpa, flash2, short = (0, 1, 2, 3)
    assert [ends["tokens"][run] for run in (naive, flash2, short)] == [20000, 10000, 1000]
    assert [ends["optimizer steps"][run] for run in (naive, flash2, short)] == [200, 100, 10]
    times = ends["minutes of training"]
    assert [times[run] for run in (naive, sdpa, flash2)] == pytest.approx([1, 62 / 60, 32 / 60], abs=1e-4)


def test_dragging_zooms_and_a_hidden_run_leaves_the_zoom(page):
    whole = axis(page, "xaxis.range")
    page.mouse.move(*place(page, 0.3, 0.3))
    page.mouse.down()
    page.mouse.move(*place(page, 0.6, 0.7))
    page.mouse.up()
    zoomed = axis(page, "xaxis.range")
    width = whole[1] - whole[0]
    assert zoomed == pytest.approx([whole[0] + 0.3 * width, whole[0] + 0.6 * width], abs=0.01 * width)
    for _ in ("hidden", "shown"):
        page.locator("#legend button", has_text="sdpa").click()
        assert axis(page, "xaxis.range") == zoomed
    page.mouse.dblclick(*place(page, 0.5, 0.5))
    assert axis(page, "xaxis.range") == pytest.approx(whole)


def test_changed_settings_are_marked_on_the_curve_and_listed(page):
    """A diamond is at the first point after the change: 110 for the training loss, 120 for the validation loss."""
    for key, step in (("train/loss", 110), ("val/loss", 120)):
        (text,) = chart(page, key).locator(".textpoint").all_text_contents()
        assert text == f"optimizer.lr 0.001 -> 0.004, data.dir a -> {HOSTILE}"
        mark = chart(page, key).evaluate("element => element.data.at(-1)")
        assert mark["x"] == [100 * step] and mark["y"] == pytest.approx([3.1 + 5 / step])
    listed = page.locator("#changes td").all_inner_texts()
    assert listed == ["sdpa", "100", "optimizer.lr", "0.001", "0.004", "sdpa", "100", "data.dir", "a", HOSTILE]


def test_a_metric_that_is_not_finite_is_a_gap(page):
    values = chart(page, "val/perplexity").evaluate("element => element.data[0].y")
    assert len(values) == 10 and values[2] is None and None not in values[:2] + values[3:]


def test_only_logged_metrics_have_charts(page):
    captions = page.locator("figcaption").all_inner_texts()
    assert not any("utilisation" in caption or "GPU" in caption for caption in captions)
    assert len(captions) == len(page.locator(".chart").all()) == 7


def test_settings_that_differ_are_shown_and_the_others_are_folded(page):
    table = page.locator("#settings > .scroll th")
    differing = ["attention.name", "train.max_steps", "wandb.project", "attention.backend", "attention.deterministic"]
    assert table.all_inner_texts() == ["run", *differing]
    expect(page.locator("#settings > .scroll")).to_contain_text(HOSTILE)
    shared = page.locator("#settings details")
    expect(shared.get_by_text("model.context_length")).to_be_hidden()
    shared.locator("summary").click()
    expect(shared.get_by_text("model.context_length")).to_be_visible()
    shared.locator("summary").click()


def test_a_click_on_a_column_sorts_by_it(page):
    def column(number: int) -> list[str]:
        return page.locator(f"#summary td:nth-child({number})").all_inner_texts()

    names = page.locator("#summary th").all_inner_texts()
    speed = page.locator("#summary th button", has_text="tokens/s")
    number = names.index("tokens/s") + 1
    speed.click()
    assert column(number) == ["294", "303", "312", "323", "333", "-"], "missing values stay last"
    speed.click()
    assert column(number) == ["333", "323", "312", "303", "294", "-"]


def test_print_has_whole_charts_in_black_on_white_without_controls(page):
    page.emulate_media(media="print", color_scheme="dark")
    expect(page.locator("#controls")).to_be_hidden()
    colours = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    assert colours == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]
    expect(page.locator("#results table").first).to_be_visible()
    page.set_viewport_size(PAPER)
    for drawing in page.locator(".chart .main-svg").all():
        box, figure = drawing.bounding_box(), drawing.locator("xpath=ancestor::figure").bounding_box()
        assert box["x"] >= figure["x"] and box["x"] + box["width"] <= figure["x"] + figure["width"] + 1 <= 681
        assert box["y"] + box["height"] <= figure["y"] + figure["height"] + 1
    assert page.evaluate("document.documentElement.scrollWidth") <= PAPER["width"]


def test_all_columns_of_the_benchmark_tables_fit_on_paper(browser, tmp_path):
    """Numbers and words are not broken."""
    runs = read_runs([str(save_run(tmp_path / "run", metrics(200, 3.0)))])
    write_page(runs, read_tables(str(ROOT / "bench" / "results" / "h200")), tmp_path / "report.html")
    page = browser.new_page(viewport=PAPER)
    page.goto((tmp_path / "report.html").as_uri())
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.scrollWidth") <= PAPER["width"]
    assert page.locator("td", has_text=re.compile(r"^[0-9a-f]{12}$")).first.bounding_box()["height"] < 30
    page.close()


def test_print_unfolds_everything_and_afterwards_restores_the_page(page):
    parts, folded = page.locator("details"), page.locator("details:not([open])")
    count = parts.count()
    parts.last.locator("summary").click()
    expect(folded).to_have_count(count - 1)
    page.emulate_media(media="print")
    expect(folded).to_have_count(0)
    page.emulate_media(media="screen")
    expect(folded).to_have_count(count - 1)
    assert parts.last.get_attribute("open") is not None and count > 1


def test_dark_screens_get_a_dark_page_with_lighter_curves(page):
    def colours() -> list[str]:
        parts = page.locator("body"), chart(page).locator(".gridlayer path").first, chart(page).locator(".scatterlayer")
        (paper, grid, curve), names = parts, ("backgroundColor", "stroke", "filter")
        read = "(element, name) => getComputedStyle(element)[name]"
        return [part.evaluate(read, name) for part, name in zip((paper, grid, curve), names, strict=True)]

    light = colours()
    page.emulate_media(color_scheme="dark")
    expect(page.locator("body")).to_have_css("background-color", "rgb(21, 23, 26)")
    expect(chart(page).locator(".xtick text").first).to_have_css("fill", "rgb(150, 156, 165)")
    assert light[2] == "none" and "brightness" in colours()[2] and colours()[1] != light[1]
    page.emulate_media(media="print")
    assert chart(page).locator(".scatterlayer").evaluate("element => getComputedStyle(element).filter") == "none"


def test_a_phone_scrolls_tables_in_their_box_and_not_the_page(page):
    page.set_viewport_size(PHONE)
    last = page.locator(".chart").last.locator(".main-svg").first
    expect(last).to_have_attribute("width", "358")  # plotly draws again after a while
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    summary = page.locator("#summary .scroll")
    assert summary.evaluate("box => box.scrollWidth > box.clientWidth")
    legend = page.locator("#legend").bounding_box()
    assert legend["y"] + legend["height"] <= chart(page).bounding_box()["y"]
    expect(page.locator("#bar")).to_have_css("position", "static")


def test_the_title_and_the_heading_say_what_is_compared(page):
    heading = page.locator("h1").inner_text()
    assert heading.startswith("attention: naive, sdpa, flash2 · train.max_steps: ")
    assert page.locator("#shared").inner_text() == "model gpt2 · context 1,024 · data tokens"
    assert page.title() == f"{heading} · model gpt2 · context 1,024 · data tokens"
    for name in ("speed", "memory"):
        expect(page.locator("#summary th", has_text=f"{name} relative to naive")).to_have_count(1)


def test_curves_that_coincide_differ_in_dash_width_and_places_of_symbols(browser, tmp_path):
    """The variants have the same losses, so only the first curve would be seen without these differences."""
    names = "naive", "sdpa", "flash2"
    runs = read_runs([str(save_run(tmp_path / name, metrics(500, 3.0), name)) for name in names])
    write_page(runs, [], tmp_path / "report.html")
    page = browser.new_page(viewport=WINDOW)
    page.goto((tmp_path / "report.html").as_uri())
    drawn = chart(page).evaluate("element => element.data.map(({x, y, line, marker}) => ({x, y, line, marker}))")
    lines, symbols = drawn[:3], drawn[3:]
    assert all(line["y"] == lines[0]["y"] for line in lines)
    assert [line["line"]["color"] for line in lines] == [LOOKS[name].colour for name in names]
    assert len({line["line"]["dash"] for line in lines}) == 3
    widths = [line["line"]["width"] for line in lines]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3
    assert len({symbol["marker"]["symbol"] for symbol in symbols}) == len(symbols) == 3
    places = [place for symbol in symbols for place in symbol["x"]]
    assert len(set(places)) == len(places) >= 12 and all(len(symbol["x"]) >= 4 for symbol in symbols)
    page.close()


def test_runs_of_one_variant_differ_in_colour(write_run):
    looks = curve_looks(read_runs([str(write_run(f"run{number}", {1: {"train/loss": 3.0}})) for number in range(8)]))
    assert len({look["colour"] for look in looks}) == 8
