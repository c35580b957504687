"""Random texts of several kinds: a leak may need a certain token, a repeated one, or one that is rare.

N rows, T positions, V vocabulary.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SPECIAL_SHARE = 0.25  # of the tokens in a text with special ones


@dataclass
class Texts:
    """Draws texts; each row is of another kind than the one before.

    Attributes:
        special: ids that have a meaning of their own, such as end-of-text. The first and last ids of the vocabulary
            are added, because most tokenizers keep them there.
        tokens: a text (N,) whose passages are another kind; None: random texts only.
    """

    vocab_size: int
    special: Sequence[int] = ()
    tokens: Tensor | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    _drawn: int = 0
    _swept: int = 0
    _turn: int = 0

    def draw(self, n: int, length: int) -> Tensor:
        """int64 (N, T)."""
        kinds = (self._uniform, self._with_special, self._sweep, self._runs, self._two_kinds)
        if self.tokens is not None:
            kinds = (self._passage, *kinds)
        rows = [kinds[(self._drawn + i) % len(kinds)](length) for i in range(n)]
        self._drawn += n + (n % len(kinds) == 0)  # so that another row of the next batch has each kind
        return torch.stack(rows)

    def other(self, ids: Tensor) -> Tensor:
        """Texts (N, T) that differ from `ids` at every position.

        Half of the rows repeat one special token, each in turn, and every other time one of `special`.
        """
        drawn, tokens = self.draw(*ids.shape), self._special_ids()
        if given := [i for i in self.special if i in tokens]:
            tokens = [i for pair in zip(itertools.cycle(given), tokens) for i in pair]
        for row in range(self._drawn % 2, len(ids), 2):
            drawn[row] = tokens[self._turn % len(tokens)]
            self._turn += 1
        return torch.where(drawn == ids, (ids + 1 + self._drawn % (self.vocab_size - 1)) % self.vocab_size, drawn)

    def _uniform(self, length: int) -> Tensor:
        return torch.randint(self.vocab_size, (length,), generator=self.generator)

    def _with_special(self, length: int) -> Tensor:
        special = torch.tensor(self._special_ids())
        special = special[torch.randint(len(special), (length,), generator=self.generator)]
        chosen = torch.rand(length, generator=self.generator) < SPECIAL_SHARE
        return torch.where(chosen, special, self._uniform(length))

    def _sweep(self, length: int) -> Tensor:
        """Consecutive ids in random order: many rows contain the whole vocabulary."""
        self._swept += length
        ids = torch.arange(self._swept - length, self._swept) % self.vocab_size
        return ids[torch.randperm(length, generator=self.generator)]

    def _runs(self, length: int) -> Tensor:
        """Every token is repeated once to four times."""
        repeats = torch.randint(1, 5, (length,), generator=self.generator)
        return self._uniform(length).repeat_interleave(repeats)[:length]

    def _two_kinds(self, length: int) -> Tensor:
        return self._uniform(2)[torch.randint(2, (length,), generator=self.generator)]

    def _passage(self, length: int) -> Tensor:
        assert self.tokens is not None
        start = int(torch.randint(len(self.tokens), (), generator=self.generator))
        return self.tokens.roll(-start)[:length] if length <= len(self.tokens) else self._uniform(length)

    def _special_ids(self) -> list[int]:
        ends = [*range(4), *range(self.vocab_size - 2, self.vocab_size)]
        return sorted({i for i in (*self.special, *ends) if 0 <= i < self.vocab_size})
