"""train.py with other parts of the model: the run is certified, its checkpoint has the settings, and it samples."""

import json
import math

import pytest
import torch

from tests.runs import TINY, in_process, rows
from tril.model.checkpoint import load


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.pos=alibi", {"pos": "alibi"}),
        ("model.qk_norm=false", {"qk_norm": "none"}),
        ("model.qk_norm=layernorm", {"qk_norm": "layernorm"}),
        ("model.mlp_hidden=50", {"mlp_hidden": 50}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_is_certified_and_samples(override, expected, tmp_path, text):
    done = in_process(*TINY, f"data.path={text}", override, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 8 and summary["causality"] == "certified"
    assert summary["final_val_loss"] < math.log(300)
    lm = load(tmp_path / "run")
    assert expected.items() <= lm.config.to_dict().items()
    assert summary["parameters"] == lm.model.n_parameters()
    assert (tmp_path / "run" / "samples.txt").read_text(encoding="utf-8").count("--- sample at step") == 2
    text = lm.generate("line", max_new_tokens=100, seed=0)  # past the context of 32 tokens
    assert len(lm.encode(text)) > 50


def test_a_run_with_alibi_learns_and_goes_on_to_the_bit(configure, tmp_path):
    from tests.runs import interrupted
    from tril import train as train_script

    alibi = ["model.pos=alibi", "trainer.max_steps=24", "trainer.val_check_interval=12"]
    whole = train_script.train(configure(*alibi, folder="whole"))
    with interrupted():
        train_script.train(configure(*alibi, folder="half"))
    assert train_script.train(configure(f"resume={tmp_path / 'half'}", folder="half")) == whole
    rope = train_script.train(configure(*alibi, "model.pos=rope", folder="rope"))
    assert whole["val/loss"] < 0.8 * math.log(300) and whole["val/loss"] != rope["val/loss"]
    states = [
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("whole", "half")
    ]
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def test_a_run_with_scaled_rates_starts_and_learns_at_them(tmp_path, text):
    """At twice the base width the last norm's gain is half, and the rates of block matrices are half under AdamW."""
    scaled = ("optim=adamw", "optim.scale_with_width=true", "optim.base_width=16", "optim.base_head_dim=8")
    constant = ("optim.schedule.kind=constant", "optim.schedule.warmup_steps=0", "optim.lr=1e-4")
    done = in_process(*TINY, f"data.path={text}", *scaled, *constant, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    gain = load(tmp_path / "run").model.norm.weight
    assert (gain - 0.5).abs().max() < 8 * 1e-4 and not torch.equal(gain, torch.full_like(gain, 0.5))
    logged = next(row for row in rows(tmp_path / "run") if row["train/loss"])
    assert (float(logged["lr/decay"]), float(logged["lr/decay*0.5"])) == (1e-4, 5e-5)
