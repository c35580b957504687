"""The cross-entropy in blocks against torch's."""

import pytest
import torch
import torch.nn.functional as F

from tril.model.loss import BLOCK, IGNORE, MIN_ROWS, HeadCrossEntropy

C = 8


@pytest.mark.parametrize(
    ("n", "vocabulary", "autocast"),
    [(3, 5, False), (MIN_ROWS + 1, BLOCK // MIN_ROWS + 1, False), (BLOCK // 4096 * 2 + 3, 4096, True)],
)
def test_values_and_gradients_are_those_of_torch_with_one_block_or_several(n, vocabulary, autocast):
    hidden, weight = torch.randn(n, C, requires_grad=True), torch.randn(vocabulary, C, requires_grad=True)
    targets, grad = torch.randint(vocabulary, (n,)), torch.randn(n)
    targets[1] = IGNORE
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = HeadCrossEntropy.apply(hidden, weight, targets)
        logits = F.linear(hidden, weight).float()
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    assert losses.dtype == torch.float32 and losses[1] == 0
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-5)
    rounding = 2**-8 if autocast else 1e-5  # of bf16: both round the gradient of the logits to it
    for ours, theirs in zip(*(torch.autograd.grad(x, (hidden, weight), grad) for x in (losses, expected)), strict=True):
        assert ours.dtype == torch.float32 and (ours - theirs).norm() < rounding * theirs.norm()


def test_a_second_backward_pass_gives_the_same_gradients_and_a_weight_in_bf16_has_them_in_bf16():
    hidden, weight = (torch.randn(6, C, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    losses = HeadCrossEntropy.apply(hidden, weight, torch.arange(6))
    first, second = (torch.autograd.grad(losses.sum(), (hidden, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) and x.dtype == torch.bfloat16 for x, y in zip(first, second, strict=True))
