"""What all entry points share."""

import subprocess
import sys

import pytest

from scripts.cli import CONFIGS

ROOT = CONFIGS.parent


@pytest.mark.parametrize("script", ["train.py", "scripts/sample.py"])
def test_a_reader_of_the_help_may_stop_reading(script, tmp_path):
    process = subprocess.Popen([sys.executable, ROOT / script, "--help"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 141
