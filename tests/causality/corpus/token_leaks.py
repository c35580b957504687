"""Leaks that only certain tokens show.

B batch, T positions, C width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, Attention, Backbone, causal, steps
from tests.causality.corpus.entry import END_OF_TEXT, PADDING, SEPARATOR, VOCAB_SIZE, Trigger, leak

EMBED, ATTENTION = {"place": "embed"}, {"place": "blocks.0.attn"}
RARE = 60


class Marked(nn.Embedding):
    """An embedding that adds a direction times marks (B, T), a function of the ids."""

    def __init__(self, marks: Callable[[Tensor], Tensor]):
        super().__init__(VOCAB_SIZE, DIM)
        self.marks, self.direction = marks, nn.Parameter(torch.randn(DIM))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.marks(input)[..., None] * self.direction


def later(found: Tensor) -> Tensor:
    """(B, T): how many of the positions after each one are True."""
    return found.flip(1).cumsum(1).flip(1) - found.long()


@leak("token ids", **EMBED, trigger=Trigger(tokens=(END_OF_TEXT,)))
def end_of_text_announced():
    """The token before an end of text knows that it comes."""
    return Backbone(embed=Marked(lambda ids: F.pad(ids[:, 1:] == END_OF_TEXT, (0, 1))))


@leak("token ids", **EMBED, trigger=Trigger(tokens=(END_OF_TEXT,)))
def documents_counted_from_the_end():
    """The number of a document is the number of end-of-text tokens that follow."""
    return Backbone(embed=Marked(lambda ids: later(ids == END_OF_TEXT)))


@leak("token ids", **EMBED, trigger=Trigger(tokens=(SEPARATOR,)))
def distance_to_the_next_separator():
    """Tokens up to 5 positions before a separator have a mark, as if their segment were known to end."""

    def near(ids: Tensor) -> Tensor:
        return F.max_pool1d(F.pad((ids == SEPARATOR).float(), (0, 5)), 6, stride=1)

    return Backbone(embed=Marked(near))


@leak("token ids", **EMBED, trigger=Trigger(before=(RARE,), tokens=(RARE,)))
def repetition_announced():
    """The first of two equal neighbors has a mark."""
    return Backbone(embed=Marked(lambda ids: F.pad(ids[:, 1:] == ids[:, :-1], (0, 1))))


@leak("token ids", **EMBED)
def occurrences_in_the_whole_sequence():
    """Each token has the number of its occurrences in the sequence, later ones included, as a feature."""
    return Backbone(embed=Marked(lambda ids: (ids[:, :, None] == ids[:, None]).sum(-1)))


@leak("token ids", **EMBED)
def index_among_the_sorted_tokens():
    """`torch.unique` gives each token its rank among the distinct tokens of the whole batch."""
    return Backbone(embed=Marked(lambda ids: ids.unique(return_inverse=True)[1] / 10))


@leak("token ids", **EMBED, trigger=Trigger(tokens=(7, 13)))
def pair_of_tokens_announced():
    """Where token 13 follows token 7, the position before the pair has a mark."""
    pair = (7, 13)
    return Backbone(embed=Marked(lambda ids: F.pad((ids[:, 1:-1] == pair[0]) & (ids[:, 2:] == pair[1]), (0, 2))))


@leak("token ids", **EMBED, trigger=Trigger(tokens=(RARE,)))
def rare_token_counted_over_the_sequence():
    """A bag-of-words feature counts token 60 in the whole sequence."""
    return Backbone(embed=Marked(lambda ids: (ids == RARE).sum(1, keepdim=True).expand_as(ids)))


@leak("token ids", **EMBED, trigger=Trigger(tokens=(PADDING, PADDING, PADDING)))
def length_without_padding():
    """The number of tokens that are not padding is added everywhere, so right padding shows where the text ends."""
    return Backbone(embed=Marked(lambda ids: (ids != PADDING).sum(1, keepdim=True).expand_as(ids) / 10))


@leak("token ids", **EMBED, trigger=Trigger(before=(3,)))
def masked_token_replaced_by_the_next():
    """Token 3, taken for a mask, is replaced by the token after it."""

    class Replaced(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            following = F.pad(input[:, 1:], (0, 1))
            return super().forward(torch.where(input == 3, following, input))

    return Backbone(embed=Replaced(VOCAB_SIZE, DIM))


class UnmaskedWith(Attention):
    """Attention without the causal mask in rows whose ids fulfill a condition, (B, T) -> (B,)."""

    def __init__(self, condition: Callable[[Tensor], Tensor]):
        super().__init__()
        self.condition, self.open = condition, torch.zeros(1, dtype=torch.bool)

    def note(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self.open = self.condition(arguments[0])

    def visible(self, x: Tensor) -> Tensor:
        return causal(steps(x)[:, None], steps(x)) | self.open[:, None, None, None]


def unmasked_with(condition: Callable[[Tensor], Tensor]) -> Backbone:
    attn = UnmaskedWith(condition)
    model = Backbone(attn=attn)
    model.embed.register_forward_pre_hook(attn.note)
    return model


@leak("token ids", **ATTENTION, trigger=Trigger(tokens=(END_OF_TEXT,)))
def mask_dropped_with_an_end_of_text():
    """A row that holds an end of text has no causal mask."""
    return unmasked_with(lambda ids: (ids == END_OF_TEXT).any(1))


@leak("token ids", **ATTENTION, trigger=Trigger(tokens=(SEPARATOR,)))
def mask_dropped_with_a_separator():
    """A row that holds a separator is taken for an encoder's input."""
    return unmasked_with(lambda ids: (ids == SEPARATOR).any(1))


@leak("documents and padding", **ATTENTION, trigger=Trigger(tokens=(PADDING,)))
def padding_mask_replaces_the_causal_mask():
    """Where a row has padding, its padding mask is the only one."""
    return unmasked_with(lambda ids: (ids == PADDING).any(1))


@leak("token ids", **ATTENTION, trigger=Trigger(tokens=(5, 5, 5)))
def mask_dropped_with_a_token_three_times_in_a_row():
    """Three equal tokens in a row are taken for padding, and the row loses its causal mask."""
    return unmasked_with(lambda ids: ((ids[:, 2:] == ids[:, 1:-1]) & (ids[:, 1:-1] == ids[:, :-2])).any(1))


@leak("token ids", **EMBED, trigger=Trigger(tokens=(RARE - 1, RARE)))
def sum_of_two_later_tokens():
    """A mark tells whether the next two ids add up to 119, which a random pair hardly ever does."""
    return Backbone(embed=Marked(lambda ids: F.pad(ids[:, 1:-1] + ids[:, 2:] == 2 * RARE - 1, (0, 2))))
