"""Timing a few steps leaves no memory allocated. The meta device simulates an accelerator."""

import weakref
from types import SimpleNamespace

import torch

from tril.model.gpt import GPT, GPTConfig
from tril.model.training import run_estimate as estimate
from tril.model.training.hardware import Hardware
from tril.model.training.optim import OptimConfig

CONFIG = GPTConfig(vocab_size=31, context_length=8, n_layers=1, dim=16, n_heads=2)


def test_the_memory_of_the_device_is_freed(monkeypatch):
    models, emptied = [], []

    def build(config):
        model = GPT(config)
        models.append(weakref.ref(model))
        return model

    def empty_cache():
        emptied.append([model() for model in models])

    device = SimpleNamespace(synchronize=lambda: None, empty_cache=empty_cache, device_count=lambda: 0)
    monkeypatch.setattr(estimate, "GPT", build)
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    speed = estimate.measure(CONFIG, OptimConfig(), 4, Hardware("meta", "32-true", None, "an accelerator", None))
    assert emptied == [[None]]  # once, after the model was deleted
    assert min(speed.train, speed.val, speed.step) > 0


def test_a_cpu_has_no_cache_to_empty():
    assert estimate.measure(CONFIG, OptimConfig(), 4, Hardware("cpu", "32-true", None, "a CPU", None)).train > 0
