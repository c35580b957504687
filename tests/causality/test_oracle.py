"""Every row of the table, judged by brute force: tokens are changed, and outputs of new copies are compared.

B batch, T positions, V vocabulary.
"""

import torch
from torch import Tensor, nn

from tests.causality.net import V
from tests.causality.rows import each

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ROUNDING = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.0}  # relative to the largest output
CUTS = (1, 2, 3, 8, 12, 20, 23, 32, 41, 257)  # the first position that changes
CHUNKS = ([1] * 60, [60], [8] * 7 + [4], [1, 20, 39], [40] + [1] * 20, [25, 1, 1, 33])


def draw(row, batch: int, length: int, seed: int) -> Tensor:
    ids = torch.tensor(row.ids or range(3, V))
    return ids[torch.randint(len(ids), (batch, length), generator=torch.Generator().manual_seed(seed))]


def new(row):
    """A new model in its mode; its weights of 0, which hide leaks, become the identity."""
    model = row.build()
    if isinstance(model, nn.Module):
        model.to(DTYPES.get(row.mode, torch.float64)).train(row.mode == "training")
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.any():
                tensor.data.copy_(torch.eye(len(tensor)) if tensor.dim() == 2 else torch.ones(()))
    return model


def outputs(row, ids: Tensor, earlier: Tensor) -> list[Tensor]:
    """After calls on earlier tokens: the logits, and what enters and leaves the row's place, (B, T, ...) each."""
    model, seen = new(row), []
    with torch.random.fork_rng([]), torch.autocast("cpu", torch.bfloat16, row.mode == "autocast"), torch.no_grad():
        torch.manual_seed(0)
        for _ in range(row.calls):
            model(earlier.contiguous())
        if row.place and row.leaks:
            keep = lambda _, x, y: seen.extend([x[0].clone(), y.clone()])  # noqa: E731
            model.get_submodule(row.place).register_forward_hook(keep)
        out = model(ids.contiguous())
    out = out["logits"] if isinstance(out, dict) else getattr(out, "logits", out)
    tensors = [out[0] if isinstance(out, tuple) else out, *seen]
    return [x if x.shape[:2] == ids.shape else x.expand(len(ids), *x.shape) for x in tensors]


def changes(row, batch: int, length: int, seed: int = 0):
    """Outputs, and outputs after a change that may not change them."""
    ids, other = (draw(row, batch, length, 2 * seed + i) for i in (0, 1))
    number, every, base = torch.arange(batch)[:, None], slice(None), outputs(row, ids, other)
    cuts = [(cut, end) for cut in CUTS if cut < length for end in (length, cut)]
    texts = [(every, slice(cut), torch.cat([ids[:, :cut], other[:, cut:end]], 1), other) for cut, end in cuts]
    for i in {0, batch - 1} if batch > 1 else ():
        texts += [(slice(i, i + 1), every, text, other) for text in (ids.where(number == i, other), ids[i : i + 1])]
    for rows, columns, text, earlier in [(every, every, ids, ids)][: row.calls] + texts:
        changed = outputs(row, text, earlier[: len(text), : text.shape[1]])
        yield [x[rows, columns] for x in base], [(x[rows] if len(x) == batch else x)[:, columns] for x in changed]


def differ(a: Tensor, b: Tensor) -> bool:
    """Whether outputs differ by more than rounding."""
    assert a.isfinite().all() and b.isfinite().all()
    return bool((a - b).abs().max() > ROUNDING.get(a.dtype, 0) * max(1.0, float(a.abs().max())))


def dependencies(row, length: int, seed: int) -> Tensor:
    """(T, T) bool: the logits at the query change with another token at the key, in one row for each key."""
    ids, other = (draw(row, 1, length, 2 * seed + i) for i in (0, 1))
    texts = ids.repeat(length + 1, 1)
    texts[1:].diagonal().copy_(torch.where(other == ids, 3 + (other - 2) % 50, other)[0])
    logits = outputs(row, texts, texts)[0]
    return ((logits[1:] - logits[0]).abs().amax(-1) > ROUNDING[logits.dtype] * max(1.0, float(logits.abs().max()))).T


@each("logits", leaks=(True,))
def test_a_leak_shows_and_begins_at_its_place(row):
    if row.mode == "gradients":
        model, embedded = new(row), []
        model.embed.register_forward_hook(lambda _, x, out: embedded.append(out))
        [gradient] = torch.autograd.grad(model(draw(row, 1, 24, 0))[:, :12].square().sum(), embedded)
        assert gradient[:, 12:].abs().max() > 1e-9
    elif row.expected is not None:
        assert (dependencies(row, row.length, seed=0) & ~row.visible(row.length)).any()
    else:
        pairs = (pair for seed in range(3) for pair in changes(row, row.batch, row.length, seed))
        assert [True, False, True] in ([differ(a, b) for a, b in zip(*pair, strict=True)] for pair in pairs)


@each("logits", leaks=(False,))
def test_a_correct_model_sees_what_it_may_and_nothing_else(row):
    found = torch.stack([dependencies(row, 20, seed) for seed in range(3)]).any(0)
    assert torch.equal(found, row.visible(20)), (found ^ row.visible(20)).nonzero()
    if not row.visible(20).triu(1).any():
        assert not any(differ(before[0], after[0]) for before, after in changes(row, batch=3, length=33))


@torch.no_grad()
@each("cached")
def test_only_a_correct_cache_gives_the_logits_of_one_pass(row):
    ids, other = draw(row, 2, 60, 0), draw(row, 2, 60, 1)
    full, largest = row.build().double()(ids).logits, 0.0
    for sizes in CHUNKS:
        model = row.build().double()
        for text, chunks in ((other, [20, 40]), (ids, sizes)):  # an earlier sequence, and this one
            cache, logits = None, []
            for chunk in text.split(chunks, dim=1):
                out = model(chunk, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logits.append(out.logits)
        largest = max(largest, float((torch.cat(logits, 1) - full).abs().max()))
    assert largest > 1e-3 if row.leaks else largest < 1e-12


@each("pipeline")
def test_only_in_a_pipeline_that_leaks_a_loss_knows_more_than_the_past(row):
    pipeline, generator = row.build(), torch.Generator().manual_seed(1)
    batches = list(pipeline.batches(torch.randint(3, V, (3300,), generator=generator), generator))
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    found = bool((y[:, :, None] == x[:, None]).double().mean(0).tril().max() > 0.2)  # by chance 1 / V
    x, y, at = x[:2], y[:2], torch.arange(x.shape[1]) == 17
    pipeline.model.double()
    for training in (False, True):
        pipeline.model.train(training)

        def losses(inputs: Tensor, targets: Tensor) -> Tensor:
            torch.manual_seed(0)
            return pipeline.losses(inputs, targets).detach()

        base, given = losses(x, y), torch.stack([losses(x, torch.where(at, token, y)) for token in range(V)])
        later = (losses(torch.where(at, 30, x), y) - base)[:, :17]
        total = given[..., 17].neg().exp().sum(0) - 1
        found |= any(bool(size.abs().max() > 1e-9) for size in ((given - base) * ~at, later, total))
    assert found == row.leaks
