"""The certificate of a GPT catches every mutant, and passes the unmodified model."""

import pytest
import torch

from tests.causality.mutants import MUTANTS
from tril.model.causality.certificate import Certificate, certify_model
from tril.model.causality.gpt import gpt_variants, subject_of
from tril.model.causality.model import ModelError, randomize
from tril.model.config import GPTConfig
from tril.model.gpt import GPT

CONFIGS = {mutant.config: mutant.name for mutant in reversed(MUTANTS)}  # named by the first of its mutants


@pytest.fixture(autouse=True)
def no_compilation(monkeypatch):
    """Compilation would take longer than all the rest. Mutants of the compiled model replace `torch.compile` too."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)


def certify(config: GPTConfig) -> Certificate:
    torch.manual_seed(0)
    model = subject_of(GPT(config).eval())
    return certify_model(model, gpt_variants(config, backends=[config.backend], compile=True), 1.0)


def outputs(config: GPTConfig, precision: str) -> list[torch.Tensor]:
    """Logits of the ways to run a model with random weights; a mutant that changes none of them has no effect."""
    gpt = randomize(GPT(config), torch.Generator().manual_seed(0)).eval()
    model = subject_of(gpt)
    ids = torch.randint(config.vocab_size, (3, config.context_length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision.startswith("bf16")):
        found = [gpt(ids[:, :n]) for n in (ids.shape[1], 11, 32)] + [way(model, ids) for way in model.ways.values()]
        gpt.train()
        for module in gpt.modules():
            module.attn_dropout = 0.1
        torch.manual_seed(0)
        found.append(gpt(ids))
        for name, parameter in gpt.named_parameters():
            parameter.mul_(100 if "q_" in name or "k_" in name else 1)
        found.append(gpt.eval()(ids))
    return [*found, gpt(ids), torch.compile(gpt)(ids)]  # where gradients are on, and compiled


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=mutant.name) for mutant in MUTANTS])
def test_mutant_is_caught(mutant, monkeypatch):
    unmodified = outputs(mutant.config, mutant.precision)
    for owners, name, change in mutant.patches:
        for owner in owners if isinstance(owners, tuple) else (owners,):
            if isinstance(owner, dict):
                monkeypatch.setitem(owner, name, change(owner[name]))
            else:
                monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    assert not all(map(torch.equal, unmodified, outputs(mutant.config, mutant.precision))), "the mutant changes nothing"
    try:
        certificate = certify(mutant.config)
    except ModelError:  # such as for logits that are nan
        return
    assert not certificate.passed, certificate


@pytest.mark.parametrize(
    "config",
    [pytest.param(config, id=name, marks=pytest.mark.slow) for config, name in list(CONFIGS.items())[1:]]
    + [pytest.param(next(iter(CONFIGS)), id="default")],
)
def test_the_unmodified_model_passes(config):
    certificate = certify(config)
    assert certificate.passed and not certificate.undecided, certificate
