"""A sweep certifies each model once, and a model that was changed at run time again; training windows in validation."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tril.data.batches import ValWindows
from tril.data.datamodule import TextDataModule
from tril.model.attention import MultiHeadAttention
from tril.model.causality.certificate import Certificate
from tril.model.causality.checks import Result
from tril.model.gpt import GPT, GPTConfig
from tril.model.training.callbacks.causality_check import SHARED, CausalityCheck, CausalityError, certify
from tril.model.training.module import Loss


def certified(sweep, change=lambda model: None, **choices) -> bool | None:
    """Whether the certificate is that of an earlier run; None if it does not pass."""
    torch.manual_seed(len(list(sweep.rglob("*"))))  # initial weights do not matter
    model = GPT(GPTConfig(**{"vocab_size": 31, "context_length": 20, "n_layers": 1, "dim": 16, "n_heads": 2} | choices))
    change(model)
    windows_of = lambda tokens: {"val": ValWindows(tokens.numpy(), 20, 4)}  # noqa: E731
    trainer = SimpleNamespace(precision="32-true", datamodule=SimpleNamespace(batch_size=4, windows_of=windows_of))
    certificate = certify(Loss(model), trainer, sweep)
    return "another run" in " ".join(certificate.notes) if certificate.passed else None


def wrap(owner, name):
    function = getattr(owner, name)
    return owner, name, lambda *inputs, **options: function(*inputs, **options)


CHANGES = {
    "a method": wrap(MultiHeadAttention, "forward"),
    "a function of torch": wrap(F, "scaled_dot_product_attention"),
    "a step of the loss": wrap(GPT, "nll"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_function_that_is_replaced_at_run_time_is_certified_again(name, tmp_path, monkeypatch):
    assert certified(tmp_path) is False and certified(tmp_path) is True
    with monkeypatch.context() as patch:
        patch.setattr(*CHANGES[name])
        assert certified(tmp_path) is False and certified(tmp_path) is True
    assert certified(tmp_path) is True and len(list((tmp_path / SHARED).iterdir())) == 2


def open_mask(model):
    model.blocks[0].attn.causal = False


def hook(model):
    model.blocks[0].register_forward_hook(lambda _, __, x: x + x.roll(-1, 1))


@pytest.mark.parametrize("change", [open_mask, hook])
def test_a_module_that_is_changed_at_run_time_is_certified_again(change, tmp_path):
    assert certified(tmp_path) is False
    assert certified(tmp_path, change) is None and certified(tmp_path, change) is None  # only what passes is kept
    assert certified(tmp_path, window=5) is False and certified(tmp_path) is True


def test_a_window_of_the_training_text_ends_the_run_in_validation(tmp_path):
    texts = {part: np.random.default_rng(seed).integers(31, size=200) for seed, part in enumerate(("train", "val"))}
    texts["val"][100:160] = texts["train"][20:80]  # a passage that both have is one of validation
    data = SimpleNamespace(texts={"": SimpleNamespace(tokens=texts.get)})
    data.contains = lambda part, window: TextDataModule.contains(data, part, window)
    module = SimpleNamespace(losses=SimpleNamespace(batch=None), set_certificate=lambda summary: None)
    trainer, callback = SimpleNamespace(datamodule=data, is_global_zero=True, global_step=3), CausalityCheck(tmp_path)
    callback.certificate = Certificate("", [Result("future", "", 1, 0.0, 0.0, 1)])
    batches = {part: list(ValWindows(tokens, 20, 1)) for part, tokens in texts.items()}
    for i, batch in (*enumerate(batches["val"]), (1, batches["train"][1]), (3, batches["train"][7])):
        callback.on_validation_batch_start(trainer, module, batch, i)  # 3: not looked up
    with pytest.raises(CausalityError, match="overlap: the loader of validation yields a window of the training text"):
        callback.on_validation_batch_start(trainer, module, batches["train"][7], 8)
