"""model.checkpoint_activations: the same loss and gradients to the bit, from fewer kept activations."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.conftest import TRAINABLE, randomize
from tril.model.gpt import GPT, GPTConfig

B, T, C, L = 3, 16, 32, 4
SHAPE = {"vocab_size": 31, "context_length": T, "n_layers": L, "dim": C, "n_heads": 4}


def step(checkpoint: bool, **choices) -> tuple[GPT, torch.Tensor, int]:
    """The model after a backward pass, its losses, and the bytes that the forward pass kept for it."""
    model = randomize(
        GPT(GPTConfig(**SHAPE | choices, checkpoint_activations=checkpoint)), torch.Generator().manual_seed(0)
    )
    ids, targets = torch.randint(31, (2, B, T), generator=torch.Generator().manual_seed(1))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(2)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        nll = model.train().nll(ids, targets)
    nll.mean().backward()
    return model, nll.detach(), sum(kept.values())


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("choices", [{}, {"attn_dropout": 0.2, "resid_dropout": 0.1}, {"pos": "alibi"}], ids=str)
def test_loss_and_gradients_are_equal_to_the_bit(backend, choices):
    (kept, nll, _), (again, same_nll, _) = (step(each, backend=backend, **choices) for each in (False, True))
    assert torch.equal(nll, same_nll)
    for (name, p), q in zip(kept.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_a_block_keeps_its_input_only():
    """B T C float32 numbers; without the option it keeps more than ten times as much."""
    kept, again = (step(each)[2] - step(each, n_layers=L - 1)[2] for each in (False, True))
    assert again == B * T * C * 4
    assert kept > 10 * again


def test_without_gradients_nothing_is_computed_twice():
    model = GPT(GPTConfig(**SHAPE, checkpoint_activations=True))
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    ids = torch.randint(31, (B, T))
    with torch.no_grad():
        model(ids)
    assert len(calls) == 1
    model.nll(ids, ids).mean().backward()
    assert len(calls) == 3
