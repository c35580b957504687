"""Training on some targets only: the weight of each target, batches without targets, and the losses of validation."""

import pytest
import torch
from torch.optim import SGD

from tests.model.training.test_module import T, batches, module
from tril.model.gpt import IGNORE
from tril.model.training.errors import RunRefused
from tril.model.training.module import NO_TARGET, in_order


def masked(n, seed=0, share=0.3):
    """Batches in which a `share` of the targets counts; of the second batch none."""
    found = []
    for i, (inputs, targets) in enumerate(batches(n, seed)):
        counts = torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed + i)) < share * (i != 1)
        found.append((inputs, targets.masked_fill(~counts, IGNORE)))
    return found


def test_every_target_has_the_same_weight_over_micro_batches():
    """The sum over three micro-batches, one without targets, is the gradient of all targets in one batch."""
    data = masked(3)
    whole = [torch.cat(parts) for parts in zip(*data, strict=True)]
    gradients = []
    for parts in (data, [whole]):
        lm = module()
        SGD(lm.model.parameters()).zero_grad()
        for part in parts:
            (lm.training_step(tuple(part), 0) / len(parts)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in lm.model.parameters()]))
    n_targets = int((whole[1] != IGNORE).sum())
    assert 10 < n_targets < 40
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
    expected = module()
    log_p = expected.model(whole[0]).log_softmax(-1)
    counted = [-log_p[b, t, whole[1][b, t]] for b in range(12) for t in range(T) if whole[1][b, t] != IGNORE]
    (sum(counted) / (12 * T)).backward()
    gradient = torch.cat([p.grad.flatten() for p in expected.model.parameters()])
    torch.testing.assert_close(gradients[0], gradient, rtol=1e-3, atol=1e-6)


def test_validation_losses_of_targets_anywhere_in_a_window():
    expected, windows, kept = [], [], []
    for i, (_, targets) in enumerate(masked(3)):
        nll = torch.arange(targets.numel(), dtype=torch.float32).view(targets.shape) + 100 * i
        kept.append(nll.masked_fill(targets == IGNORE, NO_TARGET))
        for row, of_row in zip(nll.tolist(), targets.tolist(), strict=True):
            found = [value for value, target in zip(row, of_row, strict=True) if target != IGNORE]
            expected += found
            windows += [(sum(found), len(found))] if found else []
    found, every = in_order(torch.cat(kept)[None])
    assert every.tolist() == expected and list(zip(*found.tolist(), strict=True)) == windows


def test_validation_without_targets_is_refused(monkeypatch):
    lm = module()
    monkeypatch.setattr(lm, "all_gather", lambda x: x)
    [(inputs, targets)] = batches(1)
    with torch.no_grad():
        lm.validation_step((inputs, torch.full_like(targets, IGNORE)), 0)
    with pytest.raises(RunRefused, match="no targets; raise or leave out trainer.limit_val_batches"):
        lm.on_validation_epoch_end()
