"""The figures at the end of a run: whose memory is counted."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import tiny_gpt
from tril.model.training.hardware import Hardware
from tril.model.training.summary import finish, peak_memory_bytes

ROW = {"step": 4, "loss": 2.0, "bpb": 1.5}
METRICS = SimpleNamespace(
    val=[ROW], train=[], best=lambda: ROW, tokens_per_step=8, tokens_per_second=lambda: 9.0, mfu=lambda: None
)


@pytest.mark.parametrize(("accelerator", "counted"), [("cuda", True), ("cpu", False)])
def test_the_memory_of_a_run_is_that_of_its_device(monkeypatch, tmp_path, accelerator, counted):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 10**15)
    hardware = Hardware(accelerator, "32-true", None, "a machine", None)
    data = {"val_bytes_per_token": 1.0, "fingerprint": "text"}
    finish(METRICS, tiny_gpt(), tmp_path, hardware=hardware, seed=0, data=data, seconds=1.0, causality=None)
    peak = json.loads((tmp_path / "summary.json").read_text())["peak_memory_gb"]
    assert (peak == 3e6) is counted and peak > 0.01
    assert peak_memory_bytes("cpu") < 3 * 10**15  # of this process
