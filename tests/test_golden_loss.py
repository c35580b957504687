"""A short run through Lightning with every fast path on and off: no optimization may change the losses.

GOLDEN are the losses of the simplest path: float32, explicit attention, not compiled. If a change is meant to alter
them (initialization, optimizer, order of the data), print `run()`, put the new numbers here, and state the reason in
the commit.
"""

import shutil

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import tril.model.autocast
import tril.model.backends
from tril.data.batches import TrainWindows, ValWindows, on_device
from tril.model.checkpoint import Checkpoint
from tril.model.gpt import GPT, GPTConfig
from tril.model.training.module import TrainingModule
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


def tokens() -> np.ndarray:
    """Each follows from the one before, except every seventh, which is random."""
    random, ids = np.random.default_rng(0), [0]
    for i in range(4000):
        ids.append(int(random.integers(V)) if i % 7 == 0 else (3 * ids[-1] + 1) % V)
    return np.array(ids, dtype=np.uint16)


def run(optim="muon", backend="explicit", precision="32-true", compile=None, resident=False) -> list[float]:
    from lightning import Trainer

    shape = {"vocab_size": V, "context_length": T, "n_layers": 2, "dim": 32, "n_heads": 4}
    plain = dict.fromkeys(("tie_embeddings", "key_offset", "embed_skip", "value_embed"), False)
    config = GPTConfig(**shape, **plain, backend=backend)
    rates = OptimConfig(kind=optim, lr=0.01, schedule=ScheduleConfig(warmup_steps=3))
    tokenizer = Tokenizer(models.BPE({chr(65 + i): i for i in range(V)}, []))
    options = {"val_bytes": {"": float}, "payload": Checkpoint(config, {}, tokenizer.to_str(), "A", data={}).entry()}
    torch.manual_seed(0)
    module = TrainingModule(GPT(config), rates, total_steps=STEPS, compile=compile, **options)
    losses, step = [], module.training_step
    module.training_step = lambda batch, batch_idx: losses.append(step(batch, batch_idx)) or losses[-1]
    train, val = (on_device(part, "cpu") if resident else part for part in np.split(tokens(), [3000]))
    validation = {"val_check_interval": STEPS, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    trainer = Trainer(max_steps=STEPS, accelerator="cpu", precision=precision, **validation, **QUIET)
    trainer.fit(module, TrainWindows(train, T, B, seed=0), ValWindows(val, T, B))
    return [losses[i].item() for i in (0, 9, 19, 29)] + [trainer.callback_metrics["val/loss"].item()]


class FloatTypes(TorchDispatchMode):
    """The dtypes of all results."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.dtypes |= {leaf.dtype for leaf in tree_iter(out) if isinstance(leaf, torch.Tensor)}
        return out


@pytest.mark.parametrize("in_hardware", [True, False])
def test_the_simplest_path_has_the_golden_losses_and_nothing_in_bf16_on_any_processor(in_hardware, monkeypatch):
    monkeypatch.setattr(tril.model.autocast, "has_bf16", lambda device: in_hardware)
    with FloatTypes() as seen:
        losses = run()
    assert not seen.dtypes & {torch.bfloat16, torch.float16}
    assert losses == pytest.approx(GOLDEN["muon"], abs=SAME) and losses[-1] < losses[0] - 1, "it learns"


COMPILED = {"backend": "fused", "resident": True, "compile": "default"}


@pytest.mark.parametrize(
    ("optim", "path"),
    [
        ("adamw", {"backend": "stacked"}),
        pytest.param("adamw", COMPILED, marks=pytest.mark.slow),
        ("muon", {"backend": "fused", "compile": "regional"}),
    ],
    ids=str,
)
def test_fast_paths_in_float32_have_the_same_losses(optim, path, monkeypatch):
    if "compile" in path:  # all of torch.compile except code generation, which takes a minute
        compiled = torch.compile
        without_code = lambda function, *, mode=None, **options: compiled(function, backend="aot_eager", **options)  # noqa: E731
        monkeypatch.setattr(torch, "compile", without_code)
    assert run(optim, **path) == pytest.approx(GOLDEN[optim], abs=SAME)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles for a CPU with a C++ compiler")
@pytest.mark.parametrize(("precision", "bound"), [("32-true", SAME), ("bf16-mixed", BF16)])
def test_machine_code_has_the_same_losses(precision, bound):
    """Forward and backward of a block, compiled by torch (15 s)."""
    torch._dynamo.reset()
    losses = run(backend="fused", precision=precision, compile="regional")
    assert losses == pytest.approx(GOLDEN["muon"], abs=bound)
    assert losses != run(backend="fused", precision=precision), "it was compiled"


@pytest.mark.parametrize(("backend", "blocks"), [("fused", 256), ("explicit", 5)])
def test_bf16_stays_within_its_bound(backend, blocks, monkeypatch):
    monkeypatch.setattr(tril.model.backends, "QUERY_BLOCK", blocks)
    losses = run(backend=backend, precision="bf16-mixed")
    assert losses == pytest.approx(GOLDEN["muon"], abs=BF16)
    assert losses != pytest.approx(GOLDEN["muon"], abs=1e-6), "it ran in bf16"
