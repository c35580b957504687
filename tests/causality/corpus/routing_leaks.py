"""Leaks of mixtures of experts and of depths: whether a token is processed depends on the tokens after it.

B batch, T positions, C width, E experts.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, MLP, Backbone
from tests.causality.corpus.entry import leak

FFN = {"place": "blocks.0.mlp"}


class Experts(nn.Module):
    """A mixture of experts.

    Args:
        choose: router scores (B, T, E) -> weight of each expert at each token, (B, T, E).
    """

    def __init__(self, choose: Callable[[Tensor], Tensor], n_experts: int = 4):
        super().__init__()
        self.router, self.choose = nn.Linear(DIM, n_experts, bias=False), choose
        self.experts = nn.ModuleList(MLP() for _ in range(n_experts))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], -1)  # (B, T, C, E)
        return (outputs * self.choose(4 * self.router(x))[:, :, None]).sum(-1)


def best(scores: Tensor, share: float, dim: int = 1) -> Tensor:
    """Mask of the largest `share` of the scores along a dimension."""
    number = max(1, round(share * scores.shape[dim]))
    chosen = scores.topk(number, dim).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(dim, chosen, True)


def top_expert(scores: Tensor) -> Tensor:
    """(B, T, E): 1 at the best expert of each token."""
    return best(scores, 0, dim=-1).to(scores.dtype)


@leak("expert-choice routing", **FFN)
def experts_that_choose_their_tokens():
    """Each expert takes the quarter of the sequence that scores best with it."""
    return Backbone(mlp=Experts(lambda scores: scores.softmax(-1) * best(scores, 0.25)))


@leak("expert-choice routing", **FFN)
def gates_normalized_over_the_tokens():
    """The gate of each expert is a softmax over the positions."""
    return Backbone(mlp=Experts(lambda scores: scores.softmax(1) * scores.shape[1] / 4))


@leak("expert-choice routing", **FFN)
def capacity_by_priority():
    """Tokens choose an expert, and an expert that is full drops those with the lowest scores, wherever they stand."""

    def choose(scores: Tensor) -> Tensor:
        chosen = top_expert(scores)
        return chosen * best(scores.masked_fill(chosen == 0, -torch.inf), 0.2)

    return Backbone(mlp=Experts(choose))


@leak("expert-choice routing", **FFN)
def capacity_counted_from_the_end():
    """An expert takes at most four tokens, counted from the last one backwards."""

    def choose(scores: Tensor) -> Tensor:
        chosen = top_expert(scores)
        return chosen * (chosen.flip(1).cumsum(1).flip(1) <= 4)

    return Backbone(mlp=Experts(choose))


@leak("expert-choice routing", **FFN)
def routing_balanced_by_sinkhorn():
    """The scores are balanced between experts over the whole sequence before each token chooses."""

    def choose(scores: Tensor) -> Tensor:
        balanced = scores.exp()
        for _ in range(3):
            balanced = balanced / balanced.sum(1, keepdim=True)
            balanced = balanced / balanced.sum(-1, keepdim=True)
        return balanced

    return Backbone(mlp=Experts(choose))


@leak("expert-choice routing", **FFN)
def scores_lowered_by_the_load_of_the_sequence():
    """The load of each expert over all tokens is taken off its scores before the choice."""
    return Backbone(mlp=Experts(lambda scores: (scores - 4 * top_expert(scores).mean(1, keepdim=True)).softmax(-1)))


class SoftExperts(nn.Module):
    """Experts process slots, each of which is a mixture of all tokens (soft mixture of experts)."""

    def __init__(self):
        super().__init__()
        self.slots, self.experts = nn.Linear(DIM, 4, bias=False), nn.ModuleList(MLP() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.slots(x)  # (B, T, E)
        slots = scores.softmax(1).mT @ x  # (B, E, C)
        outputs = torch.stack([expert(slots[:, i]) for i, expert in enumerate(self.experts)], 1)  # (B, E, C)
        return scores.softmax(-1) @ outputs


@leak("expert-choice routing", **FFN)
def slots_mixed_from_all_tokens():
    """The input of each expert is a weighted mean of all tokens of the sequence."""
    return Backbone(mlp=SoftExperts())


class ChosenDepth(nn.Module):
    """The MLP runs only on the tokens that `choose` selects by their scores (B, T, 1)."""

    def __init__(self, choose: Callable[[Tensor], Tensor]):
        super().__init__()
        self.score, self.mlp, self.choose = nn.Linear(DIM, 1), MLP(), choose

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.choose(self.score(x))


@leak("expert-choice routing", **FFN)
def mixture_of_depths():
    """Half of the tokens pass the MLP: those with the best scores in the sequence."""
    return Backbone(mlp=ChosenDepth(lambda scores: best(scores, 0.5)))


@leak("expert-choice routing", **FFN)
def tokens_above_the_mean_score():
    """A token passes the MLP if its score is above the mean of the sequence."""
    return Backbone(mlp=ChosenDepth(lambda scores: scores > scores.mean(1, keepdim=True)))
