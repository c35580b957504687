"""The three checks of a model: future, equal and gradient. Each compares outputs with bounds that are measured once.

B batch, T positions, V vocabulary.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tril.model.causality.model import FIRST_SEED, Model, ModelError, one_line
from tril.model.causality.place import Pass, find_leak, first_difference, in_words, largest_change, removed_at_exit
from tril.model.causality.texts import Texts

# Two computations of one function may differ by as much as each of them differs from the exact value. That difference
# is measured in float64; twice the sum of both leaves room for other inputs than the measured one.
SLACK = 4
UNITS = 16  # units in the last place of the largest output: the least bound, and a fourth of that without float64 twin
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
        check: "future", "equal", "gradient", "receptive field"; of a loss also "targets", "shift", "overlap".
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


class Text(NamedTuple):
    """Texts (B, T) and the outputs (B, T, V) of a pass with `FIRST_SEED`, with which several checks compare others."""

    ids: Tensor
    outputs: Tensor

    def outputs_of(self, model: Model, own: Model) -> Tensor:
        """The outputs of `own`, which are known, or those of another model."""
        return self.outputs if model is own else model(self.ids)


class Rounding(NamedTuple):
    """How far two ways to compute the same outputs may differ.

    Attributes:
        twin: the same function in float64; None: there is none.
        of_twin: the rounding of the twin.
        undecided: why nothing decides whether a difference of rounding size is a leak; "": something does.
    """

    bound: float
    twin: Model | None = None
    of_twin: float = 0.0
    undecided: str = ""


class Verdict(NamedTuple):
    """How far outputs differ, how far they may, the model that shows it, and whether this may be rounding."""

    worst: float
    bound: float
    model: Model
    undecided: str = ""

    @property
    def passed(self) -> bool:
        return self.worst <= self.bound  # False for nan


def finite(outputs: Tensor) -> Tensor:
    """The outputs without the -inf of ids that fill up the vocabulary."""
    return outputs.masked_fill(outputs == -torch.inf, 0.0)


def worst_of(one: Verdict, other: Verdict) -> Verdict:
    return max(one, other, key=lambda verdict: (not verdict.passed, verdict.worst))


@dataclass
class Checker:
    """Runs the checks of one variant. What the differences of equal outputs may be is measured once, when one differs.

    Attributes:
        ids: texts (B, T) of the full context, on which noise and rounding are measured.
        scale: the largest output.
        stochastic: a pass draws random numbers, so passes of other shapes cannot be compared.
        variant: in words.
        exact: a hidden token does not even change the rounding, as where its weight is 0.
        relative_bound: of two ways to compute the same outputs, as a share of the largest one, such as for weights so
            large that they amplify every rounding, and at most `largest_bound`; None: it is measured in float64.
        generator: of the positions from which tokens are replaced.
    """

    model: Model
    texts: Texts
    ids: Tensor
    scale: float
    stochastic: bool
    variant: str
    exact: bool = False
    relative_bound: float | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    _seed: int = 1
    _turn: int = 0

    @classmethod
    def begin(
        cls, model: Model, texts: Texts, variant: str = "weights=own", *, repeat: bool = False, **options: Any
    ) -> "tuple[Checker, Text]":
        """A checker and its first text.

        Args:
            repeat: measure the noise now.

        Raises:
            ModelError: the model raises an exception, or its outputs are not finite.
        """
        ids = texts.draw(model.batch_size or 2, model.context_length)
        outputs, scale, stochastic = model.measure(ids)
        checker = cls(model, texts, ids, scale, stochastic, variant, **options)
        if repeat:
            checker.noise = noise = largest_change(outputs, model(ids)).max().item()
            if checker.relative_bound is not None and scale:
                checker.relative_bound = max(checker.relative_bound, SLACK * noise / scale)
        return checker, Text(ids, outputs)

    @property
    def is_low(self) -> bool:
        return self.model.precision not in ("32-true", "64-true")

    @property
    def largest_bound(self) -> float:
        """As a share of the largest output."""
        return MAX_LOW_PRECISION if self.is_low else MAX_ROUNDING

    @functools.cached_property
    def noise(self) -> float:
        """Largest difference of two runs of the same input."""
        return largest_change(self.model(self.ids), self.model(self.ids)).max().item()

    @functools.cached_property
    def hidden(self) -> float:
        """How far an output may change with a hidden token where this is `exact`."""
        # In low precision, other rows may change the rounding of a text, as with experts.
        shape = self.model.batch_size or 4, self.ids.shape[1]
        for _ in range(4 if self.is_low and not self.noise else 0):
            first, *others = (torch.cat([self.ids[:1], self.texts.draw(*shape)[1:]]) for _ in range(2))
            if not torch.equal(self.model(first)[0], self.model(others[0])[0]):
                return 2 * LOW_EPS * self.scale
        return SLACK * self.noise

    @functools.cached_property
    def rounding(self) -> Rounding:
        """Measured as the difference from the float64 twin."""
        if self.model.precision == "64-true":
            return Rounding(MAX_FLOAT64_ROUNDING * self.scale)
        if self.relative_bound is not None:
            return Rounding(min(self.relative_bound, self.largest_bound) * self.scale)
        reason = "the model has none"
        try:
            if (twin := self.model.in_float64()) is not None:
                precise = finite(twin(self.ids))
                if precise.isfinite().all():
                    outputs = finite(self.model(self.ids)).to(precise.device).double()
                    rounding = min((outputs - precise).abs().max().item(), self.largest_bound * self.scale)
                    known = 0.0 if self.is_low else rounding
                    of_twin = FLOAT64_ROUNDING * max(FLOAT64_SLACK * EPS * self.scale, 10 * SLACK * known)
                    least = UNITS * EPS * self.scale  # other inputs round worse; float64 decides below
                    return Rounding(max(SLACK * rounding, least), twin, of_twin)
                reason = "it is not finite"
        except Exception as error:  # code of other projects may raise anything
            reason = one_line(error.__cause__ or error)
        return Rounding(SLACK * UNITS * EPS * self.scale, undecided=reason)

    @torch.no_grad()
    def judge(self, change: Callable[[Model], Tensor], *, exact: bool = False, in_float64: bool = True) -> Verdict:
        """Compares a difference with its bound; one of rounding size is computed again in float64.

        Args:
            change: the differences of two computations by a model.
            exact: the outputs should be equal bit for bit, up to the noise of the model.
            in_float64: False where another variant compares float64.
        """
        worst = change(self.model).max().item()
        if worst == 0:
            return Verdict(worst, 0.0, self.model)
        if exact:
            return self._judge_exact(change, worst)
        bound, twin, of_twin, reason = self.rounding
        if twin is not None and in_float64 and worst <= bound:
            in_twin = change(twin).max().item()
            if not in_twin <= of_twin:
                return Verdict(in_twin, of_twin, twin)
        undecided = ""
        if reason and worst <= bound:
            undecided = f"outputs differ by {worst:.1g}, which may be rounding: no float64 twin ({reason})"
        return Verdict(worst, bound, self.model, undecided)

    def _judge_exact(self, change: Callable[[Model], Tensor], worst: float) -> Verdict:
        """A difference of a few units in the last place is a leak only if float64 shows it too.

        Experts that compute their tokens together round by the number of these, which hidden tokens decide.
        """
        is_float64 = self.model.precision == "64-true"
        units = UNITS * self.scale * (torch.finfo(torch.float64).eps if is_float64 else EPS)
        if self.is_low or not self.hidden < worst <= units:
            return Verdict(worst, self.hidden, self.model)
        if is_float64:
            return Verdict(worst, units, self.model)
        twin, of_twin = self.rounding.twin, self.rounding.of_twin
        in_twin = torch.inf if twin is None else change(twin).max().item()
        if twin is None or in_twin <= of_twin:
            return Verdict(worst, self.hidden if twin is None else units, self.model)
        return Verdict(in_twin, of_twin, twin)

    def result(self, check: str, length: int, verdict: Verdict, tested: int, where: str = "", **leak: Any) -> Result:
        undecided = verdict.undecided
        return Result(check, self.variant, length, verdict.worst, verdict.bound, tested, where, undecided, **leak)

    def _batch_size(self, length: int, limit: int) -> int:
        """Rows of the next batch: they differ, and fit into memory and on a CPU into its caches."""
        self._turn += 1
        if self.model.batch_size:
            return self.model.batch_size
        return max(1, min(BATCH_SIZES[self._turn % len(BATCH_SIZES)], limit, self._fitting_rows(length)))

    def _fitting_rows(self, length: int) -> int:
        tokens = 4096 if self.model.device.type == "cpu" else 1 << 17
        return max(1, min(tokens // length, MAX_OUTPUTS // (length * self.model.vocab_size)))

    def future(self, length: int, rows: int, text: Text | None = None) -> Iterator[Result]:
        """`future_of` with this number of rows."""
        queries = torch.tensor(positions_in_order(length, self.generator)[: max(1, rows - 1)])
        return self.future_of(queries, length, text)

    @torch.no_grad()
    def future_of(self, queries: Tensor, length: int, text: Text | None = None) -> Iterator[Result]:
        """No output changes when every token that it may not see is replaced, and with them all of another row.

        Each row has a query, but one row of the first batch; all outputs that see no more than it does are compared.

        Args:
            text: of this length; its tokens are replaced in the first batch that has as many rows.
        """
        visible, worst, tested = self.model.visible(length), Verdict(0.0, 0.0, self.model), 0
        whole = -1
        queries = queries[torch.randperm(len(queries), generator=self.generator)]  # rows may leak in any direction
        while len(queries):
            size = self._batch_size(length, len(queries) + (whole < 0))
            n_queries = size - 1 if whole < 0 and size > 1 else size
            chosen, queries = queries[:n_queries], queries[n_queries:]
            chosen = chosen.repeat(size)[:size].roll(self._turn)
            known = text if text is not None and len(text.ids) == size else None
            text = text if known is None else None
            ids = self.texts.draw(size, length) if known is None else known.ids
            kept, compared = visible[chosen], ~(visible[None] & ~visible[chosen][:, None]).any(-1)  # (B, T) each
            if n_queries < size and whole < 0:
                whole = (self._turn - 1) % size  # the last one, before the roll
                kept[whole], compared[whole] = False, False
            verdict, where, leak = self._changes(ids, torch.where(kept, ids, self.texts.other(ids)), compared, known)
            tested, worst = tested + int(compared.sum()), worst_of(worst, verdict)
            if where:
                yield self.result("future", length, worst, tested, where, **leak)
                return
        yield self.result("future", length, worst, tested)

    @torch.no_grad()
    def every_id(self, in_time: Callable[[], bool]) -> Iterator[Result | str]:
        """No id of the vocabulary opens a leak: each is once before, at and behind the end of what an output sees."""
        length, n_ids = min(3, self.model.context_length), self.model.vocab_size
        kept = self.model.visible(length)[length // 2]
        compared = ~(self.model.visible(length) & ~kept).any(-1)
        if kept.all() or self.model.batch_size:
            return
        orders = [torch.randperm(n_ids, generator=self.generator) for _ in range(2 * length)]
        ids, others = (torch.stack(part, 1) for part in (orders[:length], orders[length:]))  # (V, length)
        others = torch.where(others == ids, (ids + 1) % n_ids, others)
        worst, tested = Verdict(0.0, 0.0, self.model), 0
        for rows, other in zip(*(x.split(min(512, self._fitting_rows(length))) for x in (ids, others)), strict=True):
            if not in_time():
                yield f"{tested} of {n_ids} ids were tested as those that open a leak, with {self.variant}"
                break
            verdict, where, leak = self._changes(rows, torch.where(kept, rows, other), compared.expand(rows.shape))
            tested, worst = tested + len(rows), worst_of(worst, verdict)
            if where:
                yield self.result("future", length, worst, tested, where, **leak)
                return
        if tested:
            yield self.result("future", length, worst, tested)

    def _changes(
        self, ids: Tensor, changed: Tensor, compared: Tensor, known: Text | None = None
    ) -> tuple[Verdict, str, dict[str, Any]]:
        self._seed += known is None
        seed = self._seed if known is None else FIRST_SEED  # another one in each batch, and the same in the pair

        def change(model: Model) -> Tensor:
            outputs = model(ids, seed=seed) if known is None else known.outputs_of(model, self.model)
            change = largest_change(model(changed, seed=seed), outputs)
            return change.masked_fill(~compared.to(model.device), 0.0)  # a hidden output may be nan

        verdict = self.judge(change, exact=self.exact)
        if verdict.passed:
            return verdict, "", {}
        return verdict, *find_leak(verdict.model, ids, changed, compared, verdict.bound, seed)

    @torch.no_grad()
    def repeatable(self, text: Text) -> Iterator[Result]:
        """Two runs of one input agree, and so do a text alone and in a batch."""
        (n, length), bound, model = text.ids.shape, MAX_NOISE * self.scale, self.model
        where = "" if self.noise <= bound else f"two runs of the same input differ by {self.noise:.2g}"
        yield self.result("equal", length, Verdict(self.noise, bound, model), length, where)
        if self.stochastic or model.batch_size:
            return
        last = text.ids[-1:]
        change = lambda model: largest_change(text.outputs_of(model, self.model)[-1:], model(last))  # noqa: E731  (1, T)
        verdict, where, place = self.judge(change), "", None
        if not verdict.passed:
            query = int(change(verdict.model)[0].argmax())
            together = Pass(lambda: verdict.model(text.ids), query, length, row=n - 1, rows=n)
            alone = Pass(lambda: verdict.model(last), query, length)
            place = first_difference(verdict.model.module, together, alone, exact=False)
            where = f"a text alone and in a batch of {n} differ by {verdict.worst:.2g}{in_words(place)}"
        yield self.result("equal", length, verdict, length, where, place=place or "")

    def text(self, n: int, length: int) -> Text:
        """New texts, and a pass over them."""
        ids = self.texts.draw(n, length)
        return Text(ids, self.model(ids))

    @torch.no_grad()
    def ways(self, text: Text, names: Sequence[str]) -> Iterator[Result | str]:
        """Every other way to compute the outputs gives the same; a note for a way that raises an exception.

        The full pass is the same for all, since another one might reset a cache that a way leaves behind.
        """
        for name in names:

            def change(model: Model, name: str = name) -> Tensor:
                other = model.by_way(name, text.ids)  # (B, T, V)
                outputs = text.outputs[..., : other.shape[-1]]
                missing = other.isnan().all(-1) & ~outputs.isnan().all(-1)
                return largest_change(other, outputs).masked_fill(missing, 0.0)

            try:
                verdict = self.judge(change, in_float64=False)  # random weights have these ways in float64
            except ModelError as error:
                if self.model.exact:  # a model of ours can do all that it names
                    raise
                yield f"{name} is left out, where {error}"
                continue
            where, leak = "", {}
            if not verdict.passed:
                leak = {"query": first_true(~(change(verdict.model) <= verdict.bound))[1]}
                where = f"{name}: output {leak['query']} differs by {verdict.worst:.2g}"
            yield self.result("equal", text.ids.shape[1], verdict, text.ids.numel(), where, **leak)

    @torch.no_grad()
    def lengths(
        self, text: Text, lengths: Sequence[int], in_time: Callable[[], bool] = lambda: True
    ) -> Iterator[Result]:
        """The outputs of a text of the full context do not change when it is cut off at any length.

        The first row is tested. Float64 is compared at the length of the largest difference only.
        """
        if self.stochastic or self.model.batch_size:
            return
        ids, longest = text.ids[:1], self.model.context_length
        visible, tested = self.model.visible(longest), 0
        largest: tuple[int, Tensor] | None = None  # length and changes (length,)

        def change(model: Model, length: int) -> Tensor:
            outputs = text.outputs[:1] if model is self.model else model(ids)
            change = largest_change(model(ids[:, :length]), outputs[:, :length])[0].cpu()
            return change.masked_fill(visible[:length, length:].any(-1), 0.0)

        for length in lengths:
            if not torch.equal(visible[:length, :length], self.model.visible(length)):
                continue
            if not in_time():
                break
            with contextlib.suppress(ModelError):  # such as statistics of a single number
                changes, tested = change(self.model, length), tested + length
                if largest is None or not changes.max() <= largest[1].max():
                    largest = length, changes
                if changes.any() and not changes.max() <= self.rounding.bound:
                    break
        if largest is None:
            return
        suspect, changes = largest
        verdict = self.judge(lambda model: changes if model is self.model else change(model, suspect))
        place, where, leak = "", "", {}
        verdict = verdict._replace(undecided="")  # the future check decides about small leaks
        if not verdict.passed:
            model, query = verdict.model, int(change(verdict.model, suspect).argmax())
            passes = [Pass(functools.partial(model, x), query, x.shape[1]) for x in (ids, ids[:, :suspect])]
            place = first_difference(model.module, *passes, exact=False)
            where = f"output {query} changes if the text ends after {suspect} instead of {longest} tokens"
            where, leak = where + in_words(place), {"query": query, "key": suspect, "place": place or ""}
        yield self.result("equal", suspect if where else longest, verdict, tested, where, **leak)

    def gradient(self, length: int, n_queries: int) -> tuple[Result, Tensor, Tensor] | None:
        """Hidden inputs have exactly no gradient, which replaced tokens cannot show; also queries (n,) and gradients.

        The gradients are (n, T). None for a function, and for a module without `nn.Embedding` or backward pass.
        """
        ids, model, bound = self.texts.draw(1, length)[0], self.model, 0.0
        queries = torch.tensor(sorted(positions_in_order(length, self.generator)[:n_queries]))
        hidden = ~model.visible(length)[queries]
        try:
            size = gradients(model, ids, queries, self._batch_size)
        except Exception:  # such as Reformer's backward in evaluation mode
            return None
        if not size.any():
            return None
        if not model.exact and size.masked_fill(~hidden, 0.0).any():
            # A Fourier transform or a subtracted maximum has gradients of rounding size, which float64 tells apart.
            if self.rounding.twin is not None:
                model = self.rounding.twin
                size = gradients(model, ids, queries, self._batch_size)
            if model.precision == "64-true":
                bound = RELATIVE_GRADIENT * size.max().item()
        worst = size.masked_fill(~hidden, 0.0).nan_to_num(nan=torch.inf).max().item()
        where, leak = "", {}
        if first := first_true(hidden & ~(size <= bound)):
            leak = {"query": int(queries[first[0]]), "key": first[1]}
            where = f"output {leak['query']} has a gradient with respect to input {leak['key']}"
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


def positions_in_order(length: int, generator: torch.Generator) -> list[int]:
    """0 to `length` - 1, each once: in turn one where implementations change (ends, edges of blocks), and a random one.

    The edges of large blocks are first.
    """
    edges = [edge + side for size in (128, 64, 16) for edge in range(size, length, size) for side in (-1, 0)]
    inexact = [2 ** (bits + 1) for bits in (7, 10)]  # bf16 and float16 round the next position to this one
    edges = [*inexact, length // 2, length - 2, 0, length // 4, length - 1, 1, *edges]
    random = torch.randperm(length, generator=generator).tolist()
    pairs = itertools.zip_longest(dict.fromkeys(p for p in edges if 0 <= p < length), random)
    return list(dict.fromkeys(p for pair in pairs for p in pair if p is not None))


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
        sums = sum(g.abs().amax(-1) for g in grads if g is not None) + outputs.new_zeros(batch.shape)
        rows.append(sums[: len(part)].detach().cpu().double())
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
