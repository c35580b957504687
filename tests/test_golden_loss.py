"""One short run, through Lightning, with every fast path on and off: a change for speed may not change what is learned.

The losses below belong to the plainest path: float32, explicit attention, nothing compiled. If a change is meant to alter what is learned
(initialisation, optimizer, order of the data), print `run()` and put the new numbers here, with the reason in the commit.
"""

import functools
import shutil

import numpy as np
import pytest
import torch
from lightning import Trainer
from tokenizers import Tokenizer, models

import tril.data.batches
import tril.model.backends
import tril.model.training.optim
from tril.model.checkpoint import payload
from tril.model.gpt import GPT, GPTConfig
from tril.model.training.module import TrainingModule
from tril.model.training.optim import OptimConfig
from tril.model.training.schedule import ScheduleConfig

V, T, B, STEPS = 31, 24, 4, 30
GOLDEN = {  # training loss of steps 0, 9, 19 and 29, and of the validation
    "muon": [3.43399, 2.09053, 0.98086, 0.92415, 0.92029],
    "adamw": [3.43399, 2.03149, 0.99063, 0.92876, 0.92786],
}
SAME = 1e-4  # between two ways to sum the same float32 numbers, after 30 steps; nats
BF16 = 0.02  # between bf16 and float32: the bound that docs/performance.md states; nats


def tokens() -> np.ndarray:
    """Each follows from the one before, but for every seventh, which nothing foretells."""
    random, ids = np.random.default_rng(0), [0]
    for i in range(4000):
        ids.append(int(random.integers(V)) if i % 7 == 0 else (3 * ids[-1] + 1) % V)
    return np.array(ids, dtype=np.uint16)


def run(optim="muon", backend="explicit", precision="32-true", compile=None, resident=False, **choices) -> list[float]:
    torch.manual_seed(0)
    config = GPTConfig(V, T, n_layers=2, dim=32, n_heads=4, backend=backend, **choices)
    rates = OptimConfig(kind=optim, lr=0.01, schedule=ScheduleConfig(warmup_steps=3))
    tokenizer = Tokenizer(models.BPE({chr(65 + i): i for i in range(V)}, []))
    content = payload(GPT(config), tokenizer, "A", {})
    torch.manual_seed(0)
    module = TrainingModule(
        GPT(config), rates, total_steps=STEPS, val_bytes_per_token=1.0, payload=content, compile=compile
    )
    losses, step = [], module.training_step
    module.training_step = lambda batch, batch_idx: losses.append(step(batch, batch_idx)) or losses[-1]
    train, val = tokens()[:3000], tokens()[3000:]
    if resident:
        train, val = (tril.data.batches.on_device(part, "cpu") for part in (train, val))
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        precision=precision,
        val_check_interval=STEPS,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, tril.data.batches.TrainWindows(train, T, B, seed=0), tril.data.batches.ValWindows(val, T, B))
    return [losses[i].item() for i in (0, 9, 19, 29)] + [trainer.callback_metrics["val/loss"].item()]


@pytest.fixture(autouse=True)
def muon_in_float32(monkeypatch):
    """So that the numbers are those of every machine; a test that wants Muon's bf16 says so."""
    monkeypatch.setattr(tril.model.training.optim, "has_bf16", lambda device: False)


@pytest.mark.parametrize("optim", GOLDEN)
def test_the_plainest_path_has_the_golden_losses(optim):
    losses = run(optim)
    assert losses == pytest.approx(GOLDEN[optim], abs=SAME)
    assert losses[-1] < losses[0] - 1, "it learns"


@pytest.mark.parametrize("optim", GOLDEN)
@pytest.mark.parametrize(
    "path",
    [
        {"backend": "stacked"},
        {"backend": "fused"},
        {"resident": True},
        {"compile": "default"},
        {"compile": "regional"},
        {"backend": "fused", "resident": True, "compile": "default"},
    ],
    ids=str,
)
def test_fast_paths_in_float32_learn_the_same(optim, path, monkeypatch):
    if "compile" in path:  # the whole of torch.compile but the generation of machine code, which takes a minute
        monkeypatch.setattr(torch, "compile", functools.partial(compile_without_code, torch.compile))
    assert run(optim, **path) == pytest.approx(GOLDEN[optim], abs=SAME)


def compile_without_code(compile, function, *, mode=None, **options):
    return compile(function, backend="aot_eager", **options)


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles for a CPU with a C++ compiler")
@pytest.mark.parametrize(("precision", "bound"), [("32-true", SAME), ("bf16-mixed", BF16)])
def test_machine_code_learns_the_same(precision, bound):
    """Forward and backward of a block as torch writes and compiles them (some 15 s)."""
    torch._dynamo.reset()
    losses = run(backend="fused", precision=precision, compile="regional")
    assert losses == pytest.approx(GOLDEN["muon"], abs=bound)
    assert losses != run(backend="fused", precision=precision), "it was compiled"


@pytest.mark.parametrize("optim", GOLDEN)
@pytest.mark.parametrize("blocks", [5, 256], ids="blocks of {}".format)
@pytest.mark.parametrize("backend", ["fused", "explicit"])
def test_bf16_stays_within_its_bound(optim, backend, blocks, monkeypatch):
    monkeypatch.setattr(tril.model.backends, "QUERY_BLOCK", blocks)
    monkeypatch.setattr(tril.model.training.optim, "has_bf16", lambda device: True)
    losses = run(optim, backend=backend, precision="bf16-mixed")
    assert losses == pytest.approx(GOLDEN[optim], abs=BF16)
    assert losses != pytest.approx(GOLDEN[optim], abs=1e-6), "it ran in bf16"
