"""pytest tests/model/test_loss.py: the loss in blocks of rows against torch's cross-entropy in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tril.model import loss
from tril.model.loss import IGNORE, cross_entropy

M, V = 10, 7


@pytest.mark.parametrize("rows", [1, 4, M, 2 * M])
def test_blocks_give_the_losses_and_gradients_of_all_rows(monkeypatch, rows):
    monkeypatch.setattr(loss, "BLOCK", rows * V)
    logits, targets, factors = 5 * torch.randn(M, V), torch.randint(V, (M,)), torch.randn(M)
    targets[[0, 6]] = IGNORE
    reference = logits.double().requires_grad_()
    expected = F.cross_entropy(reference, targets, ignore_index=IGNORE, reduction="none")
    found = cross_entropy(logits.requires_grad_(), targets)
    assert_close(found, expected.float())
    assert_close(
        *(torch.autograd.grad(x, y, factors.type_as(x)) for x, y in ((found, logits), (expected, reference))),
        check_dtype=False,
    )


def test_logits_in_bf16_have_losses_in_float32_and_gradients_in_bf16():
    logits, targets = torch.randn(M, V, dtype=torch.bfloat16).requires_grad_(), torch.randint(V, (M,))
    found = cross_entropy(logits, targets)
    assert_close(found, F.cross_entropy(logits.float(), targets, reduction="none"))
    found.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16
