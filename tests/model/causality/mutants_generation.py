"""Mutants of generation alone: every pass of the model over a given text is right."""

import torch

from tests.model.causality.mutants import mutant
from tril.model.attention import MultiHeadAttention
from tril.model.generation.generate import Rows
from tril.model.generation.sampling import Choice


@mutant(
    "generation",
    where={"generation": "greedy with a cache, context length 24: other logits in row . at step [1-9]"},
    window=5,
)
def window_one_too_large_with_a_cache_and_padding(patch):
    original = MultiHeadAttention.forward

    def changed(self, query, *rest, mask=None, cache=None, **options):
        wrong = mask is not None and cache is not None and type(cache.start) is int and cache.start > 0
        self.window += wrong
        try:
            return original(self, query, *rest, mask=mask, cache=cache, **options)
        finally:
            self.window -= wrong

    patch.setattr(MultiHeadAttention, "forward", changed)


@mutant(
    "generation", where={"generation": "greedy without a cache, context length 24: other logits in row . at step 1"}
)
def newest_token_lost_without_a_cache(patch):
    """A row that is longer than the context is cut one token too early."""
    original = Rows._make_room

    def changed(self):
        if self.cache is None:
            self.ids = self.ids.roll(1, 1)
        original(self)

    patch.setattr(Rows, "_make_room", changed)


@mutant("generation", where={"generation": "greedy with a cache, context length 24: other logits in row 3 at step 1"})
def older_half_kept(patch):
    original = Rows._make_room

    def changed(self):
        half = self.limit // 2
        for row, hidden in enumerate(self.padding):
            if self.length - hidden > self.limit:
                self.ids[row, self.length - half : self.length] = self.ids[row, hidden : hidden + half].clone()
        original(self)

    patch.setattr(Rows, "_make_room", changed)


def constant_step(patch, changed):
    """Passes the step of constant shape through `changed(step)`."""
    original = Rows._compiled

    def patched(self, start, choice):
        step, self.step = self.step, changed(self.step)
        try:
            return original(self, start, choice)
        finally:
            self.step = step

    patch.setattr(Rows, "_compiled", patched)


@mutant(
    "generation", where={"generation": "greedy in steps of constant shape, context length 24: other logits in row ."}
)
def one_column_ahead_in_steps_of_constant_shape(patch):
    def changed(step):
        def ahead(model, cache, ids, position, *options):
            return step(model, cache, ids, (position + 1).clamp(max=cache.capacity - 1), *options)

        return ahead

    constant_step(patch, changed)


@mutant(
    "generation", where={"generation": "greedy in steps of constant shape, context length 24: other logits in row ."}
)
def padding_forgotten_in_steps_of_constant_shape(patch):
    def changed(step):
        return lambda model, cache, ids, position, shift, *options: step(model, cache, ids, position, None, *options)

    constant_step(patch, changed)


@mutant(
    "generation", where={"generation": "sampled with a cache, context length 24: another token in row . at step [1-9]"}
)
def random_numbers_drawn_once(patch):
    original = Choice.draw

    def changed(self, generator):
        original(self, torch.Generator().manual_seed(generator.initial_seed()))

    patch.setattr(Choice, "draw", changed)
