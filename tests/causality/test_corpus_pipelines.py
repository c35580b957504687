"""Every pipeline and every pair of texts, judged by brute force.

B batch, T positions, V vocabulary.
"""

import pytest
import torch
from torch import Tensor

from tests.causality import corpus
from tests.causality.corpus import Pipeline

ENTRIES = [pytest.param(entry, id=entry.name) for entry in corpus.entries() if entry.interface == "pipeline"]
TEXTS = [pytest.param(entry, id=entry.name) for entry in corpus.entries() if entry.interface == "data"]
POSITION = 17  # of the changes, in windows of 32; a target of every pipeline


def losses(pipeline: Pipeline, inputs: Tensor, targets: Tensor) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        out = pipeline.losses(inputs, targets)
    assert out.shape == targets.shape and out.isfinite().all() and (out[targets == -100] == 0).all()
    return out


def replaced(x: Tensor, token: int) -> Tensor:
    changed = x.clone()
    changed[0, POSITION] = token
    return changed


def other_targets_matter(pipeline: Pipeline, inputs: Tensor, targets: Tensor) -> bool:
    """A loss changes with the target of another position."""
    base = losses(pipeline, inputs, targets)
    for token in (0, 30):
        change = losses(pipeline, inputs, replaced(targets, token)) - base
        change[0, POSITION] = 0
        if change.abs().max() > 1e-9:
            return True
    return False


def later_inputs_matter(pipeline: Pipeline, inputs: Tensor, targets: Tensor) -> bool:
    """A loss changes with a later input."""
    change = losses(pipeline, replaced(inputs, 30), targets) - losses(pipeline, inputs, targets)
    return bool(change[0, :POSITION].abs().max() > 1e-9)


def is_no_distribution(pipeline: Pipeline, inputs: Tensor, targets: Tensor) -> bool:
    """The probabilities exp(-loss) of all values of one target do not add up to 1."""
    tokens = range(61)
    total = sum(losses(pipeline, inputs, replaced(targets, token))[0, POSITION].neg().exp() for token in tokens)
    return bool((total - 1).abs() > 1e-9)


def targets_in_inputs(pipeline: Pipeline) -> bool:
    """Targets equal an input that is not later, at a fixed distance, in more than a fifth of random windows."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 61, (3300,), generator=generator)
    batches = list(pipeline.batches(tokens, generator))
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    equal = (targets[:, :, None] == inputs[:, None]).double().mean(0)  # (T, T)
    return bool(equal.tril().max() > 0.2)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_pipeline_leaks_as_its_entry_says(entry):
    pipeline = entry.build()
    generator = torch.Generator().manual_seed(1)
    inputs, targets = next(iter(pipeline.batches(torch.randint(3, 61, (600,), generator=generator), generator)))
    assert inputs.shape == targets.shape and inputs.dtype == targets.dtype == torch.int64
    inputs, targets = inputs[:2], targets[:2]
    assert targets[0, POSITION] >= 0
    pipeline.model.double()
    found = targets_in_inputs(pipeline)
    for training in (False, True):
        pipeline.model.train(training)
        for check in (other_targets_matter, later_inputs_matter, is_no_distribution):
            found = found or check(pipeline, inputs, targets)
    assert found == entry.leaks


def shared(train: Tensor, validation: Tensor, size: int) -> float:
    """Share of the passages of `size` validation tokens that occur in training."""
    known = set(map(tuple, train.unfold(0, size, 1).tolist()))
    passages = list(map(tuple, validation.unfold(0, size, 1).tolist()))
    return sum(passage in known for passage in passages) / len(passages)


@pytest.mark.parametrize("entry", TEXTS)
def test_texts_overlap_as_their_entry_says(entry):
    train, validation = entry.build()
    assert train.dim() == validation.dim() == 1 and train.dtype == torch.int64
    assert int(torch.cat([train, validation]).max()) < 61
    share = shared(train, validation, 12)
    assert share > 0.3 if entry.leaks else share < 0.01
