"""The attention page: its data decoded again, and what a browser draws from them, by mouse, keyboard and finger."""

import base64
import re
import zlib

import numpy as np
import pytest
import torch

from tests.browser import Page, chromium, no_messages_or_requests, resize, tap
from tril.model.heads.page import write_page
from tril.model.heads.records import compress_maps

TOKENS = ["def", " f", "(", "\n\tx", ")"]
WRITTEN = ["def", "·f", "(", "↵→x", ")"]
L1H0 = [
    [1.0, 0.0, 0.0, 0.0, 0.0],
    [0.25, 0.75, 0.0, 0.0, 0.0],
    [0.5, 0.125, 0.375, 0.0, 0.0],
    [0.125, 0.0, 0.625, 0.25, 0.0],
    [0.5, 0.25, 0.125, 0.0, 0.125],
]
SELF, FIRST = torch.eye(5), torch.eye(5)[0].expand(5, 5)
LAYERS = [[FIRST, SELF, (FIRST + SELF) / 2], [torch.tensor(L1H0), (3 * FIRST + SELF) / 4, (FIRST + 3 * SELF) / 4]]
MAPS = torch.stack([torch.stack(heads) for heads in LAYERS])  # (2, 3, 5, 5)
AFTER = [
    [(" g", 0.5), ("\n", 0.25)],
    [("(", 0.75)],
    [(")", 0.5), ("\n\tx", 0.3125), ("*", 0.0004)],
    [(",", 1.0)],
    [(":", float("nan"))],
]


def write(path, maps=MAPS, tokens=TOKENS, after=AFTER, title="A title", scores=None, earlier=None):
    more = {"scores": scores, "earlier": earlier}
    write_page(path / "page.html", tokens=tokens, maps=maps, probabilities=after, title=title, **more)
    return path / "page.html"


class AttentionPage(Page):
    def token(self, t):
        return self.find(f".token[data-token='{t}']")

    def weights(self):
        """The weights of the query, from the tooltips of the tokens."""
        return self.attributes(".token", "title")

    def point_at_cell(self, row, column):
        """Moves to a point right of and below the cell's center."""
        size = self.find("#canvas").size["width"] / 5
        self.point(self.find("#canvas"), round((column - 1.75) * size), round((row - 1.75) * size))

    def select(self, layer, head):
        self.find(f"#overview button[title='{head_name(layer, head)}']").click()


def shown(weights):
    """Weights as the page writes them."""
    return [f"weight {w:.3f}" if w else "weight 0" for w in weights]


def head_name(layer, head):
    return f"L{layer}H{head}" if head < 3 else f"L{layer}, mean of all heads"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def page(driver, tmp_path):
    """Opens a page; it may write no console message and send no request."""

    def open_page(**parts) -> AttentionPage:
        driver.get(write(tmp_path, **parts).as_uri())
        return AttentionPage(driver)

    resize(driver, 1280, 900)
    with no_messages_or_requests(driver) as opened:
        yield open_page
    assert set(opened) == {(tmp_path / "page.html").as_uri()}


def test_weights_are_rounded_to_float16_and_only_zero_is_zero(tmp_path):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        maps = (10.0 ** torch.linspace(0, -12, 3 * 2 * 8 * 8, dtype=torch.float64)).view(3, 2, 8, 8).to(dtype).tril()
        maps[0, 0, 0, 7] = 1e-40 if dtype != torch.float16 else 2**-24  # a leak far below what float16 can hold
        exact = maps.double().numpy()
        page = write(tmp_path, maps, ["t"] * 8, [[]] * 8).read_text("utf-8")
        text = re.search(r'<script type="text/plain" id="maps">([A-Za-z0-9+/=]*)</script>', page)[1]
        decoded = np.frombuffer(base64.b64decode(text), "<f2").reshape(exact.shape).astype(np.float64)
        assert ((decoded == 0) == (exact == 0)).all() and (exact == 0).any()
        error, small = np.abs(decoded - exact), exact < 2.0**-14
        assert (error[~small] <= exact[~small] * 2.0**-11).all()
        assert (error[small] <= 2.0**-24).all() and (error[small & (exact >= 2.0**-24)] <= 2.0**-25).all()


@pytest.mark.parametrize("dark", [False, True])
def test_the_upper_triangle_is_drawn_from_the_data_and_empty(page, driver, dark):
    resize(driver, 1280, 900, dark=dark)
    page = page()
    page.select(1, 0)
    pixels, zero = page.pixels("#canvas"), torch.tensor(L1H0).numpy() == 0
    assert (pixels[zero] == page.color("--empty")).all() and (pixels[0, 4].sum() < 100) == dark
    assert (pixels[~zero] != page.color("--empty")).any(-1).all() and (pixels[0, 0] == page.color("--high")).all()
    cells = [(1, 1), (2, 0), (1, 0), (3, 0)]  # 0.75, 0.5, 0.25, 0.125: ever farther from the color of 1
    distance = [np.abs(pixels[cell] - pixels[0, 0]).sum() for cell in cells]
    assert distance == sorted(set(distance))
    assert "in all 6 heads, is 0" in page.texts("#above")[0] and page.texts("#above.leaks") == []


