"""Statistics of the heads after a validation, under the right names."""

from types import SimpleNamespace

import pytest
import torch

from tests.conftest import tiny_gpt
from tril.model.heads.attention_maps import attention_maps
from tril.model.training.callbacks.output import HeadMetrics
from tril.model.training.settings import HeadsConfig


def log_heads(model, batch, *, windows, document_eot=None) -> dict[str, float]:
    logged = {}
    logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.update(metrics | {"step": step}))
    data = SimpleNamespace(first_val_windows=lambda n: tuple(part[:n] for part in batch))
    trainer = SimpleNamespace(is_global_zero=True, datamodule=data, loggers=[logger], global_step=7)
    losses = SimpleNamespace(document_eot=document_eot)
    HeadMetrics(HeadsConfig(windows)).on_validation_end(
        trainer, SimpleNamespace(model=model, whole_model=lambda: model, losses=losses)
    )
    return logged


def test_entropy_and_first_token_mass_of_every_head_over_the_first_windows():
    model = tiny_gpt(attn_dropout=0.5).train()
    ids = torch.randint(31, (3, 12))
    logged = log_heads(model, (ids, ids), windows=2)
    maps = attention_maps(model, ids[:2]).double()[
        :, :, :, 1:
    ]  # (L, B, H, T - 1, T): without the first position, which has no choice
    for layer in range(2):
        for head in range(4):
            rows = maps[layer, :, head].flatten(0, 1)
            nats = -sum(w * w.log() for w in rows.flatten() if w > 0) / len(rows)
            assert logged[f"heads/entropy/L{layer}H{head}"] == pytest.approx(nats.item(), rel=1e-5)
            assert logged[f"heads/first/L{layer}H{head}"] == pytest.approx(rows[:, 0].mean().item(), rel=1e-5)
    assert len(logged) == 2 * 2 * 4 + 1 and logged["step"] == 7
    assert model.training


def test_every_document_of_a_window_has_a_first_token():
    model = tiny_gpt()
    ids = torch.randint(1, 31, (1, 12))
    ids[0, 5] = 0
    logged = log_heads(model, (ids, ids), windows=1, document_eot=0)
    first, second = (attention_maps(model, part)[0, 0, 0, 1:, 0] for part in (ids[:, :5], ids[:, 5:]))
    assert logged["heads/first/L0H0"] == pytest.approx(torch.cat([first, second]).mean().item(), rel=1e-5)
