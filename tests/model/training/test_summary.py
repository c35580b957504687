"""The figures at the end of a run: whose memory is counted."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import tiny_gpt
from tril.model.training.hardware import Hardware
from tril.model.training.summary import PACKAGE, code_version, finish, peak_memory_bytes

ROW = {"step": 4, "loss": 2.0, "bpb": 1.5}
METRICS = SimpleNamespace(
    val_windows={"scored": 12, "of": 12},
    val=[ROW],
    train=[],
    best=lambda: ROW,
    tokens_per_step=8,
    tokens_per_second=lambda: 9.0,
    mfu=lambda: None,
)


@pytest.mark.parametrize(("accelerator", "counted"), [("cuda", True), ("cpu", False)])
def test_the_memory_of_a_run_is_that_of_its_device(monkeypatch, tmp_path, accelerator, counted):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 10**15)
    hardware = Hardware(accelerator, "32-true", None, "a machine", None)
    data = {
        "val_bytes_per_token": 1.0,
        "fingerprint": "text",
        "source": {"kind": "file"},
        "counts": {"train": {"tokens": 1000}},
    }
    finish(METRICS, tiny_gpt(), tmp_path, hardware=hardware, seed=0, data=data, seconds=1.0, certificate=None)
    peak = json.loads((tmp_path / "summary.json").read_text())["peak_memory_gb"]
    assert (peak == 3e6) is counted and peak > 0.01
    assert peak_memory_bytes("cpu") < 3 * 10**15  # of this process


def test_the_code_version_is_that_of_this_checkout_alone(tmp_path):
    """A package installed within another repository has none."""
    package = tmp_path / "site-packages" / "tril"
    package.mkdir(parents=True)
    assert code_version(package) is None
    identity = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    for command in (["init"], [*identity, "commit", "--allow-empty", "-m", "theirs"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True, capture_output=True)
    assert code_version(package) is None
    commit = code_version(tmp_path)
    assert commit is not None and len(commit) == 12
    (package / "file").touch()
    assert code_version(tmp_path) == commit + "+"
    assert (code_version() is None) != (PACKAGE / ".git").exists()
