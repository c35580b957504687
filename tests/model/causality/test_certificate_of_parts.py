"""The certificate of models without attention or without FFN."""

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import randomize, tiny_gpt
from tril.model.causality.certificate import CHECKS, certify
from tril.model.causality.grids.gpt_grid import gpt_cases
from tril.model.causality.subject import GPTSubject, attention_windows
from tril.model.gpt import GPT, Block, GPTConfig

TINY = {"vocab_size": 31, "context_length": 40, "n_layers": 2, "dim": 32}
pytestmark = pytest.mark.usefixtures("short_canary")
ONE = {"precisions": ("32-true",), "backends": ("explicit",)}


@pytest.mark.parametrize(
    "choices", [{"pos": "rope"}, {"pos": "learned", "norm": "layernorm", "bias": True, "resid_dropout": 0.1}]
)
def test_a_model_without_attention_depends_on_its_own_token_only(choices):
    certificate = certify("no attention", gpt_cases(GPTConfig(**TINY, n_heads=0, **choices), precisions=("32-true",)))
    assert certificate.passed, certificate.failures_by_check()
    assert set(certificate.checks()) == set(CHECKS) - {"attention"}
    assert "attention" not in certificate.line()
    for name in ("gradient", "perturbation"):
        assert torch.equal(certificate.dependencies[name] > 0, torch.eye(40, dtype=torch.bool))
    assert not {word for result in certificate.results for word in result.case.split()} & {
        "weights=sharp",
        "window=16",
        "backend=stacked",
    }


def test_a_trained_model_is_certified_with_its_own_weights_too():
    config = GPTConfig(**TINY, n_heads=0)
    cases = list(gpt_cases(config, randomize(GPT(config)).state_dict(), **ONE))
    assert {case.labels["weights"] for case in cases} == {"trained", "random"}
    assert certify("no attention", cases).passed


def test_a_model_without_ffn_is_certified_like_any_other():
    certificate = certify("no FFN", gpt_cases(GPTConfig(**TINY, n_heads=4, mlp="none"), **ONE))
    assert certificate.passed, certificate.failures_by_check()
    assert set(certificate.checks()) == set(CHECKS)


@pytest.mark.parametrize(
    "leak, where",
    [
        (lambda x: x + 1e-3 * x.mean(1, keepdim=True), "query 0 has a gradient with respect to key 1"),
        (
            lambda x: x + 1e-3 * F.pad(x, (0, 0, 1, -1)),
            "query 1 has a gradient with respect to key 0 outside the window",
        ),
    ],
    ids=["the mean", "the token before"],
)
def test_a_layer_that_mixes_positions_without_attention_is_caught(leak, where, monkeypatch):
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x, **kwargs: forward(self, leak(x), **kwargs))
    certificate = certify("leak", gpt_cases(GPTConfig(**TINY, n_heads=0), **ONE))
    failures = certificate.failures_by_check()["no future"]
    assert any(result.where == f"by gradient: {where}" for result in failures)
    assert any(
        result.where.startswith("by perturbation") and "first in blocks.0" in result.where for result in failures
    )


def test_a_block_that_loses_its_own_token_fails(monkeypatch):
    monkeypatch.setattr(
        Block, "forward", lambda self, x, *, last_only, **kwargs: torch.zeros_like(x[:, -1:] if last_only else x)
    )
    certificate = certify("lost token", gpt_cases(GPTConfig(**TINY, n_heads=0), **ONE))
    assert "all of the past" in certificate.failures_by_check()


def test_expected_windows_of_each_layer():
    assert attention_windows(GPTConfig(**TINY, n_heads=4)) == [None, None]
    assert attention_windows(GPTConfig(**TINY, n_heads=4, window=5)) == [5, 5]
    assert attention_windows(GPTConfig(**TINY, n_heads=0)) == [1, 1]
    subject = GPTSubject(tiny_gpt(n_heads=0))
    assert torch.equal(subject.visible(7), torch.eye(7, dtype=torch.bool)) and torch.equal(
        subject.visible(7, 1), subject.visible(7)
    )
    ids = torch.randint(31, (2, 12))
    assert torch.equal(subject.plain()(ids), subject(ids))
