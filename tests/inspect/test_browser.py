"""The HTML report in headless Chromium: it runs without errors, offline, and works by keyboard and on a phone."""

import importlib.util
import os
import shutil

import pytest

from tests.inspect.pages import write_evil_corpus, write_metrics, write_mix
from tokshard.cli.main import run

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1100, "height": 900}

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("playwright", "plotly"))),
        reason="needs playwright and plotly: pip install 'tokshard[test-browser]'",
    ),
    # playwright's transport leaves sockets to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"no Chromium: {error.message.splitlines()[0]}; set CHROMIUM, or 'playwright install chromium'")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The paths of pages about corpora, a plan and a run."""
    directory = tmp_path_factory.mktemp("pages")
    mix = write_mix(directory)
    evil = write_evil_corpus(directory / "<img src=x onerror='window.evil=5'>")
    assert run(["report", str(evil), str(directory / "a"), "--out", str(directory / "corpora.html")]) == 0
    assert run(["report", str(mix), "--out", str(directory / "plan.html")]) == 0
    assert run(["report", str(write_metrics(directory / "run").parent), "--out", str(directory / "run.html")]) == 0
    return {name: directory / f"{name}.html" for name in ("corpora", "plan", "run")}


@pytest.fixture
def visit(chromium, pages):
    """Opens a page; afterwards, it must not have logged anything, requested anything or run text of a corpus."""
    opened, troubles = [], []

    def visit(name, *, scheme="light", viewport=DESK):
        page = chromium.new_page(color_scheme=scheme, viewport=viewport)
        opened.append(page)
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or troubles.append(request.url))
        page.goto(pages[name].as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        return page

    yield visit
    for page in opened:
        assert page.evaluate("window.evil") is None
        page.close()
    assert troubles == []


@pytest.mark.parametrize("name", ["corpora", "plan", "run"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_a_page_draws_every_chart_and_fits_the_width_of_the_screen(visit, name, scheme, viewport):
    page = visit(name, scheme=scheme, viewport=viewport)
    assert page.locator(".chart .main-svg").count() >= page.locator(".chart").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == (scheme == "dark")


def test_charts_follow_when_the_colors_of_the_system_change(visit):
    from playwright.sync_api import expect

    page = visit("plan")
    text = page.locator(".chart .xtick text").first
    before = text.evaluate("text => getComputedStyle(text).fill")
    page.emulate_media(color_scheme="dark")
    expect(text).not_to_have_css("fill", before)


def test_text_of_a_corpus_is_shown_unchanged(visit):
    page = visit("corpora")
    shown = page.locator(".tokens").first.text_content()
    assert shown == "<script>window.evil = 1; console.error('evil')</script><|endoftext|>"
    assert page.locator("main img, main b").count() == 0
    assert "<img src=x onerror='window.evil=5'>" in page.locator("h2").nth(1).text_content()


def test_figures_of_steps_are_sorted_as_numbers(visit):
    table = visit("run").locator("table")
    for _ in range(2):
        table.get_by_role("button", name="gradient norm").click()
    figures = [float(cell or 0) for cell in table.locator("tbody td:nth-child(4)").all_text_contents()]
    assert figures == sorted(figures)


def test_shards_are_searched_and_sorted_by_keyboard(visit):
    page = visit("corpora")
    name = "Search shards by name or hash"
    table = page.locator("section", has=page.get_by_role("searchbox", name=name)).last
    search = table.get_by_role("searchbox")
    total = int(table.get_by_role("status").text_content().split()[-1])
    assert total > 3
    search.focus()
    page.keyboard.type("000-0002.arrow")
    assert table.locator("tbody tr").count() == 1
    assert table.get_by_role("status").text_content() == f"1 of 1 that match, of {total}"
    search.fill("")
    page.keyboard.press("Tab")  # to the table, which scrolls
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "documents"
    page.keyboard.press("Enter")
    counts = [int(cell) for cell in table.locator("tbody td:nth-child(2)").all_text_contents()]
    assert counts == sorted(counts, reverse=True)
    assert table.locator("th").nth(1).get_attribute("aria-sort") == "descending"
