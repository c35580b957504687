"""The certificate catches every mutant, by the checks that it names, and passes the unmodified model."""

import functools
import re

import pytest
import torch

from tests.model.causality import (
    mutants_batches,
    mutants_bias,
    mutants_generation,
    mutants_mask,
    mutants_parts,
    mutants_paths,
    mutants_scores,
    mutants_stream,
)
from tests.model.causality.mutants import CATALOGUE
from tests.model.causality.parts import PARTS
from tests.model.generation.test_generate import forced
from tril.model.causality.canary import canary
from tril.model.causality.case import EOT, Case
from tril.model.causality.certificate import certify
from tril.model.causality.checks import check_perturbation, run_checks
from tril.model.causality.generation_checks import MODES
from tril.model.causality.grids.gpt_grid import sharpen
from tril.model.causality.subject import GPTSubject, attention_layers, randomize
from tril.model.generation.generate import generate_ids
from tril.model.generation.sampling import SamplingConfig
from tril.model.gpt import GPT

MODULES = (  # which fill the catalogue
    mutants_mask,
    mutants_scores,
    mutants_bias,
    mutants_batches,
    mutants_parts,
    mutants_stream,
    mutants_paths,
    mutants_generation,
)
GRIDS = {mutant.grid: name for name, mutant in reversed(CATALOGUE.items())}  # named by the first of its mutants

DEFAULT = next(iter(CATALOGUE.values())).grid
FAST = [grid for grid in GRIDS if grid == DEFAULT or grid.precision != "32-true"]


@pytest.fixture(autouse=True)
def no_compilation(monkeypatch):
    """Compilation would take longer than all the rest. Mutants of the compiled model replace `torch.compile` too."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)


def test_the_catalogue_is_complete():
    assert len(CATALOGUE) == 107
    assert {apply.__module__ for apply in (m.apply for m in CATALOGUE.values())} == {m.__name__ for m in MODULES}


def unique_cases(grid):
    """The first case comes again later with a smaller budget, which is no limit at these sizes."""
    names = set()
    options = {"precisions": (grid.precision,), "backends": (grid.config.backend,), "compile": True}
    for case in PARTS[grid.part].cases(grid.config, **options):
        if case.name not in names:
            yield case
        names.add(case.name)


def results(grid, *, with_canary):
    """(check, passed, where) in the order of `certify`, one at a time."""
    for number, case in enumerate(unique_cases(grid)):
        if number == 0 and with_canary:
            test = canary(case.subject)
            yield "canary", test.passed, f"loss {test.loss:.4f}"
        for result in run_checks(case):
            yield result.check, result.passed, f"{result.where} ({result.case} length={result.length})"


def outputs(grid):
    """Logits of every way to run the model; a mutant that changes none of them has no effect."""
    generator = torch.Generator().manual_seed(0)
    part = PARTS[grid.part]
    model = randomize(part.build(grid.config), torch.Generator().manual_seed(0)).eval()
    subject = part.subject(model, precision=grid.precision)
    ids = torch.randint(1, grid.config.vocab_size, (3, grid.config.context_length), generator=generator)
    ids[:, 20:22] = EOT  # a document boundary, and a repeated token
    sizes = [1, 6, ids.shape[1] - 7]
    with torch.no_grad():
        yield from (subject(part) for part in (ids, ids[:1], ids[:, :11], ids[:, :32]))
        yield from (torch.compile(subject.model)(ids), subject.decode(ids, sizes), subject.decode_last(ids, sizes))
        yield subject.decode_steps(ids, ids.shape[1] - 3)
        yield from (subject.padded(ids, [0, 5, 9]), subject.packed(ids, EOT))
        if type(subject) is GPTSubject:
            yield from generated(subject.model, ids)
    if subject.differentiable:
        subject.model.train()
        for attn in attention_layers(subject.model):
            attn.attn_dropout = 0.1
        yield subject(ids).detach()
    sharpen(subject.model.eval())
    with torch.no_grad():
        yield subject(ids)


def generated(model, ids):
    """Logits of each mode past the context length, and sampled tokens; all from the tokens in `ids`."""
    ids, length = ids.flatten().tolist(), model.config.context_length
    prompts = [ids[:n] for n in (1, length // 2, length - 1, length + 1)]
    new = [ids[row : row + 5] for row in range(4)]
    for options in MODES.values():
        yield forced(model, prompts, new, **options)
    yield torch.stack(list(generate_ids(model, prompts, SamplingConfig(max_new_tokens=5))))


def same(before, after):
    """Both None where the model cannot run in that way."""
    return before is after if before is None else torch.equal(before, after)


@functools.cache
def unmutated_outputs(grid):
    return tuple(outputs(grid))


@pytest.mark.parametrize("name", CATALOGUE)
def test_mutant_is_caught(name, monkeypatch):
    mutant = CATALOGUE[name]
    before = unmutated_outputs(mutant.grid)
    mutant.apply(monkeypatch)
    assert not all(map(same, before, outputs(mutant.grid))), f"{name} changes nothing"
    missing, failures = set(mutant.checks), []
    for check, passed, where in results(mutant.grid, with_canary="canary" in mutant.checks):
        if not passed:
            failures.append(f"{check}: {where}")
            if re.search(mutant.where.get(check, ""), where):
                missing.discard(check)
        if not missing:
            return
    checks = ", ".join(sorted(missing))
    pytest.fail("\n".join([f"{name} is not caught by {checks}; failures:", *failures]), pytrace=False)


@pytest.mark.parametrize(
    "grid",
    [pytest.param(grid, id=name, marks=() if grid in FAST else pytest.mark.slow) for grid, name in GRIDS.items()],
)
@pytest.mark.usefixtures("short_canary")
def test_the_unmodified_model_passes(grid):
    certificate = certify("", unique_cases(grid))
    assert [result for result in certificate.results if not result.passed] == []
    checks = {result.check for result in certificate.results}
    assert checks >= {check for mutant in CATALOGUE.values() if mutant.grid == grid for check in mutant.checks}


def test_zero_initialized_weights_hide_a_leak(monkeypatch):
    mutant = CATALOGUE["leak_after_a_projection_of_zeros"]
    mutant.apply(monkeypatch)
    model = GPT(mutant.grid.config).eval()

    def leaks():
        case = Case(GPTSubject(model), {}, [8], budget=float("inf"))
        return [not result.passed for result in check_perturbation(case, case.random_tokens(8))]

    assert leaks() == [False]
    randomize(model)
    assert leaks() == [True]
