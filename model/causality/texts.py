"""Random texts of several kinds: a leak may need a certain token, a repeated one, or one that is rare.

N rows, T positions, V vocabulary.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

KINDS = ("uniform", "special", "sweep", "runs", "two")
SPECIAL_SHARE = 0.25  # of the tokens in a text with special ones
SAMPLE = """for a vocabulary of bytes, whose leaks may need line ends, sentences or letters of several bytes.

def count(words):  # äöü, naïve, “quoted”, 漢字, 🙂
    return {word: words.count(word) for word in words}

The cat saw the dog. The dog saw the cat!\r\nWho saw whom?\t1,234.50 €\n
"""


class Texts:
    """Draws texts; each row is of another kind than the one before.

    Args:
        special: ids that have a meaning of their own, such as end-of-text. The first and last ids of the vocabulary
            are added, because most tokenizers keep them there.
        tokens: a text (N,) whose passages are another kind; None: random texts only.
    """

    def __init__(
        self, vocab_size: int, special: Sequence[int] = (), tokens: Tensor | None = None, *, seed: int = 0
    ) -> None:
        self.vocab_size, self.tokens = vocab_size, tokens
        self.generator = torch.Generator().manual_seed(seed)
        ends = [*range(4), *range(vocab_size - 2, vocab_size)]
        self.special = list(dict.fromkeys(i for i in (*special, *ends) if 0 <= i < vocab_size))
        self.repeated = itertools.cycle(self.special)
        self.kinds = itertools.cycle(KINDS if tokens is None else ("passage", *KINDS))
        self.n_drawn, self.n_swept = 0, 0

    def draw(self, n: int, length: int) -> Tensor:
        """int64 (N, T)."""
        rows = [self.row(next(self.kinds), length) for _ in range(n)]
        self.n_drawn += n
        if n % len(KINDS) == 0:
            next(self.kinds)  # so that another row of the next batch has each kind
        return torch.stack(rows)

    def other(self, ids: Tensor) -> Tensor:
        """Texts (N, T) that differ from `ids` at every position; half of the rows repeat one special token."""
        drawn = self.draw(*ids.shape)
        for row in range(self.n_drawn % 2, len(ids), 2):
            drawn[row] = next(self.repeated)
        return torch.where(drawn == ids, (ids + 1 + self.n_drawn % (self.vocab_size - 1)) % self.vocab_size, drawn)

    def row(self, kind: str, length: int) -> Tensor:
        """(T,)."""
        uniform = self.below(self.vocab_size, length)
        if kind == "special":
            chosen = torch.rand(length, generator=self.generator) < SPECIAL_SHARE
            return torch.where(chosen, torch.tensor(self.special)[self.below(len(self.special), length)], uniform)
        if kind == "sweep":  # consecutive ids in random order: many rows contain the whole vocabulary
            self.n_swept += length
            ids = torch.arange(self.n_swept - length, self.n_swept) % self.vocab_size
            return ids[torch.randperm(length, generator=self.generator)]
        if kind == "runs":  # every token is repeated once to four times
            return uniform.repeat_interleave(1 + self.below(4, length))[:length]
        if kind == "two":
            return self.below(self.vocab_size, 2)[self.below(2, length)]
        if kind == "passage" and self.tokens is not None:
            return self.tokens[(self.below(len(self.tokens), 1) + torch.arange(length)) % len(self.tokens)]
        return uniform

    def below(self, limit: int, n: int) -> Tensor:
        """(n,) random integers below a limit."""
        return torch.randint(limit, (n,), generator=self.generator)
