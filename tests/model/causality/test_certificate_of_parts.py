"""The certificate of models without attention or without FFN: what is left to see is seen, and nothing else."""

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import randomise, tiny_gpt
from tril.model.causality.certificate import CHECKS
from tril.model.causality.grids.gpt_grid import certify, gpt_cells
from tril.model.causality.subject import GPTSubject, windows_of
from tril.model.gpt import GPT, Block, GPTConfig

TINY = {"vocab_size": 31, "context_length": 40, "n_layers": 2, "dim": 32}
ONE = {"precisions": ("32-true",), "backends": ("explicit",)}


@pytest.mark.parametrize(
    "choices", [{"pos": "rope"}, {"pos": "learned", "norm": "layernorm", "bias": True, "resid_dropout": 0.1}]
)
def test_a_model_without_attention_is_certified_to_see_its_own_token_alone(choices):
    certificate = certify("no attention", gpt_cells(GPTConfig(**TINY, n_heads=0, **choices)))
    assert certificate.passed, certificate.failures()
    assert set(certificate.checks()) == set(CHECKS) - {"attention"}
    assert "attention" not in certificate.line()
    for name in ("gradient", "perturbation"):
        assert torch.equal(certificate.reach[name] > 0, torch.eye(40, dtype=torch.bool))
    assert not {word for result in certificate.results for word in result.cell.split()} & {
        "weights=sharp",
        "window=16",
        "backend=stacked",
    }


def test_a_trained_one_is_certified_with_its_own_weights_too():
    config = GPTConfig(**TINY, n_heads=0)
    cells = list(gpt_cells(config, randomise(GPT(config)).state_dict(), **ONE))
    assert {cell.labels["weights"] for cell in cells} == {"trained", "random"}
    assert certify("no attention", cells).passed


def test_a_model_without_ffn_is_certified_like_any_other():
    certificate = certify("no FFN", gpt_cells(GPTConfig(**TINY, n_heads=4, mlp="none"), **ONE))
    assert certificate.passed, certificate.failures()
    assert set(certificate.checks()) == set(CHECKS)


@pytest.mark.parametrize(
    "leak, where",
    [
        (lambda x: x + 1e-3 * x.mean(1, keepdim=True), "query 0 has a gradient with respect to key 1"),
        (
            lambda x: x + 1e-3 * F.pad(x, (0, 0, 1, -1)),
            "query 1 has a gradient with respect to key 0 behind the window",
        ),
    ],
    ids=["the mean", "the token before"],
)
def test_whatever_mixes_positions_without_attention_is_caught(leak, where, monkeypatch):
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x, **kwargs: forward(self, leak(x), **kwargs))
    certificate = certify("leak", gpt_cells(GPTConfig(**TINY, n_heads=0), **ONE))
    failures = certificate.failures()["no future"]
    assert any(result.where == f"by gradient: {where}" for result in failures)
    assert any(result.where.startswith("by perturbation") and "first in layer 0" in result.where for result in failures)


def test_a_block_that_loses_its_own_token_is_blind(monkeypatch):
    monkeypatch.setattr(
        Block, "forward", lambda self, x, *, last_only, **kwargs: torch.zeros_like(x[:, -1:] if last_only else x)
    )
    certificate = certify("blind", gpt_cells(GPTConfig(**TINY, n_heads=0), **ONE))
    assert "all of the past" in certificate.failures()


def test_what_each_layer_is_expected_to_see():
    assert windows_of(GPTConfig(**TINY, n_heads=4)) == [None, None]
    assert windows_of(GPTConfig(**TINY, n_heads=4, window=5)) == [5, 5]
    assert windows_of(GPTConfig(**TINY, n_heads=0)) == [1, 1]
    subject = GPTSubject(tiny_gpt(n_heads=0))
    assert torch.equal(subject.visible(7), torch.eye(7, dtype=torch.bool)) and torch.equal(
        subject.visible(7, 1), subject.visible(7)
    )
    ids = torch.randint(31, (2, 12))
    assert torch.equal(subject.plain()(ids), subject(ids))
