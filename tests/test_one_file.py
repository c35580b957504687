"""docs/tril_in_one_file.py is an independent oracle of a whole run: model, windows, optimizer and schedule.

python -m pytest -n0 tests/test_one_file.py
"""

import importlib.util
from pathlib import Path

import torch

from tril.data.prepare import prepare
from tril.data.sources import parse
from tril.model.gpt import GPT
from tril.scripts.cli.config import RunConfig
from tril.train import train

FILE = Path(__file__).parents[1] / "docs/tril_in_one_file.py"
STEPS, CONTEXT, SHAPE = 20, 512, {"n_layers": 2, "dim": 32, "n_heads": 2}


def test_a_run_has_the_losses_of_tril_in_one_file(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(1000)), encoding="utf-8")
    settings = [
        f"data.path={text}",
        f"data.cache_dir={tmp_path}",
        "data.tokenizer.kind=byte",
        *(f"~callbacks.{name}" for name in ("samples", "causality", "heads")),
    ]
    settings += [*(f"model.{name}={size}" for name, size in SHAPE.items()), "trainer.precision=32-true"]
    settings += [f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu", "seed=3"]
    run = train(*settings, f"hydra.run.dir={tmp_path / 'run'}")

    spec = importlib.util.spec_from_file_location("one_file", FILE)
    one_file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(one_file)
    config, tokens = RunConfig.of(run.settings), prepare(parse(run.settings["data"])).tokens("train")
    torch.manual_seed(config.seed_for("initialisation"))
    weights = GPT(config.model).state_dict()
    model = one_file.GPT(config.model.vocab_size, CONTEXT, **SHAPE)
    model.load_state_dict(weights)
    expected = [*one_file.train(model, torch.from_numpy(tokens.astype(int)), STEPS, seed=3)]
    losses = [row["train/loss"] for row in run.metrics if "train/loss" in row]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-5)
