"""The attention page: its data decoded again, and what a browser draws from them."""

import base64
import re

import numpy as np
import pytest
import torch

from tests.browser import resize
from tests.model.heads.page_driver import AFTER, L1H0, MAPS, TOKENS, head_name, write


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_rounded_to_float16_and_only_zero_is_zero(tmp_path, dtype):
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


def test_the_page_takes_two_and_two_thirds_bytes_per_weight(tmp_path):
    one, three = (write(tmp_path, torch.rand(1, n, 60, 60), ["t"] * 60, [[]] * 60).stat().st_size for n in (1, 3))
    assert three - one == 2 * 60 * 60 * 8 // 3 and one < 60 * 60 * 8 // 3 + 30_000


SHAPES = [
    ((2, 5, 5), 5, 5),
    ((1, 2, 5, 4), 5, 5),
    ((1, 2, 4, 5), 5, 5),
    ((1, 2, 4, 4), 5, 5),
    ((2, 0, 5, 5), 5, 5),
    ((0, 2, 5, 5), 5, 5),
]
SHAPES += [((2, 3, 5, 5), 4, 5), ((2, 3, 5, 5), 5, 4), ((1, 1, 0, 0), 0, 0)]


@pytest.mark.parametrize("shape, n_tokens, n_after", SHAPES)
def test_shapes_that_do_not_fit_are_named_and_nothing_is_write(tmp_path, shape, n_tokens, n_after):
    with pytest.raises(ValueError) as error:
        write(tmp_path, torch.zeros(shape), TOKENS[:n_tokens], AFTER[:n_after])
    named = f"{n_tokens} tokens, maps {shape} and probabilities after {n_after} tokens do not match; "
    assert str(error.value).startswith(named) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dark", [False, True])
def test_the_upper_triangle_is_drawn_from_the_data_and_empty(page, driver, dark):
    page = page()
    resize(driver, 1280, 900, dark=dark)
    page.select(1, 0)
    pixels, zero = page.pixels("#canvas"), torch.tensor(L1H0).numpy() == 0
    assert (pixels[zero] == page.color("--empty")).all()
    assert (pixels[~zero] != page.color("--empty")).any(-1).all() and (pixels != page.color("--leak")).any(-1).all()
    assert (pixels[0, 0] == page.color("--high")).all()
    assert (pixels[0, 4].sum() < 100) == dark
    distance = [
        np.abs(pixels[cell] - pixels[0, 0]).sum() for cell in [(1, 1), (2, 0), (1, 0), (3, 0)]
    ]  # 0.75, 0.5, 0.25, 0.125
    assert distance == sorted(set(distance))
    message = "The upper triangle is empty because the model is causal: "
    message += "the largest weight above the diagonal, in all 6 heads, is 0."
    assert page.texts("#above") == [message] and page.texts("#above.leaks") == []


@pytest.mark.parametrize("weight, number", [(0.25, "0.250"), (1e-12, "6.0e-8"), (float("nan"), "NaN")])
def test_a_weight_above_the_diagonal_is_highlighted_and_named(page, weight, number):
    maps = MAPS.clone()
    maps[1, 2, 1, 3] = weight
    maps[1, 2, 0, 4] = min(weight, 0.125)  # a smaller one, or nan as well
    page, leaks = page(maps=maps), np.zeros((5, 5), bool)
    leaks[1, 3] = leaks[0, 4] = True
    page.select(1, 2)
    assert ((page.pixels("#canvas") == page.color("--leak")).all(-1) == leaks).all()
    for layer in range(2):
        for head in range(4):  # in the thumbnails of that head, and of the mean
            highlighted = (page.pixels(f"button[title='{head_name(layer, head)}'] canvas") == page.color("--leak")).all(
                -1
            )
            assert (highlighted == (leaks if (layer, head) in [(1, 2), (1, 3)] else False)).all(), (layer, head)
    where = "L1H2, token 0 attends to token 4" if number != "0.250" else "L1H2, token 1 attends to token 3"
    assert page.texts("#above.leaks") == [
        "The upper triangle is not empty: the largest weight above the diagonal, in all 6 heads, "
        f"is {number} ({where}, which comes later). "
        "This model sees the future."
    ]
    page.point(page.token(1))
    assert "leak" in page.token(3).get_attribute("class") and page.weights()[3] == f"weight {number}"


