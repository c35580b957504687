"""A short run through Lightning with every fast path on and off: no optimization may change the losses.

GOLDEN are the losses of the simplest path: float32, explicit attention, not compiled. If a change is meant to alter
them (initialization, optimizer, order of the data), print `run()`, put the new numbers here, and state the reason in
the commit.
"""

import shutil

import numpy as np
import pytest
import torch

import tril.model.backends
import tril.model.training.hardware
from tests.conftest import training_module
from tril.data.batches import TrainWindows, ValWindows, on_device
from tril.model.gpt import GPT, GPTConfig
from tril.model.training.optim import OptimConfig
from tril.model.training.schedule import ScheduleConfig

V, T, B, STEPS = 31, 24, 4, 30
GOLDEN = {  # training loss of steps 0, 9, 19 and 29, and of the validation
    "muon": [3.43399, 2.09975, 0.98835, 0.89079, 0.92643],
    "adamw": [3.43399, 2.02135, 0.99792, 0.90018, 0.93427],
}
SAME = 1e-4  # nats after 30 steps, between two orders of summing the same float32 numbers
BF16 = 0.002  # nats between bf16 and float32; 0.0005 were measured after 30 steps on Zen 5
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
MIXED = {"precision": "bf16-mixed"}
PATHS = [  # optimizer, options of `run`
    ("muon", {}),
    ("adamw", {"backend": "stacked", "resident": True}),
    ("muon", {"backend": "fused", "compile": "regional"}),
    ("muon", {"backend": "fused", **MIXED}),
    ("muon", {"backend": "explicit", **MIXED}),
]


def tokens() -> np.ndarray:
    """Each follows from the one before, except every seventh, which is random."""
    random, ids = np.random.default_rng(0), [0]
    for i in range(4000):
        ids.append(int(random.integers(V)) if i % 7 == 0 else (3 * ids[-1] + 1) % V)
    return np.array(ids, dtype=np.uint16)


def run(optim="muon", backend="explicit", precision="32-true", compile=False, resident=False) -> list[float]:
    from lightning import Trainer

    shape = {"vocab_size": V, "context_length": T, "n_layers": 2, "dim": 32, "n_heads": 4}
    plain = dict.fromkeys(("tie_embeddings", "key_offset", "embed_skip", "value_embed"), False)
    config = GPTConfig(**shape, **plain, backend=backend)
    rates = OptimConfig(kind=optim, lr=0.01, betas=(0.9, 0.95), schedule=ScheduleConfig(warmup_steps=3))
    torch.manual_seed(0)
    module = training_module(GPT(config), STEPS, rates, compile=compile)
    losses, step = [], module.training_step
    module.training_step = lambda batch, batch_idx: losses.append(step(batch, batch_idx)) or losses[-1]
    train, val = (on_device(part, "cpu") if resident else part for part in np.split(tokens(), [3000]))
    validation = {"val_check_interval": STEPS, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    trainer = Trainer(max_steps=STEPS, accelerator="cpu", precision=precision, **validation, **QUIET)
    trainer.fit(module, TrainWindows(train, T, B, seed=0), ValWindows(val, T, B))
    return [losses[i].item() for i in (0, 9, 19, 29)] + [trainer.callback_metrics["val/loss"].item()]


@pytest.mark.parametrize(("optim", "path"), PATHS, ids=str)
def test_every_path_has_the_golden_losses(optim, path, monkeypatch):
    """As on a processor with bf16, which a run in float32 does not use, and in blocks of 5 queries."""
    monkeypatch.setattr(tril.model.training.hardware, "has_bf16", lambda device: True)
    monkeypatch.setattr(tril.model.backends, "QUERY_BLOCK", 5 if path.get("backend") == "explicit" else 256)
    if "compile" in path:  # all of torch.compile except code generation, which takes a minute
        compiled = torch.compile
        without_code = lambda function, *, mode=None, **options: compiled(function, backend="aot_eager", **options)  # noqa: E731
        monkeypatch.setattr(torch, "compile", without_code)
    losses, is_bf16 = run(optim, **path), "precision" in path
    assert losses == pytest.approx(GOLDEN[optim], abs=BF16 if is_bf16 else SAME)
    assert not is_bf16 or losses != pytest.approx(GOLDEN[optim], abs=1e-6), "it ran in bf16"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles for a CPU with a C++ compiler")
def test_machine_code_has_the_same_losses():
    """Forward and backward of a block, compiled by torch (15 s)."""
    torch._dynamo.reset()
    assert run(backend="fused", compile="regional", **MIXED) == pytest.approx(GOLDEN["muon"], abs=BF16)
