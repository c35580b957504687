"""A model in one state of its weights, mode and precision: the claims about it, and how they are judged.

The claims are about random texts of several kinds: a leak may need a certain token, a repeated one or a rare one.

B batch, N rows of texts, T positions, V vocabulary.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tril.model.causality.claims import ROUNDING64, Claim, Result, largest_change, locate, once
from tril.model.causality.model import FIRST_SEED, Model, ModelError, one_line

EPS, LOW_EPS = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
COARSE, LOW_COARSE = 1e-3, 0.1  # of the largest output: two computations of one function never differ by more
UNITS, LOW_UNITS = 64, 2  # in the last place of the largest output: what may be rounding, without float64
SLACK, MAX_NOISE = 4, 1e-4  # times the difference of two runs; of the largest output, where they are not repeatable
BATCH_SIZES = (2, 5, 1, 8, 3, 16)  # taken in turn; a leak may depend on the batch size
MAX_OUTPUTS = 1 << 25  # elements in memory at once: 0.13 GB of float32
SPECIAL_SHARE = 0.25  # of the tokens in a text with special ones


class Texts:
    """Draws texts; each row is of another kind than the one before.

    Args:
        special: ids that have a meaning of their own, such as end-of-text. The first and last ids of the vocabulary
            are as frequent as these, because most tokenizers keep them there.
        tokens: a text (N,) whose passages are another kind; None: random texts only.
    """

    def __init__(
        self, vocab_size: int, special: Sequence[int] = (), tokens: Tensor | None = None, *, seed: int = 0
    ) -> None:
        self.vocab_size, self.tokens = vocab_size, tokens
        self.generator = torch.Generator().manual_seed(seed)
        given = [i for i in special if 0 <= i < vocab_size]
        ends = [*range(min(4, vocab_size)), vocab_size - 2, vocab_size - 1]
        self.special = [i for pair in zip(itertools.cycle(given or ends), ends) for i in pair]
        self.repeated = itertools.cycle(self.special)
        kinds = [self.uniform, self.with_special, self.of_two_ids]
        self.kinds = itertools.cycle(kinds if tokens is None else [self.passage, *kinds])
        self.n_drawn = 0

    def draw(self, n: int, length: int) -> Tensor:
        """int64 (N, T)."""
        self.n_drawn += n
        return torch.stack([next(self.kinds)(length) for _ in range(n)])

    def other(self, ids: Tensor) -> Tensor:
        """Texts (N, T) that differ from `ids` at every position; half of the rows repeat one special token."""
        drawn = self.draw(*ids.shape)
        for row in range(self.n_drawn % 2, len(ids), 2):
            drawn[row] = next(self.repeated)
        return torch.where(drawn == ids, (ids + 1 + self.n_drawn % (self.vocab_size - 1)) % self.vocab_size, drawn)

    def uniform(self, length: int) -> Tensor:
        return self.below(self.vocab_size, length)

    def with_special(self, length: int) -> Tensor:
        chosen = torch.rand(length, generator=self.generator) < SPECIAL_SHARE
        special = torch.tensor(self.special)[self.below(len(self.special), length)]
        return torch.where(chosen, special, self.uniform(length))

    def of_two_ids(self, length: int) -> Tensor:
        return self.below(self.vocab_size, 2)[self.below(2, length)]

    def passage(self, length: int) -> Tensor:
        assert self.tokens is not None
        return self.tokens[(self.below(len(self.tokens), 1) + torch.arange(length)) % len(self.tokens)]

    def below(self, limit: int, n: int) -> Tensor:
        """(n,) random integers below a limit."""
        return torch.randint(limit, (n,), generator=self.generator)


class State:
    """A model in one state of its weights, mode and precision, and the claims about it.

    Args:
        exact: hidden tokens have not changed the rounding yet. Those of a model that is `exact` never do.
        seed: of the positions.

    Raises:
        ModelError: the model raises an exception, or its outputs are not finite.
    """

    def __init__(self, name: str, model: Model, texts: Texts, *, exact: bool = False, seed: int = 0) -> None:
        self.name, self.model, self.texts, self.exact = name, model, texts, exact
        self.generator = torch.Generator().manual_seed(seed)
        self.turn, self.left_out = 0, ""
        self.ids = texts.draw(model.batch_size or 2, model.context_length)
        self.outputs, self.scale = model.measure(self.ids)

    @functools.cached_property
    @torch.no_grad()
    def noise(self) -> float:
        """Largest difference of two runs of the same input."""
        return largest_change(self.model(self.ids), self.outputs).max().item()

    @functools.cached_property
    @torch.no_grad()
    def is_random(self) -> bool:
        """Whether outputs depend on random numbers, as with dropout: a pass of another shape draws other ones."""
        change = largest_change(self.model(self.ids, seed=FIRST_SEED + 1), self.outputs)
        return change.max().item() > SLACK * self.noise

    @functools.cached_property
    @torch.no_grad()
    def mixes_rows(self) -> bool:
        """Whether other rows change the rounding of a text, as where experts compute all tokens together."""
        n, length = self.model.batch_size or 4, self.ids.shape[1]
        first, *others = (self.model(torch.cat([self.ids[:1], self.texts.draw(n, length)[1:]]))[0] for _ in range(8))
        return any(not torch.equal(first, other) for other in others)

    @functools.cached_property
    def twin(self) -> "tuple[Model | None, str]":
        """The same function in float64, where rounding disappears and a leak does not; else why there is none."""
        try:
            twin = self.model.in_float64()
            twin.measure(self.ids)
        except Exception as error:  # code of other projects may raise anything
            return None, one_line(error.__cause__ or error)
        return twin, ""

    def bound(self, claim: Claim) -> float:
        """How far the outputs of a claim may differ.

        Hidden tokens change nothing in an exact model, and at most a few units in the last place where they have
        changed nothing yet; in a low precision, only in models whose rows do so. Any two computations differ by the
        rounding of float64, or in another precision by the tolerance; and by as much as two runs.
        """
        model, is_hidden = self.model, claim.visible is not None
        if is_hidden and model.exact:
            share = 0.0
        elif model.precision == "64-true":
            share = ROUNDING64
        elif is_hidden and self.exact:
            share = LOW_UNITS * LOW_EPS * self.mixes_rows if model.is_low else UNITS * EPS
        else:
            coarse = LOW_COARSE if model.is_low else COARSE
            share = coarse if model.tolerance is None else min(model.tolerance, coarse)
        return max(share * self.scale, SLACK * self.noise)

    def judge(self, claims: Iterable[Claim], in_time: Callable[[], bool] = lambda: True) -> Result | None:
        """One result for claims of one kind, up to the first that fails or while there is time; None without claims.

        A claim that the model cannot compute is left out, such as one about a length that it does not take.
        """
        worst: tuple[Claim, Tensor, float, float] | None = None
        tested, self.left_out = 0, ""
        for claim in claims:
            if not in_time():
                break
            try:
                change = claim.change(self.model)
            except ModelError as error:
                if self.model.exact:  # a model of ours can do all that it names
                    raise
                self.left_out = self.left_out or str(error)
                continue
            tested += change.numel() if claim.compared is None else int(claim.compared.sum())
            size = change.max().item()
            bound = self.bound(claim) if size else 0.0
            if worst is None or not size <= worst[2]:
                worst = claim, change, size, bound
            if not size <= bound:
                break
        return None if worst is None else self.decide(*worst, tested)

    def decide(self, claim: Claim, change: Tensor, size: float, bound: float, tested: int) -> Result:
        """The result of the claim with the largest difference; within the bound, float64 decides if it is rounding."""
        model, undecided = self.model, ""
        if 0 < size <= bound and model.tolerance is None and model.precision != "64-true":
            twin, reason = self.twin
            if twin is None:
                bound = min(bound, UNITS * (LOW_EPS if model.is_low else EPS) * self.scale)
                undecided = f"outputs differ by {size:.1g}, which may be rounding: no float64 twin ({reason})"
            elif not (in_twin := claim.change(twin)).max().item() <= ROUNDING64 * self.scale:
                model, change, bound, size = twin, in_twin, ROUNDING64 * self.scale, in_twin.max().item()
        result = Result(claim.check, self.name, change.shape[1], size, bound, tested)
        if size <= bound:
            return replace(result, undecided=undecided)
        where, leak = locate(model, claim, change, bound)
        return replace(result, where=where, **leak)

    # Claims
    def fitting(self, length: int) -> int:
        """Rows that fit into memory, and on a CPU into its caches."""
        tokens = 4096 if self.model.device.type == "cpu" else 1 << 17
        return max(1, min(tokens // length, MAX_OUTPUTS // (length * self.model.n_logits)))

    def future(self, length: int, rows: int, check: str = "future") -> Iterator[Claim]:
        """`replaced` for fewer positions than rows, at least one."""
        return self.replaced(
            torch.tensor(positions_in_order(length, self.generator)[: max(1, rows - 1)]), length, check
        )

    def replaced(self, queries: Tensor, length: int, check: str = "future") -> Iterator[Claim]:
        """Every token that a query does not see is replaced, one query in each row; and all of one row of a batch."""
        visible = self.model.visible(length)
        queries = queries[torch.randperm(len(queries), generator=self.generator)]  # rows may leak in any direction
        while len(queries):
            self.turn += 1
            limit = min(BATCH_SIZES[self.turn % len(BATCH_SIZES)], len(queries) + 1, self.fitting(length))
            size = self.model.batch_size or limit
            chosen, queries = queries[: max(1, size - 1)], queries[max(1, size - 1) :]
            ids = self.texts.draw(size, length)
            row = (self.turn - 1) % size if size > 1 else None  # where the first query is for the second time
            yield self.hidden(ids, chosen.repeat(size)[:size].roll(self.turn), visible, row=row, check=check)

    def hidden(
        self,
        ids: Tensor,
        queries: Tensor,
        visible: Tensor,
        *,
        other: Tensor | None = None,
        row: int | None = None,
        check: str = "future",
    ) -> Claim:
        """The tokens that the query of each row (B,) does not see are replaced, with random numbers of its own.

        Args:
            other: what replaces them, (B, T); None: other texts.
            row: that is replaced as a whole.
        """
        kept, compared = visible[queries], ~(visible[None] & ~visible[queries][:, None]).any(-1)  # (B, T) each
        if row is not None:
            kept[row], compared[row] = False, False
        other = torch.where(kept, ids, self.texts.other(ids) if other is None else other)
        seed = self.texts.n_drawn
        return Claim(check, ids, once(ids, seed), other, compared, visible, seed=seed)

    def every_id(self, *, pairs: bool = False) -> Iterator[Claim]:
        """No id opens a leak: each is once before, at and behind the end of what an output sees.

        Args:
            pairs: each pair of ids is once at the end, and once behind it.
        """
        n, length = self.model.vocab_size, 3
        if self.model.context_length < length or self.model.batch_size:
            return
        draw = lambda size: torch.randperm(size, generator=self.generator)  # noqa: E731
        if pairs:
            (a, b), (c, d) = ((x // n, x % n) for x in (draw(n * n), draw(n * n)))
            query, ids, other = 0, torch.stack([a, b, c], 1), torch.stack([a, c, d], 1)  # (V * V, 3)
        else:
            query, (ids, other) = 1, (torch.stack([draw(n) for _ in range(length)], 1) for _ in range(2))  # (V, 3)
        other = torch.where(other == ids, (ids + 1) % n, other)
        visible, size = self.model.visible(length), min(512, self.fitting(length))
        if not visible[query].all():
            for rows, others in zip(ids.split(size), other.split(size), strict=True):
                yield self.hidden(rows, torch.full((len(rows),), query), visible, other=others)

    def repeatable(self) -> Result:
        """Two runs of one input agree, up to the noise of kernels that add in another order each time."""
        bound, length = MAX_NOISE * self.scale, self.ids.shape[1]
        where = "" if self.noise <= bound else f"two runs of the same input differ by {self.noise:.2g}"
        return Result("equal", self.name, length, self.noise, bound, length, where)

    def cut(self, ids: Tensor, lengths: Sequence[int]) -> Iterator[Claim]:
        """The last text, alone and cut off at each of these lengths, has the outputs that it has in a batch."""
        base, (n, length), visible = once(ids), ids.shape, self.model.visible(ids.shape[1])
        for end in lengths if not self.is_random else ():
            if torch.equal(visible[:end, :end], self.model.visible(end)):
                compared = ~visible[:, end:].any(-1).expand(ids.shape)
                says = f"differs between {n} texts of {length} tokens and the last one alone, of {end} tokens"
                yield Claim("equal", ids, base, ids[-(self.model.batch_size or 1) :, :end], compared, says=says)

    def computed(self, ids: Tensor, ways: Sequence[str] | None = None) -> Iterator[Claim]:
        """Texts have the same outputs in each of these ways; None: in each way of the model.

        The full pass is the same for all, since another one might reset a cache that a way leaves behind.
        """
        base = once(ids)
        for name in self.model.ways if ways is None else ways:
            other = lambda model, name=name: model(ids, way=model.ways[name])  # noqa: E731
            yield Claim("equal", ids, base, other, says=f"differs: {name}")


def positions_in_order(length: int, generator: torch.Generator) -> list[int]:
    """Each position once: in turn one where implementations change (ends, edges of blocks), and a random one.

    The edges of large blocks are first.
    """
    edges = [256, 2048, length // 2, length - 2, 0, length // 4, length - 1, 1]  # bf16 rounds 257 to 256
    edges += [edge + side for size in (128, 64, 16) for edge in range(size, length, size) for side in (-1, 0)]
    random = torch.randperm(length, generator=generator).tolist()
    pairs = itertools.zip_longest(dict.fromkeys(p for p in edges if 0 <= p < length), random)
    return list(dict.fromkeys(p for pair in pairs for p in pair if p is not None))