def test_a_thumbnail_of_many_tokens_loses_no_leak(page):
    maps = torch.eye(100).expand(1, 1, 100, 100).clone()
    maps[0, 0, 40, 81] = 2**-20
    highlighted = (page(maps=maps, tokens=["t"] * 100, after=[[]] * 100).pixels("button canvas") == [255, 0, 80]).all(
        -1
    )
    assert np.argwhere(highlighted).tolist() == [[40 * 48 // 100, 81 * 48 // 100]]


def test_the_page_reads_every_float16(page):
    codes = np.arange(2**16, dtype="<u2").view("<f2")
    page = page(maps=torch.from_numpy(codes.copy()).view(1, 1, 256, 256), tokens=["t"] * 256, after=[[]] * 256)
    decoded = np.array(page.js("return [...matrix].map(String)"), dtype=np.float64)
    np.testing.assert_array_equal(decoded, codes.astype(np.float64))


HOSTILE = [
    "שלום",
    "עולם",
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>&lt;b&amp;",
]
HOSTILE += [
    "\"'`${1}\\u003c{{maps}}",
    "a\u2028\u2029b",
    "🙂é\ufffd",
    "\t \n",
    "\x00\x1b\x7f\r",
    "\udc80",
]  # last: half a surrogate pair


def test_any_text_is_shown_as_text(page):
    n, title = len(HOSTILE), "".join(HOSTILE[:-3])
    expected_title = [ord(c) for c in title + "\ufffd"]
    page = page(
        maps=torch.eye(n).expand(1, 1, n, n),
        tokens=HOSTILE,
        after=[[(text, 0.5)] for text in HOSTILE],
        title=title + "\udc80",
    )
    code_points = "(e) => Array.from(e.textContent, (c) => c.codePointAt(0))"
    points = f"return [...document.querySelectorAll(arguments[0])].map({code_points})"
    marked = str.maketrans({" ": "·", "\n": "↵", "\t": "→", "\x00": "␀", "\x1b": "␛", "\x7f": "␡", "\r": "␍"})
    expected = [[ord(c) for c in text.translate(marked)] for text in HOSTILE]
    assert [[c for c in token if c != ord("\n")] for token in page.js(points, ".token")] == expected
    assert page.js(points, "title, h1") == [expected_title] * 2
    for t in range(n):
        page.js("pointAtToken(arguments[0])", t)
        assert page.js(points, "#next > span:first-child") == [expected[t]]
        assert page.js(points, "#largest > span:first-child") == [[ord(c) for c in f"{t}"] + expected[t]]
    assert page.js("return [document.scripts.length, document.images.length]") == [3, 0]
    left = [page.token(t).rect["x"] for t in (0, 1)]
    assert left[0] < left[1]  # two words written from right to left stay in the order of the tokens


def test_both_lists_have_one_scale(page):
    page = page()
    page.select(1, 0)
    page.js("pointAtToken(2)")
    lengths = "return [...document.querySelectorAll(arguments[0])].map((bar) => bar.style.width)"
    assert page.js(lengths, "#largest i") == ["50%", "37.5%", "12.5%"]  # the weights
    assert page.js(lengths, "#next i") == ["50%", "31.25%", "0.04%", "18.71%"]  # the probabilities, and the rest
    assert page.texts("#bars") == ["Both lists have one scale: a full bar is a weight of 1, or a probability of 100 %."]


def test_the_scores_of_a_head_are_next_to_its_name(page):
    entropy = torch.tensor([[0.0, 0.25, 0.5], [1.5, 2.0, float("nan")]])
    page = page(scores={"entropy": ("nats", entropy), "self": ("weight of the token itself", entropy / 2)})
    page.select(1, 0)
    assert page.texts("#weights h2") == ["Weights of L1H0 entropy 1.500self 0.750"]
    assert page.attributes("#scores span", "title") == ["nats", "weight of the token itself"]
    page.select(1, 2)
    assert page.texts("#scores b") == ["-", "-"]
    page.select(1, 3)  # the mean of all heads has none
    assert page.texts("#scores span") == []
