"""The loss of tokens in bf16 on a CPU."""

import torch
import torch.nn.functional as F

from tests.conftest import assert_close
from tril.model.loss import BLOCK, IGNORE, cross_entropy


def test_the_loss_of_bf16_logits_and_its_gradient_are_those_of_float64():
    n = 2 * BLOCK + 7
    logits = (3 * torch.randn(n, 31)).bfloat16().requires_grad_()
    targets, weights = torch.randint(31, (n,)), torch.randn(n)
    targets[::5] = IGNORE
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, targets, ignore_index=IGNORE, reduction="none")
    expected.backward(weights.double())
    loss = cross_entropy(logits, targets)
    loss.backward(weights)
    assert loss.dtype == torch.float32
    assert_close(loss, expected)
    assert logits.grad is not None and exact.grad is not None
    assert_close(logits.grad, exact.grad, roundings=0.5)
