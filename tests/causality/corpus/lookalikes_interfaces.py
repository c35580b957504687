"""Correct models with unusual interfaces: their outputs, their submodules, what they need, functions.

B batch, T positions, C width, V vocabulary.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, Attention, Backbone, masked_softmax, steps
from tests.causality.corpus.entry import VOCAB_SIZE, correct


class HashedNgrams(nn.Module):
    """Embeddings of each token and of hashes of the two and three tokens up to it."""

    def __init__(self):
        super().__init__()
        self.single, self.hashed = nn.Embedding(VOCAB_SIZE, DIM), nn.Embedding(101, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        before, second = (F.pad(ids, (shift, 0))[:, : ids.shape[1]] for shift in (1, 2))
        pairs = (ids * 31 + before) % 101
        return self.single(ids) + self.hashed(pairs) + self.hashed((pairs * 37 + second) % 101)


@correct("look-alike: interface")
def hashed_ngrams_of_the_past():
    """Hashes of the last two and three tokens are embedded, as byte-level models do."""
    return Backbone(embed=HashedNgrams())


class Wrapped(nn.Module):
    """The backbone, with its logits in another container."""

    def __init__(self, container):
        super().__init__()
        self.model, self.container = Backbone(), container

    def forward(self, input_ids: Tensor):
        return self.container(self.model(input_ids))


@correct("look-alike: interface")
def returns_a_dictionary():
    """The output is a dictionary with the logits and the loss, which is None."""
    return Wrapped(lambda logits: {"loss": None, "logits": logits})


@correct("look-alike: interface")
def returns_a_tuple():
    """The output is a tuple of logits and None, as nanoGPT's logits and loss."""
    return Wrapped(lambda logits: (logits, None))


@correct("look-alike: interface")
def returns_an_object():
    """The output has the logits as an attribute, and no cache."""
    return Wrapped(lambda logits: SimpleNamespace(logits=logits))


@correct("look-alike: interface")
def writes_into_its_embeddings():
    """The output of the embedding is changed in place."""

    class InPlace(Backbone):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x += self.positions(x)
            x[:, 0] = 0.0
            x[:, 0] += self.embed(ids[:, 0])
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return InPlace()


@correct("look-alike: interface")
def submodules_with_several_tensors():
    """Submodules take tensors by name and return tuples, which hooks must pass on."""

    class WithArguments(Attention):
        def forward(self, x: Tensor, *, mask: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = self.heads(x)
            return self.merge(masked_softmax(self.scores(q, k) * scale, mask) @ v), mask

    class Caller(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = WithArguments()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, mask=self.inner.visible(x), scale=x.new_tensor(0.5))[0]

    return Backbone(attn=Caller())


@correct("look-alike: interface")
def positions_embedded_by_a_shared_leaf():
    """Position ids of one row are embedded by nn.Embedding and broadcast over the rows."""

    class Embedded(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(steps(input))

    return Backbone(positions=Embedded(64, DIM))


@correct("look-alike: interface")
def needs_contiguous_ids():
    """The ids are viewed as one flat vector, which fails for a slice of a larger tensor."""

    class Flat(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.view(-1)).view(*input.shape, -1)

    return Backbone(embed=Flat(VOCAB_SIZE, DIM))


@correct("look-alike: interface")
def compiled_module():
    """A module that torch.compile has wrapped."""
    return torch.compile(Backbone(), backend="eager", dynamic=True)


@correct("look-alike: interface")
def without_gradients():
    """The forward pass runs under no_grad, so that there is nothing to differentiate."""

    class NoGradients(Backbone):
        @torch.no_grad()
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids)

    return NoGradients()


@correct("look-alike: interface")
def plain_function():
    """A function without parameters: logits are cumulative counts of the tokens so far."""

    def call(ids: Tensor) -> Tensor:
        return F.one_hot(ids, VOCAB_SIZE).float().cumsum(1).log1p()

    return call


@correct("look-alike: interface")
def function_around_a_model():
    """A closure over a model, in evaluation mode."""
    model = Backbone().eval()
    return lambda ids: model(ids)


@correct("look-alike: interface")
def tied_weights():
    """The head is the embedding matrix."""
    embed, head = nn.Embedding(VOCAB_SIZE, DIM), nn.Linear(DIM, VOCAB_SIZE, bias=False)
    head.weight = embed.weight
    return Backbone(embed=embed, head=head)
