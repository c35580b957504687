"""Seeded random damage to text files: their text, or one line that refuses them; an archive never gives other text."""

import json
from pathlib import Path

import pytest

from tests.conftest import run_python
from tests.data.sources.random_damage import outcomes

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.gz"])
def test_damaged_text(tmp_path, name):
    """A file without checksums may hold other text, which has another fingerprint."""
    counts = outcomes(tmp_path / name, seed=1, n=60)
    assert counts["line"] > 8
    assert counts["other"] == 0 or not name.endswith(".gz")


PROGRAM = """
import json, sys
from pathlib import Path
from tests.data.sources.random_damage import outcomes
print(json.dumps(outcomes(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
"""


@pytest.mark.parametrize("n", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_tables(tmp_path, n):
    """In a separate process, since pyarrow ends the process for some damage, when some of its functions are called."""
    done = run_python("-c", PROGRAM, tmp_path / "a.parquet", "2", str(n), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["line"] > n / 2