@pytest.mark.parametrize(("weight", "number"), [(1e-12, "6.0e-8"), (float("nan"), "NaN")])
def test_a_weight_above_the_diagonal_is_highlighted_and_named(page, weight, number):
    maps = MAPS.clone()
    maps[1, 2, 1, 3] = weight
    page, leaks = page(maps=maps), np.zeros((5, 5), bool)
    leaks[1, 3] = True
    page.select(1, 2)
    assert ((page.pixels("#canvas") == page.color("--leak")).all(-1) == leaks).all()
    for layer, head in np.ndindex(2, 4):  # in the thumbnails of that head, and of the mean
        colored = (page.pixels(f"button[title='{head_name(layer, head)}'] canvas") == page.color("--leak")).all(-1)
        assert (colored == (leaks if (layer, head) in [(1, 2), (1, 3)] else False)).all(), (layer, head)
    [message] = page.texts("#above.leaks")
    assert f"is {number} (L1H2, token 1 attends to token 3, which comes later)" in message
    page.point(page.token(1))
    assert "leak" in page.token(3).get_attribute("class") and page.weights()[3] == f"weight {number}"


HOSTILE = ["שלום", "עולם", "</script><script>alert(1)</script>", "<!--<script>", "<img src=x onerror=alert(1)>&lt;"]
HOSTILE += ["\"'`${1}\\u003c{{maps}}", "a\u2028\u2029b", "🙂é\ufffd", "\t \n", "\x00\x1b\x7f\r", "\udc80"]


def test_any_text_is_shown_as_text(page):
    n, title = len(HOSTILE), "".join(HOSTILE[:-3])
    after = [[(text, 0.5)] for text in HOSTILE]
    page = page(maps=torch.eye(n).expand(1, 1, n, n), tokens=HOSTILE, after=after, title=title + "\udc80")
    code_points = "(e) => Array.from(e.textContent, (c) => c.codePointAt(0))"
    points = f"return [...document.querySelectorAll(arguments[0])].map({code_points})"
    marked = str.maketrans({" ": "·", "\n": "↵", "\t": "→", "\x00": "␀", "\x1b": "␛", "\x7f": "␡", "\r": "␍"})
    expected = [[ord(c) for c in text.translate(marked)] for text in HOSTILE]
    assert [[c for c in token if c != ord("\n")] for token in page.js(points, ".token")] == expected
    assert page.js(points, "title, h1") == [[ord(c) for c in title + "\ufffd"]] * 2
    for t in range(n):
        page.js("pointAtToken(arguments[0])", t)
        assert page.js(points, "#next > span:first-child") == [expected[t]]
        assert page.js(points, "#largest > span:first-child") == [[ord(c) for c in f"{t}"] + expected[t]]
    assert page.js("return [document.scripts.length, document.images.length]") == [4, 0]
    left = [page.token(t).rect["x"] for t in (0, 1)]
    assert left[0] < left[1]  # two words written from right to left stay in the order of the tokens


def test_every_selected_head_shows_its_weights_and_scores(page):
    entropy = torch.tensor([[0.0, 0.25, 0.5], [1.5, 2.0, float("nan")]])
    page = page(scores={"entropy": ("nats", entropy), "self": ("weight of the token itself", entropy / 2)})
    assert page.weights() == shown(MAPS[0, 0, 4].tolist())  # at first: the last token in the first head
    page.point(page.token(2))
    for layer, head in np.ndindex(2, 3):
        page.select(layer, head)
        assert page.weights() == shown(MAPS[layer, head, 2].tolist()), (layer, head)
        scores = [entropy[layer, head], entropy[layer, head] / 2]
        assert page.texts("#scores b") == [f"{x:.3f}" if x.isfinite() else "-" for x in scores]
        assert page.texts(".name") == [head_name(layer, head)] * 2
    page.find("#head").send_keys("mean of all")
    assert page.weights() == shown(MAPS[1, :, 2].mean(0).tolist()) and page.texts("#scores span") == []


