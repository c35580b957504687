"""The links between README.md, the pages in docs and the files of the repository."""

import re
from pathlib import Path

import pytest

from tests.documented import PAGES, ROOT

LINK = re.compile(r"\]\((?!https?:)([^)#\s{}]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def slugs(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page):
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}, which does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in slugs(target), f"{page.name} links to #{anchor}, which {target.name} does not have"


def test_readme_leads_to_every_page():
    linked = {path for path, _ in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert {page.relative_to(ROOT).as_posix() for page in PAGES if page.parent.name == "docs"} <= linked
