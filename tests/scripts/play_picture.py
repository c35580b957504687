"""Takes docs/play.png:  python -m tests.scripts.play_picture CHECKPOINT NAME PICTURE

The page of play.py in a real browser, with a head switched off and the first token that differs pointed at.
"""

import sys
import tempfile
from pathlib import Path

from tests.browser import chromium, resize
from tests.scripts.play_page import PlayPage
from tests.scripts.play_server import served
from tril.model.checkpoint import load

PROMPT, N_TOKENS, SWITCHED_OFF, SHOWN = "def read(self,", 80, "L2H3", "L1H1"
WIDTH = 1280


def take(checkpoint: Path, name: str, picture: Path) -> None:
    """Writes the picture.

    Args:
        name: of the model on the page.
    """
    with (
        tempfile.TemporaryDirectory() as profile,
        chromium(Path(profile)) as driver,
        served(load(checkpoint), prompt=PROMPT, names=[name]) as server,
    ):
        resize(driver, WIDTH, 900)
        page = PlayPage(driver).open(server, max_new_tokens=N_TOKENS).generate()
        page.switch(SWITCHED_OFF)
        page.find(f".strip[title='{SHOWN}']").click()
        page.point(page.find(".token.differs"))
        resize(driver, WIDTH, page.js("return document.documentElement.scrollHeight"))
        assert driver.save_screenshot(str(picture))


if __name__ == "__main__":
    take(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
