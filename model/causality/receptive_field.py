"""Which inputs each output depends on: the expected dependencies, and two measurements of them.

T positions, V vocabulary, C width. A dependency matrix is (T, T): row = output position, column = input position.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

Run = Callable[[Tensor], Tensor]  # ids (B, T) -> logits (B, T, V)


def expected_dependencies(length: int, windows: Sequence[int | None]) -> Tensor:
    """bool (T, T): output i may depend on input j if 0 <= i - j <= the sum of (w - 1) over the layers.

    Computed from positions and not from the masks of the model, because those are under test.
    """
    lookback = sum(length if w is None else w - 1 for w in windows)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance <= lookback)


def positions_to_test(length: int, limit: int, generator: torch.Generator) -> Tensor:
    """All positions if there are at most `limit`; else the ends, edges of blocks of 16, 64 and 128, and random ones."""
    if length <= limit:
        return torch.arange(length)
    edges = [edge + side for size in (128, 64, 16) for edge in range(size, length, size) for side in (-1, 0)]
    fixed = list(dict.fromkeys([0, 1, length - 2, length - 1, *edges]))[: max(4, limit // 2)]
    rest = [p for p in torch.randperm(length, generator=generator).tolist() if p not in set(fixed)]
    return torch.tensor(sorted((fixed + rest)[:limit]))


def dependencies_by_perturbation(
    run: Run, ids: Tensor, columns: Tensor, changed: Tensor, batch_size: int
) -> tuple[Tensor, float]:
    """Changes one input token at a time and measures the largest change of any logit at each output.

    Compared runs have the same batch shape and use the same row of it, so they differ in the tokens only.

    Args:
        ids: (T,).
        columns: (n,), the inputs to change.
        changed: (T,), the replacement token of each position.
        batch_size: rows of every pass.

    Returns:
        (T, n) changes, and the largest difference between two runs of the same input.
    """
    same, again = (run(ids.repeat(batch_size, 1)).detach() for _ in range(2))  # (B, T, V)
    effects, noise = [], (same - again).abs_().max().item()
    for part in columns.split(batch_size):
        batch = ids.repeat(batch_size, 1)
        batch[torch.arange(len(part)), part] = changed[part]
        effects.append((run(batch).detach() - same).abs_().amax(-1)[: len(part)].T)  # (T, b)
    return torch.cat(effects, dim=1), noise


def dependencies_by_gradient(
    run: Run, module: nn.Module, ids: Tensor, rows: Tensor, batch_size: int, generator: torch.Generator
) -> Tensor | None:
    """Largest gradient of a random projection of the logits with respect to each input's embedding.

    Each row of a batch carries one output, so one backward pass computes as many products with the Jacobian.

    Args:
        ids: (T,).
        rows: (n,), the outputs to test.
        batch_size: largest number of rows in one pass.

    Returns:
        (n, T), or None for a model that looks up no token in an `nn.Embedding`.
    """
    gradients = []
    for part in rows.split(batch_size):
        batch = ids.repeat(len(part), 1)
        with embeddings_as_leaves(module, batch) as leaves, torch.enable_grad():
            logits = run(batch)  # (b, T, V)
        if not leaves:
            return None
        direction = torch.randn(logits.shape[-1], generator=generator, dtype=logits.dtype).to(logits.device)
        projected = logits[torch.arange(len(part)), part] @ direction  # (b,)
        grads = torch.autograd.grad(projected.sum(), leaves, allow_unused=True)
        gradients.append(sum(g.abs().amax(-1) for g in grads if g is not None) + logits.new_zeros(batch.shape))
    return torch.cat(gradients)


@contextlib.contextmanager
def embeddings_as_leaves(module: nn.Module, ids: Tensor) -> Iterator[list[Tensor]]:
    """Collects the outputs (B, T, C) of all `nn.Embedding` that look up `ids`; gradients stop there."""
    leaves = []

    def detach(_, args, kwargs, output):
        # Some position embeddings look up no ids: RoFormer's takes a shape, BART's returns no batch dimension.
        looked_up = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if looked_up is not None and output.shape[:-1] == ids.shape and torch.equal(looked_up, ids):
            leaves.append(output.detach().requires_grad_())
            return leaves[-1].clone()  # some models change it in place, which a leaf does not allow

    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    with removed_at_exit([m.register_forward_hook(detach, with_kwargs=True) for m in embeddings]):
        yield leaves


@contextlib.contextmanager
def removed_at_exit(hooks: Sequence) -> Iterator[None]:
    """Removes the hooks, also after an exception."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
