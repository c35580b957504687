"""One browser for all tests of the attention page."""

import pytest

from tests.browser import chromium, no_messages_or_requests, resize
from tests.model.heads.page_driver import AttentionPage, write


@pytest.fixture(scope="session")
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
