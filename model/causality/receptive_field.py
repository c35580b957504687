"""Which input positions reach which outputs: what is expected, and what is measured by changing inputs and by gradients.

T positions, V vocabulary, C width. A reach is a (T, T) matrix: row = output position, column = input position.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

Run = Callable[[Tensor], Tensor]  # ids (B, T) -> logits (B, T, V)


def expected(length: int, windows: Sequence[int | None]) -> Tensor:
    """bool (T, T): output i may see input j if 0 <= i - j <= the sum of (w - 1) over the layers.

    Written out from positions, and not with the masks of the model: those are what is being tested.
    """
    back = length if None in windows else sum(w - 1 for w in windows)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance <= back)


def positions_to_test(length: int, most: int, generator: torch.Generator) -> Tensor:
    """All positions if there are at most `most`; else the ends, the edges of blocks of 16, 64 and 128, and random ones."""
    if length <= most:
        return torch.arange(length)
    edges = [edge + side for size in (128, 64, 16) for edge in range(size, length, size) for side in (-1, 0)]
    first = list(dict.fromkeys([0, 1, length - 2, length - 1, *edges]))[: max(4, most // 2)]
    rest = [p for p in torch.randperm(length, generator=generator).tolist() if p not in set(first)]
    return torch.tensor(sorted((first + rest)[:most]))


def by_perturbation(run: Run, ids: Tensor, columns: Tensor, changed: Tensor, batch_size: int) -> tuple[Tensor, float]:
    """Largest change of any logit at each output when one input becomes another token, (T, n); and when nothing changes.

    ids (T,); columns (n,) are the inputs to change, one at a time; changed (T,) has the other token for each place. Runs are compared
    at the same place of batches of the same shape, so that nothing but the tokens differs.
    """
    same, again = (run(ids.repeat(batch_size, 1)).detach() for _ in range(2))  # (B, T, V)
    effects, noise = [], (same - again).abs_().max().item()
    for part in columns.split(batch_size):
        batch = ids.repeat(batch_size, 1)
        batch[torch.arange(len(part)), part] = changed[part]
        effects.append((run(batch).detach() - same).abs_().amax(-1)[: len(part)].T)  # (T, b)
    return torch.cat(effects, dim=1), noise


def by_gradient(
    run: Run, module: nn.Module, ids: Tensor, rows: Tensor, batch_size: int, generator: torch.Generator
) -> Tensor | None:
    """Largest gradient of a random projection of the logits at some outputs with respect to each input's embedding: (n, T).

    ids (T,); rows (n,) are the outputs. One row of a batch carries one output, so a batch is as many products with the Jacobian. None
    for a model that looks up no token in an `nn.Embedding`.
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
        found = torch.autograd.grad(projected.sum(), leaves, allow_unused=True)
        gradients.append(sum(g.abs().amax(-1) for g in found if g is not None) + logits.new_zeros(batch.shape))
    return torch.cat(gradients)


@contextlib.contextmanager
def embeddings_as_leaves(module: nn.Module, ids: Tensor) -> Iterator[list[Tensor]]:
    """Collects the outputs of all `nn.Embedding` that look up `ids`, cut off from their tables: leaves (B, T, C) to differentiate by."""
    leaves = []

    def cut(_, inputs, output):
        if inputs[0].shape == ids.shape and torch.equal(inputs[0], ids):
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]

    hooks = [m.register_forward_hook(cut) for m in module.modules() if isinstance(m, nn.Embedding)]
    try:
        yield leaves
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def first_leaking_block(
    run: Run, blocks: Sequence[nn.Module], ids: Tensor, changed: Tensor, key: int, query: int
) -> int | None:
    """The first layer whose output at `query` changes with the token at `key`; -1: already the input of the first; None: no layer's."""
    states = []
    for place in (None, key):
        batch = ids[None].clone()
        if place is not None:
            batch[0, place] = changed[place]
        seen = {}  # layer -> (T, C)

        def keep(layer: int, values: object) -> None:
            seen[layer] = _state(values, len(ids))

        hooks = [block.register_forward_hook(lambda _, __, out, i=i: keep(i, out)) for i, block in enumerate(blocks)]
        hooks.append(
            blocks[0].register_forward_pre_hook(
                lambda _, args, named: keep(-1, (*args, *named.values())), with_kwargs=True
            )
        )
        try:
            run(batch)
        finally:
            for hook in hooks:
                hook.remove()
        states.append(seen)
    differ = [
        i for i, state in states[0].items() if state is not None and not torch.equal(state[query], states[1][i][query])
    ]
    return min(differ, default=None)


def _state(values: object, length: int) -> Tensor | None:
    """The first (1, T, C) among what goes into a layer, or comes out, as (T, C)."""
    several = values if isinstance(values, tuple | list) else (values,)
    return next((x[0] for x in several if isinstance(x, Tensor) and x.dim() == 3 and x.shape[1] == length), None)
