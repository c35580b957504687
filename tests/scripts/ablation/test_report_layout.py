"""The page of a sweep's report in a browser: the order of its parts, narrow screens, dark mode, what is folded away."""

import pytest

from tests.browser import Page, chromium, no_messages_or_requests, resize
from tests.scripts.ablation.synthetic import write_sweep
from tril.scripts.ablation.comparisons import compare_with_baseline
from tril.scripts.ablation.plot_style import SECTIONS, Picture
from tril.scripts.ablation.report import write_up
from tril.scripts.ablation.report_tables import read_configs
from tril.scripts.ablation.results import read_sweep
from tril.scripts.ablation.templates import render

GRAY = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCB4SbLdwAAAABJRU5ErkJggg=="  # one pixel
LOSSES = {
    ("rmsnorm", "swiglu"): {0: 3.0, 1: 3.02, 2: 3.07},
    ("layernorm", "a_rather_long_name"): {0: 3.1, 1: 3.16, 2: 3.12},
    ("none", "relu2"): {0: 3.3, 1: "failed", 2: 3.4},
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    keys = ["model.norm", "model.mlp"]
    sweep = read_sweep(write_sweep(folder / "sweep", keys, LOSSES, baseline=("rmsnorm", "swiglu")))
    for path in sweep.folder.rglob("config.yaml"):
        path.write_text(path.read_text() + "trainer: {accumulate_grad_batches: 1}\n")
    pictures = [Picture(f"{section}.png", section, "A caption.", section) for section in SECTIONS]
    found, configs = compare_with_baseline(sweep), read_configs(sweep)
    content = write_up(sweep, "final", comparisons=found, configs=configs, pictures=pictures)
    page = folder / "report.html"
    page.write_text(render("report.html", **content, images={picture.file: GRAY for picture in pictures}), "utf-8")
    return page.as_uri()


@pytest.fixture
def page(driver, address):
    def open_page(width: int, dark: bool = False) -> Page:
        resize(driver, width, 900, dark=dark)
        driver.get(address)
        return Page(driver)

    with no_messages_or_requests(driver):
        yield open_page


def test_the_verdict_comes_first_and_the_settings_are_folded_away(page):
    page = page(1200)
    parts = page.texts("h1, .answer, h2, summary, figure strong")
    assert parts[0] == "Sweep over model.norm, model.mlp" and parts[1].startswith("Against (norm=rmsnorm, mlp=swiglu)")
    assert parts[2:] == [
        "Compared with norm=rmsnorm, mlp=swiglu: final validation loss",
        "comparison.",
        "How the intervals are computed",
        "Losses",
        "losses.",
        "curves.",
        "Size and speed",
        "costs.",
        "What was swept",
        "Settings of the runs",
        "Training",
    ]
    folded = page.texts("summary")
    assert folded == ["How the intervals are computed", "Settings of the runs", "Training"]
    visible = "return [...document.querySelectorAll('table')].map((table) => table.checkVisibility())"
    assert page.js(visible) == [True, False, True, True, True, False, False, False]
    page.find("summary").click()
    assert page.js(visible)[:2] == [True, True]


OPEN = "document.querySelectorAll('details').forEach((details) => { details.open = true; })"
# a word that a line break cuts has more than one rectangle
CUT = """
const cut = [];
for (const cell of document.querySelectorAll('.table td:first-child, th')) {
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    for (const word of walker.currentNode.data.matchAll(/[^\\s-]+/g)) {
      const range = document.createRange();
      range.setStart(walker.currentNode, word.index);
      range.setEnd(walker.currentNode, word.index + word[0].length);
      if (range.getClientRects().length > 1) cut.push(word[0]);
    }
  }
}
return cut;
"""


def test_a_narrow_page_scrolls_only_its_tables_and_cuts_no_word(page):
    page = page(400)
    page.js(OPEN)
    assert page.js("return document.documentElement.scrollWidth") <= 400
    wide = page.js("return [...document.querySelectorAll('.table')].filter((box) => box.scrollWidth > box.clientWidth)")
    hint = "const hint = arguments[0].previousElementSibling; return hint.matches('.hint') && hint.checkVisibility()"
    assert wide and [box.text for box in wide if not page.js(hint, box)] == []
    assert page.js(CUT) == []


def test_no_hint_where_tables_fit(page):
    assert page(1200).js("return [...document.querySelectorAll('.hint')].some((e) => e.checkVisibility())") is False


def test_dark_mode_has_a_dark_page_with_light_pictures(page):
    page = page(400, dark=True)
    color = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    assert page.js(color, "body", "backgroundColor") == "rgb(20, 23, 28)"
    assert page.js(color, "body", "color") == "rgb(230, 233, 238)"
    assert page.js(color, "figure img", "backgroundColor") == "rgb(255, 255, 255)"
