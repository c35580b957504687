"""The corpus as a whole: its size, its families, its names; and that it knows no checker."""

import ast
import collections
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from tril.model.causality import corpus

ENTRIES = corpus.entries()
BUILT = [entry for entry in ENTRIES if entry.interface != "data" and entry.name != "compiled_module"]
FOLDER = Path(inspect.getfile(corpus)).parent


def test_size():
    """At least 115 leaks and 45 correct entries; those of the certifier's tests are not among them."""
    leaks = [entry for entry in ENTRIES if entry.leaks]
    assert len(leaks) >= 115 and len(ENTRIES) - len(leaks) >= 45
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    assert len([entry for entry in leaks if entry.reference]) >= 20
    assert {entry.interface for entry in leaks} == set(corpus.INTERFACES)


def test_every_family_has_at_least_two_members():
    counts = collections.Counter(entry.family for entry in ENTRIES)
    assert set(counts) == set(corpus.FAMILIES)
    assert min(counts.values()) >= 2
    for family in corpus.FAMILIES:
        correct = family.startswith("look-alike: ")
        assert {entry.leaks for entry in ENTRIES if entry.family == family} == {not correct}


def test_every_entry_is_described_in_one_sentence():
    for entry in ENTRIES:
        assert entry.description.endswith(".") and entry.description.count(". ") == 0, entry.name
        assert entry.reference == "" or entry.reference.startswith("https://"), entry.name
        assert entry.leaks or (entry.trigger is None and entry.reference == ""), entry.name


def test_modules_import_nothing_but_torch():
    """gpt_leaks.py imports our GPT, inside its functions."""
    allowed = {"torch", "tril.model.causality.corpus", *torch_free()}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                inner = name.startswith(("torch.", "tril.model.causality.corpus."))
                gpt = path.name == "gpt_leaks.py" and name in (
                    "tril.model.attention",
                    "tril.model.config",
                    "tril.model.gpt",
                )
                assert inner or gpt or name in allowed, f"{path.name} imports {name}"


def torch_free() -> set[str]:
    """Modules of the standard library that the corpus uses."""
    return {"collections.abc", "dataclasses", "functools", "inspect", "math", "time", "types", "typing"}


@pytest.mark.parametrize("entry", [pytest.param(e, id=e.name) for e in BUILT])
def test_builds_are_repeatable_and_have_the_place(entry):
    models = []
    for seed in range(2):  # the random state of the caller has no effect and is not changed
        state = torch.manual_seed(seed).get_state()
        models.append(entry.build())
        assert torch.equal(state, torch.get_rng_state())
    models = [getattr(model, "model", model) if entry.interface == "pipeline" else model for model in models]
    if isinstance(models[0], nn.Module):
        first, second = (model.state_dict() for model in models)
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
        assert entry.place in dict(models[0].named_modules())
    else:
        assert entry.place == "" and inspect.isfunction(models[0])
    assert entry.leaks or entry.place == ""
