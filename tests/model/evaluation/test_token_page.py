"""The page of token costs, read again by an HTML parser, and in a browser."""

from html.parser import HTMLParser

import pytest

from tests.browser import Page, chromium, no_messages_or_requests, resize
from tril.model.evaluation.token_page import TokenCost, pieces, write_token_page

HOSTILE = [
    "<script>",
    "alert(1)",
    "</script>",
    '"><img src=x onerror=alert(2)>',
    "{{ title }}",
    "&lt;",
    "\u202e",
    "\x00",
]


class Reader(HTMLParser):
    """The elements of a page, and the text and title of each token."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.tokens, self._in_text = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._in_text = self._in_text or tag == "pre"
        if tag == "span" and self._in_text:
            self.tokens.append([dict(attrs), ""])

    def handle_endtag(self, tag):
        self._in_text = self._in_text and tag != "pre"

    def handle_data(self, data):
        if self._in_text and self.tokens:
            self.tokens[-1][1] += data


def read(path, costs, title="A title"):
    write_token_page(path / "page.html", costs, title, "A summary")
    return Reader((path / "page.html").read_text(encoding="utf-8"))


def test_each_token_has_its_bits_and_color(tmp_path):
    costs = [TokenCost("def", 0.0), TokenCost(" f", 1.999), TokenCost("\n\tx", 2.0), TokenCost("", 15.99)]
    costs += [TokenCost("y", 40.0), TokenCost("z", float("inf"))]
    page = read(tmp_path, costs)
    assert [(attrs["title"], attrs["class"], text) for attrs, text in page.tokens] == [
        ("0.00 bits", "b0", "def"),
        ("2.00 bits", "b0", " f"),
        ("2.00 bits", "b1", "\u21b5\n\u2192\tx"),
        ("15.99 bits", "b7", "\u25e6"),
        ("40.00 bits", "b8", "y"),
        ("inf bits", "b8", "z"),
    ]


def test_hostile_text_stays_text(tmp_path):
    page = read(tmp_path, [TokenCost(text, 1.0) for text in HOSTILE], title="<script>alert(3)</script>")
    assert not {"script", "img"} & set(page.tags)
    assert [text for _, text in page.tokens] == [*HOSTILE[:-2], r"\u202e", r"\x00"]
    assert "<script>" not in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "token_ends", "expected"),
    [
        ("ab cd", [2, 5], ["ab", " cd"]),
        ("a\u6f22b", [1, 2, 2, 2, 3], ["a", "\u6f22", "", "", "b"]),  # three tokens of one character
        ("ab  ", [2], ["ab  "]),  # a tokenizer that drops the spaces at the end
    ],
)
def test_pieces(text, token_ends, expected):
    assert list(pieces(text, token_ends)) == expected


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path):
    costs = [TokenCost(text, 3.0 * i) for i, text in enumerate([*HOSTILE, "x" * 300, "\n", "word"] * 9)]
    read(tmp_path, costs)
    with chromium(tmp_path / "profile") as driver:
        with no_messages_or_requests(driver):
            driver.get((tmp_path / "page.html").as_uri())
        page, colors = Page(driver), {}
        for dark in (False, True):
            resize(driver, 400, 700, dark=dark)
            assert page.js("return document.documentElement.scrollWidth") <= 400
            color = "return getComputedStyle(document.querySelector(arguments[0])).getPropertyValue(arguments[1])"
            colors[dark] = [page.js(color, "#text", name) for name in ("color", "background-color")]
            assert colors[dark][0] != colors[dark][1]
            assert page.js(color, "#text .b0", "background-color") != page.js(color, "#text .b8", "background-color")
        assert colors[False] != colors[True]
        assert page.attributes("#text span", "title")[:3] == ["0.00 bits", "3.00 bits", "6.00 bits"]
