"""The validation losses of one pass: growing storage, order of the windows, and a second pass."""

import torch

from tril.model.gpt import IGNORE
from tril.model.training.validation_losses import ValidationLosses, in_order


def test_validation_losses_of_many_batches_and_of_the_next_validation():
    """More batches than the first tensor holds, twice: the second pass starts without rows of the first."""
    losses = ValidationLosses()
    for n_batches in (23, 5):
        nll = torch.rand(n_batches, 2, 3)
        targets = torch.ones(n_batches, 2, 3, dtype=torch.long)
        targets[-1, -1, 1:] = IGNORE
        nll[-1, -1, 1:] = 0
        for batch in zip(nll, targets, strict=True):
            losses.add(*batch)
        windows, every = in_order(losses.take()[None])
        assert torch.equal(every, nll.flatten()[:-2])
        assert windows.tolist() == [nll.double().sum(2).flatten().tolist(), [3.0] * (2 * n_batches - 1) + [1.0]]
