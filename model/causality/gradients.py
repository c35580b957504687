"""Gradients of outputs with respect to inputs: none for what is hidden, and one for all that is seen.

n queries, B batch, T positions, C width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tril.model.causality.claims import Result, first_true
from tril.model.causality.model import Model, tensors_in
from tril.model.causality.state import State, positions_in_order

ROUNDING, ROUNDING64 = 1e-5, 1e-10  # of the largest gradient, in float32 and in float64
MAX_CHANGED = 64  # inputs of a function, each of which takes a pass of a row


Gradients = tuple[Tensor, Tensor]  # (n,) positions of outputs; (n, T), the largest gradient with respect to each input


def check_hidden(state: State, length: int, n_queries: int) -> tuple[Result, Gradients] | None:
    """Inputs that some outputs of a text do not see have no gradient, which replaced tokens cannot show.

    The result, and the gradients with respect to embeddings; None where the model looks up no ids, or has no backward
    pass.
    """
    ids, model, bound, undecided = state.texts.draw(1, length)[0], state.model, 0.0, ""
    queries = torch.tensor(sorted(positions_in_order(length, state.generator)[:n_queries]))
    size, hidden = gradients(model, ids, queries), ~model.visible(length)[queries]
    if size is None:
        return None
    if not model.exact and size[hidden].any():
        # A Fourier transform or a subtracted maximum has gradients of rounding size, which float64 tells apart.
        twin, reason = (model, "") if model.precision == "64-true" else state.twin
        precise = None if twin is None else gradients(twin, ids, queries)
        if precise is None:
            bound = ROUNDING * size.max().item()
            undecided = f"hidden inputs have gradients, which may be rounding: no float64 twin ({reason})"
        else:
            size, bound = precise, ROUNDING64 * precise.max().item()
    worst = size.masked_fill(~hidden, 0.0).nan_to_num(nan=torch.inf).max().item()
    where, leak = "", {}
    if first := first_true(hidden & ~(size <= bound)):
        leak: dict[str, Any] = {"query": int(queries[first[0]]), "key": first[1]}
        where = f"output {leak['query']} has a gradient with respect to input {leak['key']}"
    result = Result("gradient", state.name, length, worst, bound, int(hidden.sum()), where, undecided, **leak)
    return result, (queries, size)


def check_seen(state: State, found: Gradients | None) -> tuple[Result, str]:
    """How much of its past the model uses, also in words; it fails only where this is known.

    An output uses an input with a gradient. Gradients leave out look-ups of single tokens, so some inputs without one
    are changed.

    Args:
        found: None: all inputs of the last output are changed, of at most 64.
    """
    model = state.model
    length = min(MAX_CHANGED, model.context_length) if found is None else found[1].shape[1]
    queries = torch.tensor([length - 1]) if found is None else found[0]
    seen = model.visible(length)[queries]  # (n, T)
    used = torch.zeros_like(seen) if found is None else found[1] > 0
    unknown = (seen & ~used).nonzero()  # (pairs, 2)
    unknown = unknown if found is None else unknown[:: max(1, len(unknown) // 8)]
    for row in unknown[:, 0].unique():
        keys = unknown[unknown[:, 0] == row, 1]
        used[row, keys] = depends(state, length, int(queries[row]), keys.tolist())
    unused, where = unknown[~used[unknown.unbind(1)]].tolist(), ""
    if model.sees_all and unused:
        where = f"output {queries[unused[0][0]]} does not depend on input {unused[0][1]}"
    result = Result("receptive field", state.name, length, float(used[seen].all()), 0.0, int(seen.sum()), where)
    distances = (queries[:, None] - torch.arange(length))[used & seen]
    last = int(distances.max()) + 1 if len(distances) else 0
    sees_past = int(model.visible(length).tril().sum()) == length * (length + 1) // 2
    return result, "all of the past" if sees_past and used[seen].all() else f"at most the last {last} tokens"


@torch.no_grad()
def depends(state: State, length: int, query: int, keys: Sequence[int]) -> Tensor:
    """bool (n,): whether an output changes with each of these inputs alone."""
    ids, model, found = state.texts.draw(1, length), state.model, []
    other = state.texts.other(ids)
    for part in torch.tensor(keys).split(model.batch_size or state.fitting(length)):
        rows = ids.repeat(model.batch_size or len(part), 1)
        same = model(rows)[: len(part), query]
        rows[torch.arange(len(part)), part] = other[0, part]
        found.append((model(rows)[: len(part), query] != same).any(-1).cpu())
    return torch.cat(found)


def gradients(model: Model, ids: Tensor, queries: Tensor) -> Tensor | None:
    """Largest gradient of a random projection of each output with respect to each input's embedding, (n, T).

    Each row of a batch carries one output, so one backward pass computes as many products with the Jacobian. None
    for a function, for compiled code, where the model looks up no ids, and without backward pass.
    """
    if model.module is None or any(hasattr(part, "_orig_mod") for part in model.module.modules()):
        return None
    rows, generator = [], torch.Generator().manual_seed(0)
    for part in queries.split(model.batch_size or len(queries)):
        batch = ids.repeat(model.batch_size or len(part), 1).to(model.device)
        try:
            with LookUps(batch) as looked_up:
                outputs = replace(model, grad_mode="grad")(batch)  # (B, T, V)
            direction = torch.randn(outputs.shape[-1], generator=generator).to(outputs)
            chosen = outputs[torch.arange(len(part)), part]
            chosen = chosen.masked_fill(chosen == -torch.inf, 0.0)  # ids that fill up the vocabulary
            grads = torch.autograd.grad((chosen @ direction).sum(), looked_up.leaves, allow_unused=True)
        except Exception:  # such as Reformer's backward in evaluation mode
            return None
        sizes = (g.abs().amax(-1).view_as(batch) for g in grads if g is not None)
        rows.append(sum(sizes, outputs.new_zeros(batch.shape))[: len(part)].detach().cpu().double())
    size = torch.cat(rows)
    return size if size.any() else None


class LookUps(TorchFunctionMode):
    """Collects what embeddings, W[ids] and one-hot rows look up by `ids`, as leaves (B, T, C) where gradients stop.

    Position embeddings do not look up ids.
    """

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids, self.leaves, self.one_hot = ids, [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor) or out.dim() < 2 or out.shape[:-1].numel() != self.ids.numel():
            return out
        for x in tensors_in((args, kwargs)):
            by_ids = (
                x.shape == out.shape[:-1] and not x.is_floating_point() and torch.equal(x.view_as(self.ids), self.ids)
            )
            if (by_ids or any(x is hot for hot in self.one_hot)) and out.is_floating_point():
                self.leaves.append(out.detach().requires_grad_())
                return self.leaves[-1].clone()  # some models change it in place, which a leaf does not allow
            if by_ids:
                self.one_hot.append(out)
        return out
