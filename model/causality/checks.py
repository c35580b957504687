"""The three checks of a model: future, equal and gradient. Each compares outputs with bounds that are measured once.

B batch, T positions, V vocabulary.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tril.model.causality.model import Model, ModelError, one_line
from tril.model.causality.place import Pass, find_leak, first_difference, in_words, largest_change, removed_at_exit
from tril.model.causality.texts import Texts

# Two computations of one function may differ by as much as each of them differs from the exact value. That difference
# is measured in float64; twice the sum of both leaves room for other inputs than the measured one.
SLACK = 4
UNITS = 16  # units in the last place of the largest output: the rounding of a function that has no float64 twin
EPS, LOW_EPS = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
FLOAT64_ROUNDING = torch.finfo(torch.float64).eps / EPS  # relative to that of float32
FLOAT64_SLACK = 1000  # some inputs round worse than the measured one; leaks are far larger still
# A function that differs more from its float64 twin is another function there, and its bound would hide a leak.
MAX_ROUNDING, MAX_LOW_PRECISION = 1e-3, 0.1
MAX_FLOAT64_ROUNDING = 1e-11  # of the largest output
MAX_NOISE = 1e-4  # of the largest output: two runs of one input that differ more are not repeatable
RELATIVE_GRADIENT = 1e-10  # of the largest gradient in float64: its rounding
BATCH_SIZES = (2, 5, 1, 8, 3, 16)  # taken in turn; a leak may depend on the batch size
MAX_OUTPUTS = 1 << 25  # elements in memory at once: 0.13 GB of float32


@dataclass(frozen=True)
class Result:
    """Result of one check of one variant at one length.

    Attributes:
        check: "future", "equal", "gradient", "receptive field"; of a loss also "targets", "shift", "canary", "overlap".
        variant: of the model, in words.
        worst: the largest value that should be 0, or the smallest that should not be.
        tested: number of compared outputs or pairs of positions.
        where: the first failure in words; empty if the check passed.
        undecided: a difference that may be rounding or a small leak; empty for none.
        query, key: positions of the first failure, where it has them.
        place: name of the submodule whose input is clean and whose output is not.
    """

    check: str
    variant: str
    length: int
    worst: float
    bound: float
    tested: int
    where: str = ""
    undecided: str = ""
    query: int | None = None
    key: int | None = None
    place: str = ""

    @property
    def passed(self) -> bool:
        return not self.where


@dataclass(frozen=True)
class Bounds:
    """What the differences of outputs that should be equal may be, measured once for a variant.

    Attributes:
        scale: the largest output.
        noise: largest difference of two runs of the same input.
        hidden: returns how far an output may change with a hidden token where `exact`: by noise only.
        rounding: how far two ways to compute the same outputs may differ.
        exact: a hidden token does not even change the rounding, as where its weight is 0.
        stochastic: a pass draws random numbers, so passes of other shapes cannot be compared.
        twin: the same function in float64; None: there is none.
        twin_rounding: of the twin.
        undecided: why nothing decides whether a difference of rounding size is a leak; "": something does.
    """

    scale: float
    noise: float
    hidden: Callable[[], float]
    rounding: float
    exact: bool
    stochastic: bool
    twin: Model | None = None
    twin_rounding: float = 0.0
    undecided: str = ""


@torch.no_grad()
def measure_bounds(model: Model, texts: Texts, length: int, *, exact: bool, sharp: bool = False) -> Bounds:
    """Measures the noise and the rounding of a model on texts of this length.

    Args:
        exact: hidden tokens do not change the rounding.
        sharp: the weights are so large that they amplify every rounding.
    """
    ids = texts.draw(model.batch_size or 4, length)
    (outputs, stochastic), again = model.watched(ids), model(ids)
    scale, noise = finite(outputs).abs().max().item(), largest_change(outputs, again).max().item()
    low = model.precision not in ("32-true", "64-true")

    @functools.cache
    @torch.no_grad()
    def hidden() -> float:
        # In low precision, other rows may change the rounding of a text, as with experts.
        others = [torch.cat([ids[:1], texts.draw(*ids.shape)[1:]]) for _ in range(4 if low and not noise else 0)]
        changes = any(not torch.equal(outputs[0], model(other)[0]) for other in others)
        return 2 * LOW_EPS * scale if changes else SLACK * noise

    measured = functools.partial(Bounds, scale, noise, hidden, exact=exact, stochastic=stochastic)
    if model.precision == "64-true":
        return measured(rounding=MAX_FLOAT64_ROUNDING * scale)
    if sharp:
        return measured(rounding=MAX_ROUNDING * scale)
    reason = "the model has none"
    try:
        twin = model.in_float64()
        if twin is not None:
            precise = finite(twin(ids))
            if precise.isfinite().all():
                rounding = (finite(outputs).to(precise.device).double() - precise).abs().max().item()
                rounding = min(rounding, (MAX_LOW_PRECISION if low else MAX_ROUNDING) * scale)
                known = 0.0 if low else rounding
                of_twin = FLOAT64_ROUNDING * max(FLOAT64_SLACK * EPS * scale, 10 * SLACK * known)
                return measured(rounding=SLACK * rounding, twin=twin, twin_rounding=of_twin)
            reason = "it is not finite"
    except Exception as error:  # code of other projects may raise anything
        reason = one_line(error.__cause__ or error)
    return measured(rounding=SLACK * UNITS * EPS * scale, undecided=reason)


def finite(outputs: Tensor) -> Tensor:
    """The outputs without the -inf of ids that fill up the vocabulary."""
    return outputs.masked_fill(outputs == -torch.inf, 0.0)


@dataclass(frozen=True)
class Verdict:
    """How far outputs differ, how far they may, the model that shows it, and whether this may be rounding."""

    worst: float
    bound: float
    model: Model
    undecided: str = ""

    @property
    def passed(self) -> bool:
        return self.worst <= self.bound  # False for nan


def judge(model: Model, bounds: Bounds, change: Callable[[Model], Tensor], *, exact: bool = False) -> Verdict:
    """Compares a difference with its bound; one of rounding size is computed again in float64.

    Args:
        change: the differences of two computations by a model.
        exact: the outputs should be equal bit for bit, up to the noise of the model.
    """
    worst = change(model).max().item()
    if exact or worst == 0:
        return Verdict(worst, bounds.hidden() if worst else SLACK * bounds.noise, model)
    if bounds.twin is not None:
        precise = change(bounds.twin).max().item()
        if not precise <= bounds.twin_rounding:
            return Verdict(precise, bounds.twin_rounding, bounds.twin)
    undecided = ""
    if bounds.undecided and worst <= bounds.rounding:
        undecided = f"outputs differ by {worst:.1g}, which may be rounding: no float64 twin ({bounds.undecided})"
    return Verdict(worst, bounds.rounding, model, undecided)


def worst_of(one: Verdict, other: Verdict) -> Verdict:
    return max(one, other, key=lambda verdict: (not verdict.passed, verdict.worst))


@dataclass
class Checker:
    """Runs the checks of one variant.

    Attributes:
        variant: in words.
    """

    model: Model
    bounds: Bounds
    texts: Texts
    variant: str = "weights=own"
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    _seed: int = 1
    _turn: int = 0

    def result(self, check: str, length: int, verdict: Verdict, tested: int, where: str = "", **leak: Any) -> Result:
        undecided = verdict.undecided
        return Result(check, self.variant, length, verdict.worst, verdict.bound, tested, where, undecided, **leak)

    def _batch_size(self, length: int, limit: int) -> int:
        """Rows of the next batch: they differ, and fit into memory and on a CPU into its caches."""
        if self.model.batch_size:
            return self.model.batch_size
        self._turn += 1
        tokens = 4096 if self.model.device.type == "cpu" else 1 << 17
        fitting = min(tokens // length, MAX_OUTPUTS // (length * self.model.vocab_size))
        return max(1, min(BATCH_SIZES[self._turn % len(BATCH_SIZES)], limit, fitting))

    def future(self, length: int, rows: int) -> Iterator[Result]:
        """`future_of` as many outputs as `rows`; of positions at the ends and at edges of blocks first."""
        return self.future_of(positions_to_test(length, rows, self.generator), length)

    @torch.no_grad()
    def future_of(self, queries: Tensor, length: int) -> Iterator[Result]:
        """No output changes when every token that it may not see is replaced.

        Each row of a batch has a query; all outputs that see no more than it does are compared. Then the rows but
        the first are replaced, which may not change the first one.
        """
        visible = self.model.visible(length)
        queries = queries[~visible[queries].all(-1)]
        queries = queries[torch.randperm(len(queries), generator=self.generator)]  # rows may leak in any direction
        worst, tested, largest_batch = Verdict(0.0, 0.0, self.model), 0, 0
        where, leak = "", {}
        while len(queries) and not where:
            size = self._batch_size(length, len(queries))
            chosen, queries = queries[:size], queries[size:]
            chosen = chosen.repeat(math.ceil(size / len(chosen)))[:size]
            ids = self.texts.draw(size, length)
            changed = torch.where(visible[chosen], ids, self.texts.other(ids))
            compared = ~(visible[None] & ~visible[chosen][:, None]).any(-1)  # (B, T)
            verdict, where, leak = self._changes(ids, changed, compared)
            tested, largest_batch = tested + int(compared.sum()), max(largest_batch, size)
            worst = worst_of(worst, verdict)
        if not where and largest_batch <= 4:  # a larger batch with different queries has shown that rows do not mix
            n = self.model.batch_size or min(4, max(2, self._batch_size(length, 4)))
            ids = self.texts.draw(n, length)
            rest = torch.cat([ids[:1], self.texts.other(ids)[1:]])
            verdict, where, leak = self._changes(ids, rest, (torch.arange(n) == 0)[:, None].expand(n, length))
            tested, worst = tested + length, worst_of(worst, verdict)
        yield self.result("future", length, worst, tested, where, **leak)

    def _changes(self, ids: Tensor, changed: Tensor, compared: Tensor) -> tuple[Verdict, str, dict[str, Any]]:
        self._seed = seed = self._seed + 1  # another one in each batch, and the same in the pair

        def change(model: Model) -> Tensor:
            change = largest_change(model(changed, seed=seed), model(ids, seed=seed))
            return change.masked_fill(~compared.to(model.device), 0.0)  # a hidden output may be nan

        verdict = judge(self.model, self.bounds, change, exact=self.bounds.exact)
        if verdict.passed:
            return verdict, "", {}
        return verdict, *find_leak(verdict.model, ids, changed, compared, verdict.bound, seed)

    @torch.no_grad()
    def repeatable(self, length: int) -> Iterator[Result]:
        """Two runs of one input agree, and so do a text alone and in a batch."""
        noise, bound, model = self.bounds.noise, MAX_NOISE * self.bounds.scale, self.model
        where = "" if noise <= bound else f"two runs of the same input differ by {noise:.2g}"
        yield self.result("equal", length, Verdict(noise, bound, model), length, where)
        if self.bounds.stochastic or model.batch_size:
            return
        ids = self.texts.draw(3, length)
        change = lambda model: largest_change(model(ids)[2:], model(ids[2:]))  # noqa: E731  (1, T)
        verdict, where, place = judge(model, self.bounds, change), "", None
        if not verdict.passed:
            query = int(change(verdict.model)[0].argmax())
            together = Pass(lambda: verdict.model(ids), query, length, row=2, rows=3)
            alone = Pass(lambda: verdict.model(ids[2:]), query, length)
            place = first_difference(verdict.model.module, together, alone, exact=False)
            where = f"a text alone and in a batch of 3 differ by {verdict.worst:.2g}{in_words(place)}"
        yield self.result("equal", length, verdict, length, where, place=place or "")

    @torch.no_grad()
    def ways(self, length: int, names: Sequence[str]) -> Iterator[Result | str]:
        """Every other way to compute the outputs gives the same; a note for a way that raises an exception."""
        ids = self.texts.draw(3, length)
        full = pass_once(ids)  # for all ways: another pass might reset a cache that a way leaves behind
        for name in names:

            def change(model: Model, name: str = name) -> Tensor:
                outputs, other = full(model), model.by_way(name, ids)  # (B, T, *), (B, T, V)
                outputs = outputs[..., : other.shape[-1]]
                missing = other.isnan().all(-1) & ~outputs.isnan().all(-1)
                return largest_change(other, outputs).masked_fill(missing, 0.0)

            try:
                verdict = judge(self.model, self.bounds, change)
            except ModelError as error:
                if self.model.exact:  # a model of ours can do all that it names
                    raise
                yield f"{name} is left out, where {error}"
                continue
            where, leak = "", {}
            if not verdict.passed:
                row, query = first_true(~(change(verdict.model) <= verdict.bound))
                place = self._place_of_way(verdict.model, name, ids[row : row + 1], query)
                leak = {"query": query, "place": place or ""}
                where = f"{name}: output {query} differs by {verdict.worst:.2g}{in_words(place or None)}"
            yield self.result("equal", length, verdict, ids.numel(), where, **leak)

    def _place_of_way(self, model: Model, name: str, ids: Tensor, query: int) -> str | None:
        """None where the positions of a way are others than those of the full pass."""
        chunked = "cache" in name
        if chunked or name.startswith("given"):
            full = Pass(lambda: model(ids), query, ids.shape[1])
            with contextlib.suppress(Exception):  # a way may call other submodules
                other = replace(full, run=lambda: model.by_way(name, ids), chunked=chunked)
                return first_difference(model.module, full, other, exact=False)

    @torch.no_grad()
    def lengths(self, longest: int, lengths: Sequence[int], in_time: Callable[[], bool]) -> Iterator[Result]:
        """The outputs of a text do not change when it is cut off at any length."""
        if self.bounds.stochastic or self.model.batch_size:
            return
        ids, visible = self.texts.draw(1, longest), self.model.visible(longest)
        full, worst, tested = pass_once(ids), Verdict(0.0, 0.0, self.model), 0
        for length in lengths:
            if not torch.equal(visible[:length, :length], self.model.visible(length)):
                continue
            if not in_time():
                break
            compared = ~visible[:length, length:].any(-1)  # (n,)

            def change(model: Model, length: int = length, compared: Tensor = compared) -> Tensor:
                change = largest_change(model(ids[:, :length]), full(model)[:, :length])[0].cpu()
                return change.masked_fill(~compared, 0.0)

            try:
                verdict = judge(self.model, self.bounds, change)
            except ModelError:  # such as statistics of a single number
                continue
            verdict = replace(verdict, undecided="")  # the future check decides about small leaks
            tested, worst = tested + int(compared.sum()), worst_of(worst, verdict)
            if not verdict.passed:
                model, query = verdict.model, int(change(verdict.model).argmax())
                texts = (ids, ids[:, :length])
                passes = [Pass(functools.partial(model, text), query, text.shape[1]) for text in texts]
                place = first_difference(model.module, *passes, exact=False)
                where = f"output {query} changes if the text ends after {length} instead of {longest} tokens"
                leak = {"query": query, "key": length, "place": place or ""}
                yield self.result("equal", length, verdict, tested, where + in_words(place), **leak)
                return
        if tested:
            yield self.result("equal", longest, worst, tested)

    def gradient(self, length: int, n_queries: int) -> tuple[Result, Tensor, Tensor] | None:
        """Hidden inputs have exactly no gradient, which replaced tokens cannot show; also queries (n,) and gradients.

        The gradients are (n, T). None for a function, and for a module without `nn.Embedding` or backward pass.
        """
        ids, model, bound = self.texts.draw(1, length)[0], self.model, 0.0
        queries = positions_to_test(length, n_queries, self.generator)
        hidden = ~model.visible(length)[queries]
        try:
            size = gradients(model, ids, queries, self._batch_size)
        except Exception:  # such as Reformer's backward in evaluation mode
            return None
        if not size.any():
            return None
        if not model.exact and size.masked_fill(~hidden, 0.0).any():
            # A Fourier transform or a subtracted maximum has gradients of rounding size, which float64 tells apart.
            if self.bounds.twin is not None:
                model = self.bounds.twin
                size = gradients(model, ids, queries, self._batch_size)
            if model.precision == "64-true":
                bound = RELATIVE_GRADIENT * size.max().item()
        worst = size.masked_fill(~hidden, 0.0).nan_to_num(nan=torch.inf).max().item()
        where, leak = "", {}
        if first := first_true(hidden & ~(size <= bound)):
            query, key = int(queries[first[0]]), first[1]
            leak = {"query": query, "key": key}
            where = f"output {query} has a gradient with respect to input {key}"
        verdict = Verdict(worst, bound, model)
        return self.result("gradient", length, verdict, int(hidden.sum()), where, **leak), queries, size

    @torch.no_grad()
    def depends(self, length: int, query: int, keys: Sequence[int]) -> Tensor:
        """bool (n,): whether an output changes with each of these inputs alone."""
        ids = self.texts.draw(1, length)
        other, depends = self.texts.other(ids), []
        for part in torch.tensor(keys).split(self.model.batch_size or max(1, 4096 // length)):
            rows = ids.repeat(self.model.batch_size or len(part), 1)
            same = self.model(rows)[: len(part), query]
            rows[torch.arange(len(part)), part] = other[0, part]
            depends.append((self.model(rows)[: len(part), query] != same).any(-1).cpu())
        return torch.cat(depends)


def pass_once(ids: Tensor) -> Callable[[Model], Tensor]:
    """A function that returns the outputs of a model and of its float64 twin for `ids`, and computes each once."""
    outputs: dict[str, Tensor] = {}

    def run(model: Model) -> Tensor:
        if model.precision not in outputs:
            outputs[model.precision] = model(ids)
        return outputs[model.precision]

    return run


def positions_to_test(length: int, limit: int, generator: torch.Generator) -> Tensor:
    """All positions if there are at most `limit`; else the ends, edges of blocks of 16, 64 and 128, and random ones."""
    if length <= limit:
        return torch.arange(length)
    fixed = block_edges(length)[: max(2, limit // 2)]
    rest = [p for p in torch.randperm(length, generator=generator).tolist() if p not in set(fixed)]
    return torch.tensor(sorted((fixed + rest)[:limit]))


def block_edges(length: int) -> list[int]:
    """Positions where implementations change: the ends and the edges of blocks, those of large ones first."""
    edges = [edge + side for size in (128, 64, 16) for edge in range(size, length, size) for side in (-1, 0)]
    inexact = [2 ** (bits + 1) for bits in (7, 10)]  # bf16 and float16 round the next position to this one
    positions = (*inexact, length // 2, length - 2, 0, length // 4, length - 1, 1, *edges)
    return list(dict.fromkeys(p for p in positions if 0 <= p < length))


def first_true(wrong: Tensor) -> list[int]:
    """Index of the first True; empty if there is none."""
    return torch.nonzero(wrong)[:1].flatten().tolist()


def gradients(model: Model, ids: Tensor, queries: Tensor, batch_size: Callable[[int, int], int]) -> Tensor:
    """Largest gradient of a random projection of each output with respect to each input's embedding, (n, T).

    Each row of a batch carries one output, so one backward pass computes as many products with the Jacobian. All 0
    where the model looks no tokens up in an `nn.Embedding`, and for a compiled one.
    """
    rows, generator = [], torch.Generator().manual_seed(0)
    if model.module is None or any(isinstance(m, torch._dynamo.OptimizedModule) for m in model.module.modules()):
        return torch.zeros(len(queries), len(ids))
    while len(queries):
        size = batch_size(len(ids), len(queries))
        part, queries = queries[:size], queries[size:]
        batch = ids.repeat(size, 1).to(model.device)
        with embeddings_as_leaves(model.module, batch) as leaves:
            outputs = replace(model, grad_mode="grad")(batch)  # (B, T, V)
        if not leaves:
            return torch.zeros(len(rows) + len(part), len(ids))
        direction = torch.randn(outputs.shape[-1], generator=generator).to(outputs)
        chosen = finite(outputs[torch.arange(len(part)), part])
        grads = torch.autograd.grad((chosen @ direction).sum(), leaves, allow_unused=True)
        found = sum(g.abs().amax(-1) for g in grads if g is not None) + outputs.new_zeros(batch.shape)
        rows.append(found[: len(part)].detach().cpu().double())
    return torch.cat(rows)


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
