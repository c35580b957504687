"""A headless Chromium for tests of HTML pages, driven by selenium.

Without a browser or selenium, the tests are skipped; with TRIL_REQUIRE_BROWSER=1 they fail.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # the sandbox refuses root, and a test opens only pages that it wrote
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator:
    """A selenium driver that records console messages and network requests; `profile` is an empty folder."""
    browser, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = "there is no chromium or google-chrome, or no chromedriver, on the PATH"
        if os.environ.get("TRIL_REQUIRE_BROWSER") == "1":
            pytest.fail(f"{missing}, and TRIL_REQUIRE_BROWSER=1")
        pytest.skip(missing)
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = browser
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = Chrome(options=options, service=Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


@contextlib.contextmanager
def no_messages_or_requests(driver) -> Iterator[list[str]]:
    """Asserts that the pages opened in this context write no console message and request nothing else.

    A console message is an error of a script, or something that the page's policy refused. Yields a list that holds the
    addresses of the pages at the end.
    """
    driver.get("about:blank")
    driver.get_log("browser"), driver.get_log("performance")  # reading empties them
    opened = []
    yield opened
    messages = [entry["message"] for entry in driver.get_log("browser")]
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    requests = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    others = [r["request"]["url"] for r in requests if r["type"] != "Document"]
    others = [url for url in others if not url.startswith("data:")]
    assert not messages and not others, f"console: {messages}; requested: {others}"
    opened += [r["request"]["url"] for r in requests if r["type"] == "Document"]


def resize(driver, width: int, height: int, *, dark: bool = False, touch: bool = False) -> None:
    """Sets the size of the page in CSS pixels, the preferred color scheme, and whether the screen is a touch screen."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch})
    colors = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [colors]})


class Page:
    """What a user sees and does."""

    def __init__(self, driver):
        self.driver, self.js = driver, driver.execute_script

    def find(self, selector: str):
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str, expression: str) -> list[str]:
        """A JavaScript expression of each element `e`."""
        return self.js(f"return [...document.querySelectorAll(arguments[0])].map((e) => {expression})", selector)

    def texts(self, selector: str) -> list[str]:
        return self.all(selector, "e.textContent")

    def attributes(self, selector: str, name: str) -> list[str]:
        return self.all(selector, f"e.getAttribute('{name}')")

    def point(self, element, *offset: int) -> None:
        """Moves the mouse to the center of the element, or to an offset from it in pixels."""
        from selenium.webdriver import ActionChains

        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        ActionChains(self.driver, duration=0).move_to_element_with_offset(element, *(offset or (0, 0))).perform()

    def press(self, *keys: str) -> None:
        """Presses keys by their names in selenium, such as "TAB"."""
        from selenium.webdriver import ActionChains, Keys

        ActionChains(self.driver).send_keys(*(getattr(Keys, key) for key in keys)).perform()

    def pixels(self, selector: str) -> np.ndarray:
        """The pixels of a canvas, (rows, columns, 3)."""
        data = "[...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
        script = f"const c = arguments[0]; return [c.width, c.height, {data}]"
        width, height, values = self.js(script, self.find(selector))
        return np.array(values).reshape(height, width, 4)[..., :3]

    def color(self, name: str) -> list[int]:
        """Red, green, blue of a CSS variable, "--NAME: #rrggbb"."""
        text = self.js("return getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim()", name)
        return [int(text[i : i + 2], 16) for i in (1, 3, 5)]


def tap(driver, element) -> None:
    """Taps on the center of the element, or of its first line."""
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    box = driver.execute_script("return arguments[0].getClientRects()[0].toJSON()", element)
    point = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    for kind, points in (("touchStart", [point]), ("touchEnd", [])):
        driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
