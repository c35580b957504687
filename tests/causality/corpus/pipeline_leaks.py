"""Training pipelines that leak: between tokens and batches, or between batches and losses.

B batch, T positions, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, Backbone
from tests.causality.corpus.entry import END_OF_TEXT, VOCAB_SIZE, leak
from tests.causality.corpus.mode_leaks import unmasked_if
from tests.causality.corpus.pipelines import (
    IGNORED,
    LENGTH,
    Batches,
    cross_entropy,
    document_model,
    pairs,
    pipeline,
    windows,
    with_documents,
)

LEAK = {"family": "pipeline", "interface": "pipeline", "context_length": LENGTH}


@leak(**LEAK)
def documents_split_by_the_targets():
    """A position whose target is an end of text belongs to the next document already, which its attention shows."""

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(with_documents(model, inputs, targets == END_OF_TEXT), targets)

    return pipeline(document_model(), losses=losses)


@leak(**LEAK)
def noise_drawn_from_the_targets():
    """The noise on the logits is seeded by the sum of the targets."""

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model(inputs)
        generator = torch.Generator().manual_seed(int(targets.sum()) % 2**31)
        return cross_entropy(logits + 0.1 * torch.randn(logits.shape, generator=generator).to(logits), targets)

    return pipeline(losses=losses)


@leak(**LEAK)
def noise_scaled_by_the_own_target():
    """In training each position gets noise whose direction is the embedding of its target."""

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        hint = 0.3 * F.one_hot(targets.clamp(min=0), VOCAB_SIZE) * model.training
        return cross_entropy(model(inputs) + hint, targets)

    return pipeline(losses=losses)


@leak(**LEAK)
def validation_without_the_mask():
    """The mask is applied in training mode only, so the validation loss sees the targets."""
    return pipeline(unmasked_if(lambda self, x: not self.training))


@leak(**LEAK)
def training_without_the_mask():
    """The mask is applied in evaluation mode only."""
    return pipeline(unmasked_if(lambda self, x: self.training))


@leak(**LEAK)
def labels_not_shifted():
    """The target of a position is its own token."""
    return pipeline(batches=pairs(lambda rows: (rows[:, :-1], rows[:, :-1])))


@leak(**LEAK)
def labels_shifted_to_the_past():
    """The target of a position is the token before it."""
    return pipeline(batches=pairs(lambda rows: (rows[:, 1:], rows[:, :-1])))


@leak(**LEAK)
def targets_rolled():
    """The targets are the inputs rolled by one, so the last target is the first input."""
    return pipeline(batches=pairs(lambda rows: (rows, rows.roll(-1, 1)), size=LENGTH))


@leak(**LEAK)
def packing_without_the_shift():
    """Windows that continue a packed document are not shifted; those at even places are."""

    def batches(tokens: Tensor, generator: torch.Generator) -> Batches:
        for i, rows in enumerate(windows(tokens, generator)):
            yield rows[:, :-1], rows[:, 1:] if i % 2 == 0 else rows[:, :-1]

    return pipeline(batches=batches)


@leak(**LEAK)
def answers_inside_of_the_inputs():
    """The prompt, whose targets are ignored, holds the answer that follows it."""

    def make(rows: Tensor) -> tuple[Tensor, Tensor]:
        answer = rows[:, : LENGTH // 2]
        inputs = torch.cat([answer, torch.ones_like(answer[:, :1]), answer[:, :-1]], 1)
        return inputs, torch.cat([torch.full_like(answer, IGNORED), answer], 1)

    return pipeline(batches=pairs(make))


@leak(**LEAK)
def inputs_reversed_and_targets_not():
    """The inputs run from right to left and the targets from left to right."""
    return pipeline(batches=pairs(lambda rows: (rows[:, :-1].flip(1), rows[:, 1:])))


@leak(**LEAK)
def targets_fed_as_inputs_in_training():
    """In training a third of the inputs are replaced by their targets, as a wrong teacher forcing does."""

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        replaced = (torch.arange(inputs.shape[1], device=inputs.device) % 3 == 2) & (targets >= 0) & model.training
        return cross_entropy(model(torch.where(replaced, targets, inputs)), targets)

    return pipeline(losses=losses)


@leak(**LEAK)
def logits_adjusted_by_the_targets_of_the_window():
    """The logarithm of each token's frequency among the targets of the row is added to the logits."""

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        counts = F.one_hot(targets.clamp(min=0), VOCAB_SIZE).sum(1, keepdim=True)  # (B, 1, V)
        return cross_entropy(model(inputs) + (counts + 0.5).log(), targets)

    return pipeline(losses=losses)


@leak(**LEAK)
def losses_mixed_over_time():
    """The loss of a position is averaged with that of the next one."""

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(model(inputs), targets)
        return 0.5 * (loss + loss.roll(-1, 1))

    return pipeline(losses=losses)


@leak(**LEAK)
def labels_smoothed_over_the_neighbors():
    """A tenth of each label is the next target."""

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model(inputs)
        return 0.9 * cross_entropy(logits, targets) + 0.1 * cross_entropy(logits, targets.roll(-1, 1))

    return pipeline(losses=losses)


@leak(**LEAK)
def losses_weighted_by_the_counts_of_the_targets():
    """Frequent targets of the row weigh less, so a loss depends on the other targets."""

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        counts = (targets[:, :, None] == targets[:, None]).sum(-1)
        return cross_entropy(model(inputs), targets) / counts

    return pipeline(losses=losses)


@leak(**LEAK)
def hard_targets_dropped():
    """A loss above 4.5 nats is set to 0, so the loss tells how likely the target was."""

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(model(inputs), targets)
        return loss * (loss < 4.5)

    return pipeline(losses=losses)


@leak(**LEAK)
def better_of_two_heads():
    """Each target has the smaller loss of two heads, which is no loss of any distribution."""

    class TwoHeads(Backbone):
        def __init__(self):
            super().__init__(head=nn.Linear(DIM, 2 * VOCAB_SIZE))

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        first, second = (cross_entropy(logits, targets) for logits in model(inputs).chunk(2, -1))
        return torch.minimum(first, second)

    return pipeline(TwoHeads(), losses=losses)
