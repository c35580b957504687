"""The page of play.py in a browser: what a user does, what a test reads, and how tokens and numbers are written.

`python -m tests.scripts.play_page CHECKPOINT NAME PICTURE` takes docs/play.png: a head is switched off, and the first
token that differs is pointed at.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import pytest

from tests.browser import Page, chromium, no_messages_or_requests, resize
from tests.scripts.play_server import options, served
from tril.model.checkpoint import load
from tril.model.heads.live import live_tokens

N_TOKENS = 12
SYMBOLS = {" ": "·", "\n": "↵", "\t": "→", "\x7f": "␡"}
NEW = ".token[role=button]"


class PlayPage(Page):
    """The page with the settings temperature 0.8, top-k 50 and seed 0, and `N_TOKENS` new tokens."""

    def open(self, server, **fields):
        self.driver.get(f"http://127.0.0.1:{server.port}/")
        self.until("panes.length > 0")
        self.fill(**{"max_new_tokens": N_TOKENS, **fields})
        return self

    def until(self, condition):
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 20, poll_frequency=0.02).until(lambda _: self.js(f"return {condition}"))

    def until_done(self):
        self.until("$('stop').disabled")

    def fill(self, **fields):
        for name, value in fields.items():
            self.js("$(arguments[0]).value = arguments[1]", name, value)

    def generate(self):
        self.find("#generate").click()
        self.until_done()
        return self

    def pane(self, number, expression):
        return self.js(f"return panes[{number}].{expression}")

    def candidates(self):
        """The cells of each row of the table: name, bar, drawn from, model, all heads."""
        cells = self.texts(".candidates tbody :is(th, td)")
        return [cells[i : i + 5] for i in range(0, len(cells), 5)]

    def switch(self, head):
        self.find(f".switch[title='{head}']").click()
        self.until_done()

    def token(self, t):
        return self.find(f".token[data-token='{t}']")


@contextlib.contextmanager
def only_requests_to(driver, port):
    """As `no_messages_or_requests`, which counts requests of the page to its own server as well."""
    with pytest.MonkeyPatch.context() as patch:
        get_log, own = driver.get_log, f'"http://127.0.0.1:{port}/'

        def of_others(kind):
            return [entry for entry in get_log(kind) if kind == "browser" or own not in entry["message"]]

        patch.setattr(driver, "get_log", of_others)
        with no_messages_or_requests(driver):
            yield


def known(lm, prompt="def ", gate=None, **values):
    values = {"temperature": 0.8, "top_k": 50, "seed": 0, "max_new_tokens": N_TOKENS, **values}
    return list(live_tokens(lm, prompt, head_gate=gate, **options(**values)))


def visible(text):
    """As the page writes the name of a token."""
    return "".join(SYMBOLS.get(c, chr(0x2400 + ord(c)) if c < " " else c) for c in text)


def percent(p):
    return "0" if p == 0 else "< 0.1 %" if p < 0.001 else f"{100 * p:.1f} %"


def take_picture(checkpoint: Path, name: str, picture: Path) -> None:
    """Writes the picture of a model, which the page calls `name`."""
    model = {"prompt": "def read(self,", "names": [name]}
    with (
        tempfile.TemporaryDirectory() as profile,
        chromium(Path(profile)) as driver,
        served(load(checkpoint), **model) as server,
    ):
        resize(driver, 1280, 900)
        page = PlayPage(driver).open(server, max_new_tokens=80).generate()
        page.switch("L2H3")
        page.find(".strip[title='L1H1']").click()
        page.point(page.find(".token.differs"))
        resize(driver, 1280, page.js("return document.documentElement.scrollHeight"))
        assert driver.save_screenshot(str(picture))


if __name__ == "__main__":
    take_picture(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
