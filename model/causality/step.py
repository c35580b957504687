"""The short certificate of a training step of a GPT: before the first one, at validations, and of a checkpoint.

The model is tested in place, with the weights that it has.

B batch, T context length, N tokens of a text, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.causality.certificate import Certificate
from tril.model.causality.claims import Claim, Result, once
from tril.model.causality.gpt import REFERENCE, reference_of, with_ways
from tril.model.causality.gradients import check_hidden
from tril.model.causality.loss import SUM_ROUNDING, Batch, Losses, check_shift, of_inputs, of_targets
from tril.model.causality.model import Model, randomize, visible_past, with_some_logits
from tril.model.causality.state import State, Texts
from tril.model.checkpoint import Checkpoint
from tril.model.gpt import GPT
from tril.model.masks import document_options

ROWS, LOSS_ROWS, QUERIES = 8, 4, 2  # texts whose hidden tokens are replaced, and outputs with gradients
MAX_FLOPS = 2e10  # of a pass; decoding with a larger model would take a minute
BACKWARD_TOKENS = 64
GRADIENT_ROUNDING, LOW_ROUNDING = 1e-2, 0.1  # of the largest gradient, where CUDA may round to TF32, and in bf16
MAX_BATCHES = 4  # of each part of the text, whose targets are looked for among their inputs

Windows = Callable[[Tensor], dict[str, Iterable[Batch]]]  # tokens (N,) -> batches of one epoch, by part of the text


@dataclass(frozen=True)
class Step:
    """A training step.

    Attributes:
        losses: inputs and targets (B, T) -> the losses (B, T) as training computes them, such as compiled.
        precision: of the trainer.
        lengths: of the windows of a batch, in the course of training; each has as many tokens as `batch_size` windows
            of the context length.
        document_eot: id of the token that opens a document, which attention does not cross; None: it crosses all.
    """

    gpt: GPT
    losses: Losses
    precision: str
    batch_size: int
    lengths: Collection[int]
    document_eot: int | None

    def model(self, precision: str) -> Model:
        """The model, of which no float64 twin is made; of a large vocabulary with some of its logits."""
        config, device = self.gpt.config, self.gpt.embed.weight.device
        sizes = (config.vocab_size, config.context_length, visible_past)
        model = Model("model", self.gpt, *sizes, device=device, precision=precision, tolerance=math.inf)
        return with_some_logits(with_ways(model))

    def state(self, what: str, model: Model, seed: int) -> State:
        """The seed is that of texts and positions."""
        texts = Texts(model.vocab_size, () if self.document_eot is None else (self.document_eot,), seed=seed)
        return State(f"{what} precision={model.precision}", model, texts, seed=seed)


def check_weights(certificate: Certificate, step: Step, seed: int) -> None:
    """Replaced tokens through the model and through the loss of a training step, in the precision of training.

    Args:
        seed: of the texts and of the positions from which they are replaced.
    """
    model, context_length = step.model(step.precision), step.gpt.config.context_length
    step.gpt.eval()
    state = step.state("model", model, seed)
    certificate.add(state.repeatable())
    certificate.judge(state, state.future(context_length, ROWS))
    if (result := check_hidden(state, context_length, QUERIES)) is not None:
        certificate.add(result)
    step.gpt.train()
    visible = model.visible if step.document_eot is None else visible_past  # an end of text changes positions
    for length in step.lengths:
        n = step.batch_size * context_length // length
        targets = torch.randint(model.vocab_size, (n, length), generator=torch.Generator().manual_seed(0))
        targets = targets.to(model.device)
        losses = lambda ids, targets=targets: step.losses(ids, targets)  # noqa: E731
        loss = replace(of_inputs(model, losses, n, math.inf), visible=visible, context_length=length)
        state = step.state("loss", loss, seed)
        certificate.judge(state, state.future(length, max(LOSS_ROWS, n)))


def check_plain(certificate: Certificate, step: Step) -> None:
    """The losses of training and validation are those of the logits, which do not know the targets.

    Decoding, other lengths and packed documents give the outputs of a full pass. Compiled code is not used: a compiled
    loss in bf16 rounds more than a small leak.
    """
    gpt, length = step.gpt.eval(), step.gpt.config.context_length
    state = step.state("model", step.model(step.precision if step.precision.endswith("-true") else "32-true"), 0)
    model, ids = state.model, state.ids.to(state.model.device)
    targets = torch.randint(model.vocab_size, ids.shape, generator=state.generator).to(model.device)
    options = document_options(ids, step.document_eot)
    separated = replace(model, call=lambda gpt, ids: gpt(ids, **options), some_logits=False)
    loss = of_targets(model, lambda y: gpt.nll(ids, y, **options), len(ids), SUM_ROUNDING)
    of_logits = lambda _: F.cross_entropy(separated(ids).mT, targets, reduction="none")[..., None]  # noqa: E731
    says = "differs from -ln softmax of the logits of its inputs"
    for mode in ("evaluation", "training"):
        gpt.train(mode == "training")
        claim = Claim("targets", targets, once(targets), of_logits, says=says)
        certificate.judge(step.state(f"loss mode={mode}", loss, 0), [claim])
    gpt.eval()
    if 2 * gpt.n_parameters() * length > MAX_FLOPS:
        return
    ways = [REFERENCE, "chunks with the cache"]
    ways += [] if step.document_eot is None else ["a document behind another one"]
    certificate.judge(state, state.computed(ids, [name for name in ways if name in model.ways]))
    certificate.judge(state, state.cut(ids, [n for n in (length * share // 8 for share in (7, 4, 2, 1)) if n]))
    ids, targets = ids[:1, :BACKWARD_TOKENS], targets[:1, :BACKWARD_TOKENS]
    certificate.add(check_backward(gpt, ids, targets, LOW_ROUNDING if model.is_low else GRADIENT_ROUNDING))


def check_backward(gpt: GPT, ids: Tensor, targets: Tensor, bound: float) -> Result:
    """The gradients of a loss are those of the explicit backend in float64 on the CPU.

    Kernels of other backends and devices may compute something else without an error, in the backward pass alone.
    """
    found, expected = (
        torch.autograd.grad(model.nll(x, y).mean(), [*model.parameters()], allow_unused=True, materialize_grads=True)
        for model, x, y in ((gpt, ids, targets), (reference_of(gpt), ids.cpu(), targets.cpu()))
    )
    scale = max(g.norm().item() for g in expected)
    grads = zip(gpt.named_parameters(), found, expected, strict=True)
    sizes = {name: (a.cpu().double() - b).norm().item() / scale for (name, _), a, b in grads}
    worst = max(sizes, key=sizes.__getitem__)
    where = f"the gradient of {worst} differs: {REFERENCE}" if not sizes[worst] <= bound else ""
    return Result("equal", "gradients of the loss", ids.shape[1], sizes[worst], bound, len(sizes), where)


def check_windows(certificate: Certificate, windows: Windows, step: Step) -> None:
    """No target of the windows of training and validation stands among its inputs."""
    for part in windows(torch.arange(step.gpt.config.context_length + 2)):
        batches = lambda tokens, _, part=part: itertools.islice(windows(tokens)[part], MAX_BATCHES)  # noqa: E731
        check_shift(certificate, batches, step.gpt.config.vocab_size, f"windows={part}")


def check_stored_step(certificate: Certificate, gpt: GPT, checkpoint: Checkpoint) -> None:
    """The checks of a training step, with the weights of a checkpoint and with random ones, which the model has then.

    Documents are separated as in the run; the precision is float32.
    """
    eot = checkpoint.data.get("eot_id") if checkpoint.settings.get("data.document_mask") else None
    losses = lambda x, y: gpt.nll(x, y, **document_options(x, eot))  # noqa: E731
    step = Step(gpt, losses, "32-true", 2, [gpt.config.context_length], eot)
    for weights in ("own", "random"):
        if weights == "random":
            randomize(gpt, torch.Generator(gpt.embed.weight.device).manual_seed(0))
        check_weights(certificate, step, 0)
        check_plain(certificate, step)
