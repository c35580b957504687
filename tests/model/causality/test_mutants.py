"""The tests of the tests: the certificate catches every mutant, by the checks that it names, and passes what is not mutated."""

import functools
import re

import pytest
import torch

from tests.model.causality.mutants_around import CATALOGUE
from tril.model.causality.canary import canary
from tril.model.causality.case import EOT, Cell
from tril.model.causality.checks import reach_by_perturbation, run_checks
from tril.model.causality.grids.gpt_grid import certify, gpt_cells, sharpen
from tril.model.causality.subject import GPTSubject, randomise
from tril.model.gpt import GPT

GRIDS = {mutant.grid: name for name, mutant in reversed(CATALOGUE.items())}  # with the first of its mutants


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    """It would take longer than all the rest. Mutants of the compiled model put something else in this place; of flex on a CPU the same
    code runs one way or the other.
    """
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)


def cells(grid):
    """Once each: the model's own cell comes again among the others, with a smaller budget, which is no limit at these sizes."""
    seen = set()
    for cell in gpt_cells(grid.config, precisions=(grid.precision,), backends=(grid.config.backend,), compile=True):
        if cell.name not in seen:
            yield cell
        seen.add(cell.name)


def findings(grid, *, sings):
    """(check, passed, where) as `certify` comes to them, one by one."""
    for number, cell in enumerate(cells(grid)):
        if number == 0 and sings:
            found = canary(cell.subject)
            yield "canary", found.passed, f"loss {found.loss:.4f}"
        for result in run_checks(cell):
            yield result.check, result.passed, f"{result.where} ({result.cell} length={result.length})"


def outputs(grid):
    """Logits in every way that a model is asked for them, to tell a mutant that does something from one that does nothing."""
    model = randomise(GPT(grid.config), torch.Generator().manual_seed(0)).eval()
    subject = GPTSubject(model, precision=grid.precision)
    ids = torch.randint(
        1, grid.config.vocab_size, (3, grid.config.context_length), generator=torch.Generator().manual_seed(0)
    )
    ids[:, 20:22] = EOT  # a coming end of text, and a repeated token
    with torch.no_grad():
        yield from (
            subject(ids),
            subject(ids[:1]),
            subject(ids[:, :11]),
            subject(ids[:, :32]),
            torch.compile(model)(ids),
        )
        sizes = [1, 6, ids.shape[1] - 7]
        yield from (
            subject.decode(ids, sizes),
            subject.newest(ids, sizes),
            subject.padded(ids, [0, 5, 9]),
            subject.packed(ids, EOT),
        )
    if subject.differentiable:
        model.train()
        for block in model.blocks:
            block.attn.attn_dropout = 0.1
        yield subject(ids).detach()
    sharpen(model.eval())
    with torch.no_grad():
        yield subject(ids)


@functools.cache
def unmutated(grid):
    return tuple(outputs(grid))


@pytest.mark.parametrize("name", CATALOGUE)
def test_mutant_is_caught(name, monkeypatch):
    mutant = CATALOGUE[name]
    before = unmutated(mutant.grid)
    mutant.put_in(monkeypatch)
    assert not all(map(torch.equal, before, outputs(mutant.grid))), f"{name} changes nothing"
    missing, failures = set(mutant.checks), []
    for check, passed, where in findings(mutant.grid, sings="canary" in mutant.checks):
        if not passed:
            failures.append(f"{check}: {where}")
            if re.search(mutant.where.get(check, ""), where):
                missing.discard(check)
        if not missing:
            return
    pytest.fail(
        "\n".join([f"{name} is not caught by {', '.join(sorted(missing))}; what failed:", *failures]), pytrace=False
    )


@pytest.mark.parametrize("grid", GRIDS, ids=GRIDS.values())
def test_the_same_model_passes_without(grid):
    certificate = certify("", cells(grid))
    assert [result for result in certificate.results if not result.passed] == []
    checks = {result.check for result in certificate.results}
    assert checks >= {check for mutant in CATALOGUE.values() if mutant.grid == grid for check in mutant.checks}


def test_random_weights_are_what_shows_a_leak_behind_zeros(monkeypatch):
    mutant = CATALOGUE["leak_behind_a_projection_of_zeros"]
    mutant.put_in(monkeypatch)
    fresh = GPT(mutant.grid.config).eval()

    def leaks():
        cell = Cell(GPTSubject(fresh), {}, [8], budget=float("inf"))
        return [not result.passed for result in reach_by_perturbation(cell, cell.tokens(8))]

    assert leaks() == [False]
    randomise(fresh)
    assert leaks() == [True]
