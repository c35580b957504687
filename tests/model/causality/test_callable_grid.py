"""Functions and modules that see too much, too little or just what they may: each mistake is caught by the check that is named for it."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tril.model.causality.grids.callable_grid import callable_cells
from tril.model.causality.grids.gpt_grid import certify

V, C, T = 17, 32, 64
MATRIX = torch.randn(V, V, generator=torch.Generator().manual_seed(0))


# -- what is certified: found by its name here, as a user's would be ------------------------------------------------------------------


def one_hot(ids):
    return F.one_hot(ids, V).float()


def average(ids):
    return one_hot(ids).cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None] @ MATRIX


def reversed_cumsum(ids):
    return one_hot(ids).flip(1).cumsum(1).flip(1) @ MATRIX


def off_by_one(ids):
    return average(ids).roll(-1, 1)


def block_mean(ids):
    ends = [
        min((t // 8 + 1) * 8, ids.shape[1]) for t in range(ids.shape[1])
    ]  # each position sees its block of 8 to the end
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
        kept = (
            0.5 ** distance.clamp(min=0).type_as(self.head.weight)
        ).tril()  # of 255 steps ago 2e-77, which is 0 in float32
        return self.head(kept @ self.embed(ids))


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(V, V)

    def forward(self, ids):
        return self.head(one_hot(ids))  # float32 into whatever the head is


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


def log_of_zero(ids):
    return one_hot(ids).log()


def table_too_short(ids):
    return average(ids) + torch.randn(10, V)[torch.arange(ids.shape[1])]


def certificate(name, **settings):
    return certify(name, callable_cells(f"{__name__}:{name}", **{"vocab_size": V, "context_length": T, **settings}))


def failed(found):
    return {result.check for result in found.results if not result.passed}


# -- functions ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, reach, mistakes",
    [
        ("average", None, set()),
        ("with_dropout", None, set()),
        ("last_four", 3, set()),
        ("last_four", None, {"all of the past"}),
        ("last_four", 4, {"all of the past"}),
        ("last_four", 2, {"no future"}),
        ("reversed_cumsum", None, {"no future", "all of the past"}),
        ("off_by_one", None, {"no future", "all of the past"}),
        ("block_mean", None, {"no future"}),
        (
            "against_the_batch",
            None,
            {"no future", "rows"},
        ),  # a batch of changed rows is what the future is looked for with
    ],
)
def test_functions(name, reach, mistakes):
    found = certificate(name, reach=reach)
    assert failed(found) == mistakes
    assert found.checks().keys() == {"no future", "all of the past", "rows"} and found.passed == (not mistakes)


def test_the_place_of_a_leak_is_named():
    failures = certificate("block_mean").failures()["no future"]
    assert [(result.length, result.where.partition(",")[0]) for result in failures] == [
        (length, "by perturbation: query 0 changes with key 1") for length in (2, 37, T)
    ]
    reach = certificate("last_four", reach=2)
    assert "query 3 changes with key 0 behind the window" in reach.failures()["no future"][0].where


@pytest.mark.parametrize(
    "context_length, lengths", [(1, [1]), (5, [1, 2, 5]), (37, [1, 2, 37]), (300, [1, 2, 37, 256])]
)
def test_lengths_up_to_the_context_are_tested_and_no_longer_ones(context_length, lengths):
    found = certificate("average", context_length=context_length)
    assert [result.length for result in found.results if result.check == "no future"] == lengths
    assert found.passed and torch.equal(
        found.reach["perturbation"] > 0, torch.ones(lengths[-1], lengths[-1]).tril().bool()
    )


# -- modules --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, settings, mistakes",
    [
        ("gru", {"context_length": 256}, set()),
        ("forgetful", {"context_length": 256}, set()),
        ("zeros", {}, set()),  # its own weights show nothing of what it sees, random ones do
        ("convolution", {"reach": 3}, set()),
        ("convolution", {}, {"all of the past"}),
        ("convolution", {"reach": 2}, {"no future"}),
        ("gru_both_ways", {}, {"no future", "canary"}),
        ("gru_with_batchnorm", {}, {"no future", "rows"}),
    ],
)
def test_modules(name, settings, mistakes):
    found = certificate(name, **settings)
    assert failed(found) == mistakes
    by_gradient = name != "convolution"
    assert found.checks().keys() == {"no future", "all of the past", "rows"} | ({"canary"} if by_gradient else set())
    kinds = [
        "weights=own precision=32-true",
        "weights=random precision=64-true",
        "weights=own training=True precision=32-true",
    ]
    assert list(dict.fromkeys(result.cell for result in found.results)) == kinds
    assert set(found.reach) == {"perturbation"} | ({"gradient"} if by_gradient else set())


def test_what_only_training_shows_is_found_in_training():
    found = certificate("gru_with_batchnorm")
    assert {result.cell for result in found.results if not result.passed} == {
        "weights=own training=True precision=32-true"
    }


def test_the_users_module_is_left_as_it_was():
    module = gru.train()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    certificate("gru")
    assert module.training and all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert not any(m._forward_hooks for m in module.modules())


def test_every_pair_is_tested_where_that_is_asked_for():
    cells = list(callable_cells(f"{__name__}:gru_with_batchnorm", vocab_size=V, context_length=T, exhaustive=True))
    assert [(cell.budget, cell.subject.differentiable, cell.subject.module.training) for cell in cells] == [
        (torch.inf, True, False),
        (torch.inf, True, False),
        (torch.inf, True, True),
    ]


# -- what a user can get wrong ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec, settings, message",
    [
        ("average", {}, "must read package.module:function"),
        (":average", {}, "must read package.module:function"),
        (f"{__name__}:", {}, "must read package.module:function"),
        (".here:average", {}, "must read package.module:function"),
        ("no_such_module:average", {}, "cannot be imported: No module named 'no_such_module'; searched from "),
        (f"{__name__}:nothing", {}, f"module '{__name__}' has no attribute 'nothing'; name a function of {__name__}"),
        (f"{__name__}:V", {}, " is int, and not callable on ids"),
        (
            f"{__name__}:Recurrent",
            {},
            " is the class Recurrent, and not callable on ids; name a function, or a module that is built",
        ),
        (
            f"{__name__}:no_vocabulary",
            {},
            r"must return floats (B, T, V) = (1, 1, 17) for ids (1, 1), and returned torch.float32 (1, 1)",
        ),
        (f"{__name__}:one_more", {}, "(1, 1, 17) for ids (1, 1), and returned torch.float32 (1, 2, 17)"),
        (f"{__name__}:gru", {"vocab_size": 16}, "(1, 1, 16) for ids (1, 1), and returned torch.float32 (1, 1, 17)"),
        (f"{__name__}:whole_numbers", {}, "and returned torch.int64 (1, 1, 17)"),
        (f"{__name__}:a_pair", {}, "and returned tuple"),
        (f"{__name__}:log_of_zero", {}, "returns nan or infinite logits"),
        (f"{__name__}:table_too_short", {}, "with ids (2, 64) below 17 ends in IndexError: index 10 is out of bounds"),
        (
            f"{__name__}:single",
            {},
            "its parameters in float64, ends in RuntimeError: mat1 and mat2 must have the same dtype",
        ),
        (f"{__name__}:average", {"vocab_size": 2}, "vocab_size=2 must be a whole number, at least 3"),
        (f"{__name__}:average", {"vocab_size": None}, "vocab_size=None must be a whole number, at least 3"),
        (f"{__name__}:average", {"context_length": 0}, "context_length=0 must be a whole number, at least 1"),
        (f"{__name__}:average", {"reach": -1}, "reach=-1 must be a whole number, at least 0"),
    ],
)
def test_mistakes_end_in_one_line(spec, settings, message):
    with pytest.raises(ValueError) as caught:
        callable_cells(spec, **{"vocab_size": V, "context_length": T, **settings})
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_modules_are_found_in_the_working_directory(tmp_path, monkeypatch):
    text = "from torch.nn.functional import one_hot\nclass A:\n    f = lambda ids: one_hot(ids, 5).float().cumsum(1)\n"
    (tmp_path / "certified_here.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = certify("f", callable_cells("certified_here:A.f", vocab_size=5, context_length=8))
    assert found.passed and sys.modules.pop("certified_here").__file__ == str(tmp_path / "certified_here.py")
