"""The certificate of the loss and the windows of a run, for scripts/certify.py ckpt=..."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tril.data.batches import Batch, TrainWindows, ValWindows
from tril.data.sources.base import BLOCK
from tril.model.causality.checks import Result
from tril.model.causality.loss import certify_loss, check_shift
from tril.model.masks import document_options

if TYPE_CHECKING:
    from tril.model.gpt import GPT

MAX_FLOPS = 2e12  # of all passes: 40 s on a CPU
PASSES = 400  # with 64 of the estimate of "targets" in each of four modes
MIN_LENGTH = 16  # of a window


def certify_pipeline(model: "GPT", origin: dict[str, Any]) -> Iterator[Result | str]:
    """The loss of each target, over the windows of training and validation, one in each batch; see `certify_loss`.

    Args:
        model: on the device of the test; its weights are the same afterwards. The windows of a large one are shorter
            than its context.
        origin: the "tril" entry of the run's checkpoint.
    """
    config, run, data = model.config, origin["settings"], origin["data"]
    length = max(MIN_LENGTH, int(MAX_FLOPS / PASSES / (2 * model.n_parameters())))
    length, device = min(length, config.context_length), model.embed.weight.device
    counts = [round(BLOCK * source["share"]) for source in data.get("sources", {}).values()] or [BLOCK]
    document_eot = data.get("eot_id") if run.get("data.document_mask") else None

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return model.nll(inputs, targets, **document_options(inputs, document_eot))

    def training(tokens: Tensor, _: torch.Generator) -> Iterable[Batch]:
        if len(tokens) <= length + 1:
            return ()  # `certify_loss` gives a longer text
        ids, seed = tokens.numpy(), run.get("seed", 0)
        return TrainWindows([ids] * len(counts), length, 1, seed, counts=counts)

    def validation(tokens: Tensor, _: torch.Generator) -> Iterable[Batch]:
        return ValWindows(tokens.numpy(), length, 1)

    with torch.device(device):
        certificate = certify_loss(losses, training, model=model, vocab_size=config.vocab_size)
    yield from certificate.results
    yield from certificate.notes
    yield from check_shift(validation, config.vocab_size)
