"""`train.py -m` in this process, in a folder of the fixture `here`."""

import json
from pathlib import Path
from types import SimpleNamespace

from tests.calls import call
from tests.runs import TINY
from tril import train


def sweep(cwd: Path, *overrides: str) -> SimpleNamespace:
    return call(train.main, "-m", *TINY, "data.path=text.txt", *overrides, cwd=cwd, TRIL_CACHE=str(cwd / "cache"))


def index_of(cwd: Path) -> dict:
    """The sweep.json of the only sweep."""
    [path] = cwd.glob("multirun/*/*/sweep.json")
    return json.loads(path.read_text())