def test_a_slider_shows_the_maps_of_earlier_steps(page):
    """All heads attend to the token itself at step 1,000; the checkpoint has other maps."""
    leaking = SELF.clone()
    leaking[0, 4] = 1e-9
    codes = np.frombuffer(zlib.decompress(compress_maps(leaking.numpy())), np.uint8).reshape(5, 5)
    page = page(earlier={1000: np.broadcast_to(codes, (2, 3, 5, 5))})
    page.select(1, 0)
    page.point(page.token(2))
    assert page.texts("#at") == ["this checkpoint"] and page.weights() == shown(L1H0[2])
    page.js("arguments[0].focus()", page.find("#step"))
    page.press("ARROW_LEFT")
    assert page.texts("#at") == ["step 1,000"] and page.weights() == shown(SELF[2].tolist())
    for canvas in ("#canvas", "button[title='L1H0'] canvas"):
        assert (page.pixels(canvas)[0, 4] == page.color("--leak")).all()
    page.press("END")
    assert page.texts("#at") == ["this checkpoint"] and page.weights() == shown(L1H0[2])


def test_tokens_and_cells_show_their_weights_to_a_mouse_and_a_finger(page, driver):
    page = page()
    page.select(1, 0)
    page.point(page.token(2))
    assert page.texts("#largest > span") == ["0def", "", "0.500", "2(", "", "0.375", "1·f", "", "0.125"]
    expected = [")", "", "50.0%", "↵→x", "", "31.3%", "*", "", "< 0.1%", "all others", "", "18.7%"]
    assert page.texts("#next > span") == expected and page.texts("#next .actual:not(.track)") == ["↵→x", "31.3%"]
    lengths = "return [...document.querySelectorAll(arguments[0])].map((bar) => bar.style.width)"
    assert page.js(lengths, "#largest i") == ["50%", "37.5%", "12.5%"]  # both lists have one scale
    assert page.js(lengths, "#next i") == ["50%", "31.25%", "0.04%", "18.71%"]
    page.token(3).click()
    page.point(page.token(2))
    assert page.weights() == shown(L1H0[3]) and page.texts("output") == ["3↵→x attends to 2( with weight 0.625"] * 2
    page.token(3).click()
    page.point(page.token(1))
    assert page.weights() == shown(L1H0[1])  # no longer pinned
    for row, column, later in [(2, 1, ""), (1, 4, ", which comes later,")]:
        page.point_at_cell(row, column)
        message = f"{row}{WRITTEN[row]} attends to {column}{WRITTEN[column]}{later} with {shown(L1H0[row])[column]}"
        assert page.texts("output") == [message] * 2 and page.weights() == shown(L1H0[row])
        assert page.texts("#rows .on") == [WRITTEN[row]] and page.texts("#columns .on") == [WRITTEN[column]]
    resize(driver, 375, 800, touch=True)
    for t in (2, 3):
        tap(driver, page.token(t))
        assert page.weights() == shown(L1H0[t])


@pytest.mark.parametrize(("width", "n"), [(375, 20), (1280, 130)])  # with labels of the matrix, and without
def test_no_width_makes_the_page_scroll_sideways(page, driver, width, n):
    tokens = ["x" * 90, *[" word"] * (n - 1)]
    page = page(maps=torch.eye(n).expand(2, 12, n, n), tokens=tokens, after=[[("y" * 90, 0.5)]] * n, title="z" * 200)
    resize(driver, width, 800, touch=width == 375)
    page.js("pointAtToken(0)")
    assert page.js("return [innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [width, True]
    wide = "[...document.querySelectorAll('section, #text')].filter((e) => e.scrollWidth > e.clientWidth)"
    assert page.js(f"return {wide}") == []


def test_a_thumbnail_of_many_tokens_loses_no_leak(page):
    maps = torch.eye(100).expand(1, 1, 100, 100).clone()
    maps[0, 0, 40, 81] = 2**-20
    pixels = page(maps=maps, tokens=["t"] * 100, after=[[]] * 100).pixels("button canvas")
    assert np.argwhere((pixels == [255, 0, 80]).all(-1)).tolist() == [[40 * 48 // 100, 81 * 48 // 100]]


def test_everything_can_be_reached_by_keyboard(page):
    page = page()
    keys = ("ARROW_DOWN", "ARROW_DOWN", "ARROW_RIGHT", "ARROW_LEFT")
    page.press("TAB", "TAB", "TAB", *keys)  # past the selects, among the heads
    assert page.texts(".name") == ["L1H0"] * 2
    page.press("TAB", "ARROW_UP", "ARROW_LEFT", "ARROW_LEFT")
    assert page.texts("output") == ["3↵→x attends to 2( with weight 0.625"] * 2 and page.weights() == shown(L1H0[3])
    page.press("TAB", "ARROW_LEFT", "ARROW_RIGHT", "ARROW_RIGHT")  # from the token of the cell
    assert page.texts("code.query") == ["3↵→x"] * 3 and page.weights() == shown(L1H0[3])
    page.press("ENTER", "HOME", "ARROW_LEFT")
    assert page.weights() == shown(L1H0[3]) and page.texts("output") == ["3↵→x attends to 0def with weight 0.125"] * 2
