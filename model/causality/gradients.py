"""Gradients of outputs with respect to inputs: none for hidden inputs, and one for each input that is seen.

n queries, B batch, T positions, C width, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tril.model.causality.claims import Result, first_true
from tril.model.causality.model import Model, tensors_in
from tril.model.causality.state import State, positions_in_order

ROUNDING, ROUNDING64 = 1e-5, 1e-10  # of the largest gradient, in float32 and in float64
MAX_CHANGED = 64  # inputs without a gradient, each of which takes a pass of a row


def check_hidden(state: State, length: int, n_queries: int) -> Result | None:
    """Inputs that some outputs of a text do not see have no gradient, which replaced tokens cannot show.

    None where the model looks up no ids, or has no backward pass.
    """
    ids, model, reason = state.texts.draw(1, length), state.model, ""
    queries = torch.tensor(sorted(positions_in_order(length, state.generator)[:n_queries]))
    if not model.exact and model.precision != "64-true":
        # A Fourier transform or a subtracted maximum has gradients of rounding size, which float64 tells apart.
        twin, reason = state.twin
        model = twin or model
    size, hidden = gradients(model, ids, queries), ~model.visible(length)[queries]
    if size is None:
        return None
    rounding = ROUNDING64 if model.precision == "64-true" else ROUNDING
    bound = 0.0 if model.exact else rounding * size.nan_to_num(posinf=0.0).max().item()
    undecided = f"hidden inputs have gradients, which may be rounding: no float64 twin ({reason})"
    undecided = undecided if reason and size[hidden].any() else ""
    worst = size.masked_fill(~hidden, 0.0).nan_to_num(nan=torch.inf).max().item()
    where, leak = "", {}
    if first := first_true(hidden & ~(size <= bound)):
        leak: dict[str, Any] = {"query": int(queries[first[0]]), "key": first[1]}
        where = f"output {leak['query']} has a gradient with respect to input {leak['key']}"
    return Result("gradient", state.name, length, worst, bound, int(hidden.sum()), where, undecided, **leak)


def check_seen(state: State) -> tuple[Result, str]:
    """How much of its past the last output uses, also in words; it fails only where this is known.

    An output uses an input with a gradient. Gradients leave out look-ups of single tokens, so inputs without one are
    changed, one in each row.
    """
    model, length = state.model, state.model.context_length
    ids = state.texts.draw(1, length)
    size = gradients(model, ids, torch.tensor([length - 1]))
    if size is None:
        length = min(MAX_CHANGED, length)
        ids, size = ids[:, :length], torch.zeros(1, length)
    seen, used = model.visible(length)[-1], size[0] > 0  # (T,) each
    unknown = (seen & ~used).nonzero().flatten()
    unknown = unknown[:: max(1, len(unknown) // MAX_CHANGED)]
    other = state.texts.other(ids)
    for keys in unknown.split(model.batch_size or state.fitting(length)) if len(unknown) else ():
        rows = ids.repeat(model.batch_size or len(keys), 1)
        same = model(rows)
        rows[torch.arange(len(keys)), keys] = other[0, keys]
        used[keys] = (model(rows) != same)[: len(keys), -1].any(-1).cpu()
    unused, where = unknown[~used[unknown]].tolist(), ""
    if model.sees_all and unused:
        where = f"output {length - 1} does not depend on input {unused[0]}"
    result = Result("receptive field", state.name, length, float(not unused), 0.0, int(seen.sum()), where)
    n_used = length - first_true(used)[0] if used.any() else 0
    return result, "all of the past" if used.all() else f"at most the last {n_used} tokens"


def gradients(model: Model, ids: Tensor, queries: Tensor) -> Tensor | None:
    """Largest gradient of a random projection of each output with respect to each input's embedding, (n, T).

    Each row of a batch carries one output, so one backward pass computes as many products with the Jacobian. None
    for a function, for compiled code, where the model looks up no ids, and without backward pass.

    Args:
        ids: (1, T).
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
