"""A brute-force oracle for entries of the corpus, independent of the certifier: it changes tokens and compares logits.

Every run has a module of its own, so that calls do not influence each other and the runs are equal to the bit.

B batch, T positions, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.causality.corpus import Entry, Trigger
from tests.causality.corpus.net import V

ROUNDING = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.0}  # relative to the largest logit
FIRST_ORDINARY = 3  # end of text, separator and padding are below


def logits_of(output) -> Tensor:
    if isinstance(output, dict):
        return output["logits"]
    return output[0] if isinstance(output, tuple) else getattr(output, "logits", output)


class Run:
    """The outputs of an entry under a trigger, each from a new module, in float64 where it can.

    Args:
        view: "input" or "output": returns those of the entry's place in the last call, instead of the logits.
    """

    def __init__(self, entry: Entry, trigger: Trigger, training: bool = False, view: str = ""):
        self.entry, self.trigger, self.training, self.view = entry, trigger, training, view
        self.dtype = trigger.dtype or self.most_precise()

    def most_precise(self) -> torch.dtype:
        model = self.entry.build()
        if not isinstance(model, nn.Module) or next(model.parameters()).dtype == torch.bfloat16:
            return torch.bfloat16 if isinstance(model, nn.Module) else torch.float32
        try:
            model.double()(random_ids(self.entry, 1, 2))
        except RuntimeError:  # of different types, "expected scalar type Float but found Double"
            return torch.float32
        return torch.float64

    def model(self):
        model = self.entry.build()
        if isinstance(model, nn.Module):
            model = model.to(self.dtype).train(self.training)
            tensors = dict(model.named_parameters()) | dict(model.named_buffers())
            with torch.no_grad():
                for name, value in self.trigger.values.items():
                    tensor = tensors[name]
                    tensor.copy_(value * (torch.eye(len(tensor)) if tensor.dim() == 2 else torch.ones(())))
        return model

    def __call__(self, ids: Tensor, earlier: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) after `trigger.calls` calls on the tokens `earlier`."""
        model = self.model()
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", torch.bfloat16, self.trigger.autocast):
            torch.manual_seed(0)
            with torch.set_grad_enabled(self.trigger.grad):
                for _ in range(self.trigger.calls):
                    model(earlier.contiguous())
                seen = {}
                if self.view:
                    model.get_submodule(self.entry.place).register_forward_hook(
                        lambda module, arguments, out: seen.update(input=arguments[0].clone(), output=out.clone())
                    )
                logits = logits_of(model(ids.contiguous()))
                out = seen.get(self.view, logits).detach()
                return out if out.dim() == 3 or not out.is_floating_point() else out[None]  # positions are (T, C)


def differ(a: Tensor, b: Tensor) -> bool:
    """Whether logits differ by more than rounding."""
    if not a.is_floating_point():  # token ids
        return not torch.equal(a, b)
    assert a.isfinite().all() and b.isfinite().all()
    return bool((a - b).abs().max() > ROUNDING[a.dtype] * max(1.0, float(a.abs().max())))


def random_ids(entry: Entry, batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ORDINARY, V, (batch, length), generator=generator)


def changes(run: Run, length: int, seed: int = 0) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(what, outputs, outputs after a change that may not change them)."""
    entry, trigger = run.entry, run.trigger
    ids, other = (random_ids(entry, trigger.batch, length, 2 * seed + i) for i in (0, 1))
    cuts = {1, 2, 3, length // 4, length // 2, length - 1} if trigger.cut is None else {trigger.cut}
    base = run(ids, other)
    for cut in sorted(cut for cut in cuts if 0 < cut < length):
        ids_of_cut, suffix = ids.clone(), other[:, cut:].clone()
        known, tokens = (torch.tensor(part, dtype=torch.long) for part in (trigger.before[-cut:], trigger.tokens))
        ids_of_cut[:, cut - len(known) : cut] = known
        suffix[:, : len(tokens)] = tokens[: length - cut]
        before = (run(ids_of_cut, other) if len(known) else base)[:, :cut]
        yield f"suffix from {cut}", before, run(torch.cat([ids_of_cut[:, :cut], suffix], 1), other)[:, :cut]
        yield f"without the suffix from {cut}", before, run(ids_of_cut[:, :cut], other[:, :cut])
    if trigger.batch > 1:
        for row in (0, trigger.batch - 1):
            changed = other.clone()
            changed[row] = ids[row]
            yield f"rows other than {row}", base[row], run(changed, other)[row]
            yield f"row {row} alone", base[row], run(ids[row : row + 1], other)[0]
    if trigger.calls:
        yield "calls before", base, run(ids, ids)


def leaks_by_gradient(run: Run, length: int) -> bool:
    """Whether the gradient of an output reaches later embeddings, and no output changes with later tokens."""
    model, embedded = run.model(), []
    model.embed.register_forward_hook(lambda module, arguments, out: embedded.append(out))
    logits = model(random_ids(run.entry, 1, length))
    [gradient] = torch.autograd.grad(logits[:, : length // 2].square().sum(), embedded)
    return bool(gradient[:, length // 2 :].abs().max() > 1e-9)


def dependencies(run: Run, length: int, seed: int) -> Tensor:
    """(T, T) bool: the logits at the query change with another token at the key, in one row for each key."""
    ids, other = (random_ids(run.entry, 1, length, 2 * seed + i) for i in (0, 1))
    other = torch.where(other == ids, FIRST_ORDINARY + (other - FIRST_ORDINARY + 1) % 50, other)
    rows = ids.repeat(length + 1, 1)
    rows[1:].diagonal().copy_(other[0])
    logits = run(rows)
    bound = ROUNDING[logits.dtype] * max(1.0, float(logits.abs().max()))
    return ((logits[1:] - logits[0]).abs().amax(-1) > bound).T
