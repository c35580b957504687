"""certify() and assert_causal(): any model in one call, which it does not change."""

import copy

import pytest
import torch
from torch import nn

from tests.conftest import tiny_gpt
from tril.model.causality import assert_causal, certify, corpus
from tril.model.causality.case import ModelError
from tril.model.causality.float64_mode import Float64Mode
from tril.model.causality.texts import Texts

V, T = 13, 24


class Tiny(nn.Module):
    def __init__(self, mix=lambda x: x.cumsum(1)):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(V, 16), Mix(mix), nn.Linear(16, V)

    def forward(self, ids):
        return self.head(self.mix(self.embed(ids)))


class Mix(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.function = mix

    def forward(self, x):
        return self.function(x)


def test_a_causal_module_passes_and_is_not_changed():
    model = Tiny().train()
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    weights, gradients = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    certificate = certify(model, vocab_size=V, context_length=T)
    assert certificate.passed, certificate
    assert "Tiny sees no future, and all of its past: " in str(certificate)
    assert "lengths 1 to 24 (" in certificate.scope() and "bf16-true" in certificate.scope()
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_leak_is_named_with_query_key_and_submodule():
    model = Tiny(lambda x: x.cumsum(1) + 0.1 * torch.roll(x, -1, 1))
    with pytest.raises(AssertionError, match=r"^Tiny is NOT certified \(no future\)\n"):
        assert_causal(model, vocab_size=V, context_length=T)
    failed = certify(model, vocab_size=V, context_length=T).failures_by_check()["no future"]
    found = {(each.query, each.key, each.place) for each in failed if each.place}
    assert found and all(key == (query + 1) % T and place == "mix" for query, key, place in found if key < T)


def test_a_model_that_returns_all_positions_only_with_targets():
    """As nanoGPT's does: without targets it returns the last position."""

    class LastPosition(Tiny):
        def forward(self, ids, targets=None):
            logits = super().forward(ids)
            return (logits[:, -1:], None) if targets is None else (logits, logits.sum())

    certificate = certify(LastPosition(), vocab_size=V, context_length=T)
    assert certificate.passed and certificate.checks()["no future"] > 20
    leaking = certify(LastPosition(lambda x: x.cumsum(1) + 0.1 * x.mean(1, True)), vocab_size=V, context_length=T)
    assert "no future" in leaking.failures_by_check()


@pytest.mark.parametrize("size", [0.0, 1e-3])
def test_a_small_leak_in_bf16_alone_is_not_taken_for_rounding(size):
    """It is below 2 units in the last place, but other rows of the batch change no bit."""

    def mix(x):
        x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).to(x.dtype)[:, None]
        return x + size * x.mean(1, True) if x.dtype == torch.bfloat16 else x

    certificate = certify(Tiny(mix), vocab_size=V, context_length=T)
    assert certificate.passed == (size == 0)
    assert all("bf16" in result.case for results in certificate.failures_by_check().values() for result in results)


def test_sizes_come_from_the_config_of_a_model():
    assert certify(tiny_gpt(n_layers=1, context_length=8)).passed
    with pytest.raises(ValueError, match="^vocab_size=null must be a valid integer; context_length=null"):
        certify(Tiny())


def test_a_pattern_is_certified_both_ways():
    pair = torch.ones(T, T).tril().triu(-1).bool()  # its own position and the one before

    def last_two(x):
        return x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]

    assert certify(Tiny(last_two), vocab_size=V, context_length=T, expected=pair).passed
    assert not certify(Tiny(), vocab_size=V, context_length=T, expected=pair).passed
    blocked = certify(Tiny(last_two), vocab_size=V, context_length=T).failures_by_check()
    assert "does not depend on key 0" in blocked["all of the past"][0].where
    with pytest.raises(ValueError, match=r"^expected is torch.float32 \(24, 24\), and must be bool \(24, 24\)"):
        certify(Tiny(), vocab_size=V, context_length=T, expected=pair.float())


def test_lengths_that_a_model_refuses_are_named_and_the_others_are_tested():
    def blocks_of_eight(x):
        return x.cumsum(1).unflatten(1, (-1, 8)).flatten(1, 2)

    certificate = certify(Tiny(blocks_of_eight), vocab_size=V, context_length=T)
    assert certificate.passed, certificate
    assert {result.length for result in certificate.results if result.check == "no future"} == {8, 16, 24}
    assert any("lengths 1, 2, 3, 5, 7, 9, 15, 17, ... are left out, where Tiny ends in" in n for n in certificate.notes)


def test_a_model_that_raises_is_an_error_of_its_own():
    with pytest.raises(ModelError, match=r"^Tiny with ids \(2, 24\) below 13 ends in ZeroDivisionError"):
        certify(Tiny(lambda x: x / (1 // 0)), vocab_size=V, context_length=T)


def test_float64_reaches_code_that_names_float32():
    x = torch.rand(40, generator=torch.Generator().manual_seed(0))
    exact = sum(x.double().tolist())

    def total(x):
        return x.to(torch.float32).cumsum(0, dtype=torch.float32)[-1] + torch.zeros((), dtype=torch.float32)

    with Float64Mode():
        value = total(x)
    assert value.dtype == torch.float64 and abs(value.item() - exact) < 1e-13 < abs(total(x).item() - exact)


def test_float64_reaches_methods_that_take_no_dtype():
    x = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with Float64Mode():
        same = [x.float(), x.half(), x.bfloat16()]
    assert all(torch.equal(x, y) and y.dtype == torch.float64 for y in same)


def test_texts_differ_everywhere_and_contain_the_whole_vocabulary():
    texts = Texts(100, special=(50,))
    seen, repeated = set(), 0
    for _ in range(40):
        ids = texts.draw(5, 30)
        other = texts.other(ids)
        assert (ids != other).all() and ids.min() >= 0 and max(ids.max(), other.max()) < 100
        seen |= set(ids.flatten().tolist())
        repeated += sum(len(set(row.tolist())) <= 3 for row in other)
    assert seen == set(range(100)) and repeated >= 60


ENTRIES = {entry.name: entry for entry in corpus.entries() if entry.interface in ("logits", "cached")}
FIRST = {(entry.family, entry.leaks): entry.name for entry in reversed(ENTRIES.values())}  # of each family


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FIRST.values())[::3])  # `python scripts/corpus.py` judges all
def test_entries_of_the_corpus_are_judged_right(name):
    entry = ENTRIES[name]
    certificate = certify(
        entry.build(), vocab_size=entry.vocab_size, context_length=entry.context_length, expected=entry.expected
    )
    assert certificate.passed != entry.leaks, certificate
