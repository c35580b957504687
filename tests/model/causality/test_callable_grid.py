"""Functions and modules with the expected dependencies, or with others: each defect fails its check."""

import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tril.model.causality.certificate import certify
from tril.model.causality.grids.callable_grid import Sizes, callable_cases
from tril.scripts.cli.errors import message_of

V, C, T = 17, 32, 64
MATRIX = torch.randn(V, V, generator=torch.Generator().manual_seed(0))


# The callables, which the certificate imports by name


def one_hot(ids):
    return F.one_hot(ids, V).float()


def average(ids):
    return one_hot(ids).cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None] @ MATRIX


def reversed_cumsum(ids):
    return one_hot(ids).flip(1).cumsum(1).flip(1) @ MATRIX


def off_by_one(ids):
    return average(ids).roll(-1, 1)


def block_mean(ids):
    ends = [min((t // 8 + 1) * 8, ids.shape[1]) for t in range(ids.shape[1])]  # each position sees its whole block of 8
    return torch.stack([one_hot(ids)[:, :end].mean(1) for end in ends], 1) @ MATRIX


def last_four(ids):
    x = one_hot(ids)
    return sum((d + 1) * F.pad(x, (0, 0, d, 0))[:, : ids.shape[1]] for d in range(4)) @ MATRIX


def against_the_batch(ids):
    return average(ids) - average(ids).mean(0) / 2


def with_dropout(ids):
    return F.dropout(average(ids), 0.2)


class Recurrent(nn.Module):
    def __init__(self, *, both_ways=False, norm=False, zeros=False):
        super().__init__()
        self.embed, self.norm = nn.Embedding(V, C), nn.BatchNorm1d(C) if norm else None
        self.gru = nn.GRU(C, C, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(C * (1 + both_ways), V)
        if zeros:
            nn.init.zeros_(self.head.weight)

    def forward(self, ids):
        x, _ = self.gru(self.embed(ids))  # (B, T, C)
        return self.head(x if self.norm is None else self.norm(x.mT).mT)


class Convolution(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.conv, self.pad = nn.Conv1d(V, V, size), size - 1

    def forward(self, ids):  # without an nn.Embedding
        return self.conv(F.pad(one_hot(ids).type_as(self.conv.weight).mT, (self.pad, 0))).mT


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, C), nn.Linear(C, V)

    def forward(self, ids):
        distance = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])  # (T, T)
        decay = (0.5 ** distance.clamp(min=0).type_as(self.head.weight)).tril()  # after 255 steps 2e-77: 0 in float32
        return self.head(decay @ self.embed(ids))


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(V, V)

    def forward(self, ids):
        return self.head(one_hot(ids))  # float32 input, whatever the dtype of the head


torch.manual_seed(0)
gru, zeros = Recurrent(), Recurrent(zeros=True)
gru_both_ways, gru_with_batchnorm = Recurrent(both_ways=True), Recurrent(norm=True)
convolution, forgetful, single = Convolution(4), Forgetful(), Single()


def no_vocabulary(ids):
    return average(ids).sum(-1)


def one_more(ids):
    return F.pad(average(ids), (0, 0, 0, 1))


def whole_numbers(ids):
    return average(ids).long()


def a_pair(ids):
    return average(ids), None


def a_pair_without_logits(ids):
    return None, average(ids)


def log_of_zero(ids):
    return one_hot(ids).log()


def table_too_short(ids):
    return average(ids) + torch.randn(10, V)[torch.arange(ids.shape[1])]


def certificate(name, **settings):
    sizes = Sizes(**{"vocab_size": V, "context_length": T, **settings})
    return certify(name, callable_cases(f"{__name__}:{name}", sizes))


DEPENDENCY = {"repeatable", "no future", "all of the past", "rows"}


def failed(measured):
    return {result.check for result in measured.results if not result.passed}


# Functions


@pytest.mark.parametrize(
    "name, receptive_field, failures",
    [
        ("average", None, set()),
        ("a_pair", None, set()),
        ("with_dropout", None, set()),
        ("last_four", 3, set()),
        ("last_four", None, {"all of the past"}),
        ("last_four", 4, {"all of the past"}),
        ("last_four", 2, {"no future"}),
        ("reversed_cumsum", None, {"no future", "all of the past"}),
        ("off_by_one", None, {"no future", "all of the past"}),
        ("block_mean", None, {"no future"}),
        ("against_the_batch", None, {"repeatable", "rows"}),  # it is not reported as a leak of the future
    ],
)
def test_functions(name, receptive_field, failures):
    measured = certificate(name, receptive_field=receptive_field)
    assert failed(measured) == failures
    assert measured.checks().keys() == DEPENDENCY and measured.passed == (not failures)


def test_the_first_leak_is_named():
    failures = certificate("block_mean").failures_by_check()["no future"]
    assert {(result.query, result.key) for result in failures} == {(0, 1)}
    assert all("query 0 changes with key 1" in each.where or "if the text ends" in each.where for each in failures)
    wider = certificate("last_four", receptive_field=2)
    assert any(
        "query 3 changes with key 0 outside the window" in r.where for r in wider.failures_by_check()["no future"]
    )


@pytest.mark.parametrize("context_length, longest", [(1, 1), (5, 5), (37, 37), (300, 300)])
def test_no_length_exceeds_the_context(context_length, longest):
    measured = certificate("average", context_length=context_length)
    assert max(result.length for result in measured.results) == longest
    assert measured.passed and torch.equal(
        measured.dependencies["perturbation"] > 0, torch.ones(longest, longest).tril().bool()
    )


# Modules


@pytest.mark.parametrize(
    "name, settings, failures",
    [
        pytest.param("gru", {"context_length": 256}, set(), marks=pytest.mark.slow),
        ("forgetful", {"context_length": 256}, set()),
        ("single", {"receptive_field": 0}, set()),  # it names float32
        ("zeros", {}, set()),  # only random weights show its dependencies
        ("convolution", {"receptive_field": 3}, set()),
        ("convolution", {}, {"all of the past"}),
        ("convolution", {"receptive_field": 2}, {"no future"}),
        ("gru_both_ways", {}, {"no future", "canary"}),
        ("gru_with_batchnorm", {}, {"repeatable", "no future", "rows"}),
    ],
)
def test_modules(name, settings, failures):
    measured = certificate(name, **settings)
    assert failed(measured) == failures
    by_gradient = name not in ("convolution", "single")
    assert measured.checks().keys() == DEPENDENCY | ({"canary"} if by_gradient else set())
    kinds = [
        "weights=own precision=32-true",
        "weights=own training=True precision=32-true",
        *(["weights=own buffers=1 for 0 precision=32-true"] if "norm" in name else []),
        *(["weights=own precision=bf16-true"] if name != "single" else []),
        "weights=own precision=bf16-mixed",
        "weights=own calls=N precision=32-true",
        "weights=random precision=64-true",
    ]
    cases = [re.sub(r"calls=\d+", "calls=N", result.case) for result in measured.results]
    assert list(dict.fromkeys(cases)) == kinds
    assert set(measured.dependencies) == {"perturbation"} | ({"gradient"} if by_gradient else set())


def test_a_leak_of_the_training_mode_is_found():
    measured = certificate("gru_with_batchnorm")
    assert {result.case for result in measured.results if not result.passed} == {
        "weights=own training=True precision=32-true"
    }


def test_the_module_of_the_user_is_not_changed():
    module = gru.train()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    certificate("gru")
    assert module.training and all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert not any(m._forward_hooks for m in module.modules())


def test_exhaustive_sets_an_infinite_budget():
    cases = list(callable_cases(f"{__name__}:gru_with_batchnorm", Sizes(V, T), exhaustive=True))
    assert [(case.budget, case.subject.differentiable, case.subject.module.training) for case in cases] == [
        (torch.inf, True, False),
        (torch.inf, True, True),
        (torch.inf, True, False),  # buffers, the running mean among them
        (torch.inf, True, False),  # bf16
        (torch.inf, True, False),  # autocast
        (torch.inf, True, False),  # after more calls
        (torch.inf, True, False),  # random weights
    ]


# User errors


@pytest.mark.parametrize(
    "spec, settings, message",
    [
        ("average", {}, "must read package.module:function"),
        (":average", {}, "must read package.module:function"),
        (f"{__name__}:", {}, "must read package.module:function"),
        (".here:average", {}, "must read package.module:function"),
        ("no_such_module:average", {}, "cannot be imported: No module named 'no_such_module'; searched from "),
        (f"{__name__}:nothing", {}, f"module '{__name__}' has no attribute 'nothing'; name a function of {__name__}"),
        (f"{__name__}:V", {}, " is int and not callable on ids"),
        (
            f"{__name__}:Recurrent",
            {},
            " is the class Recurrent and not callable on ids; name a function or a module instance",
        ),
        (
            f"{__name__}:no_vocabulary",
            {},
            r"must return floats (B, T, V) = (2, 64, 17) for ids (2, 64), and returned torch.float32 (2, 64)",
        ),
        (f"{__name__}:one_more", {}, "(2, 64, 17) for ids (2, 64), and returned torch.float32 (2, 65, 17)"),
        (f"{__name__}:gru", {"vocab_size": 16}, "(2, 64, 16) for ids (2, 64), and returned torch.float32 (2, 64, 17)"),
        (f"{__name__}:whole_numbers", {}, "and returned torch.int64 (2, 64, 17)"),
        (f"{__name__}:a_pair_without_logits", {}, "and returned NoneType"),
        (f"{__name__}:log_of_zero", {}, "returns nan or infinite logits"),
        (f"{__name__}:table_too_short", {}, "with ids (2, 64) below 17 ends in IndexError: index 10 is out of bounds"),
        (f"{__name__}:average", {"vocab_size": 2}, "vocab_size=2 must be greater than or equal to 3"),
        (f"{__name__}:average", {"vocab_size": None}, "vocab_size=null must be a valid integer"),
        (f"{__name__}:average", {"context_length": 0}, "context_length=0 must be greater than or equal to 1"),
        (f"{__name__}:average", {"receptive_field": -1}, "receptive_field=-1 must be greater than or equal to 0"),
    ],
)
def test_mistakes_end_in_one_line(spec, settings, message):
    with pytest.raises(ValueError) as caught:
        callable_cases(spec, Sizes(**{"vocab_size": V, "context_length": T, **settings}))
    assert message in message_of(caught.value) and "\n" not in message_of(caught.value)


def test_modules_are_found_in_the_working_directory(tmp_path, monkeypatch):
    text = "from torch.nn.functional import one_hot\nclass A:\n    f = lambda ids: one_hot(ids, 5).float().cumsum(1)\n"
    (tmp_path / "certified_here.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    measured = certify("f", callable_cases("certified_here:A.f", Sizes(5, 8)))
    assert measured.passed and sys.modules.pop("certified_here").__file__ == str(tmp_path / "certified_here.py")
