"""trainer.limit_val_batches shortens validation: every figure of such a run says so."""

import json
import math

import pytest

from tests.runs import train_typed
from tests.scripts.experiments.synthetic import write_sweep
from tril.scripts.experiments.sweep import read_sweep, scored_part

PART = {"val_windows": {"scored": 4, "of": 1110}}
WHOLE = {"val_windows": {"scored": 1110, "of": 1110}}


def test_a_run_says_how_many_windows_it_has_scored(configure, tmp_path, capsys):
    train_typed(configure("+trainer.limit_val_batches=1", "trainer.max_steps=2"))
    [meta] = tmp_path.glob("cache/*/meta.json")
    windows = math.ceil((json.loads(meta.read_text())["sources"][""]["counts"]["val"]["tokens"] - 1) / 32)
    summary, out = json.loads((tmp_path / "run" / "summary.json").read_text()), capsys.readouterr().out
    assert summary["val_windows"] == {"scored": 4, "of": windows} and windows > 4  # a batch of 4 windows
    assert f"nats per token (4 of {windows} windows)" in out
    assert f"on 4 of {windows} windows, not comparable with other runs (trainer.limit_val_batches)" in out


def test_runs_with_other_parts_are_not_compared(tmp_path):
    losses = {(1,): {0: 3.1}, (4,): {0: 3.0}}
    same = write_sweep(tmp_path / "same", ["model.n_heads"], losses, summary=dict.fromkeys(losses, PART))
    assert scored_part(read_sweep(same).runs) == "4 of 1,110 windows"
    mixed = write_sweep(tmp_path / "mixed", ["model.n_heads"], losses, summary={(1,): PART, (4,): WHOLE})
    message = "has scored 4 of 1,110 windows of its validation part and .* all; train them with the same trainer.limit_"
    with pytest.raises(ValueError, match=message):
        read_sweep(mixed)
    whole = write_sweep(tmp_path / "whole", ["model.n_heads"], losses, summary=dict.fromkeys(losses, WHOLE))
    assert scored_part(read_sweep(whole).runs) is None
