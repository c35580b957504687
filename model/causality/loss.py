"""The certificate of a loss and of the data pipeline before it, for any project.

    report = certify_loss(losses, batches, model=model, vocab_size=V)

B batch, T positions, N tokens of a text, V vocabulary.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tril.model.causality.certificate import Certificate
from tril.model.causality.claims import Result, first_true
from tril.model.causality.gradients import check_hidden
from tril.model.causality.model import Model, ModelError, one_line, randomize, same_random_numbers, visible_past
from tril.model.causality.state import State, Texts

Losses = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 (B, T) each
Batches = Callable[[Tensor, torch.Generator], Iterable[Batch]]

MAX_BATCHES = 64  # whose targets are looked for among their inputs
TEXT_SIZE = 1 << 20  # tokens that are enough for a batch
MIN_COMPARED, MIN_EQUAL = 8, 0.9  # targets of a row, fewer may be equal by chance; share of them
MAX_DISTANCE, MAX_AHEAD = 64, 4  # positions from a target back, and ahead, to its copy among the inputs
ROUNDING = 1e-5  # of the largest loss, for functions that round differently when a hidden token changes
SUM_ROUNDING, LOW_PRECISION_ROUNDING = 1e-4, 0.05  # of a sum of probabilities, of losses in float32 and in bf16
MAX_SUMMED = 512  # tokens of the vocabulary, each of which takes a pass; their probabilities add up to at most 1, too
QUERIES = 8  # losses with gradients


def certify_loss(
    losses: Losses, batches: Iterable[Batch] | Batches, *, model: nn.Module | None = None, vocab_size: int | None = None
) -> Certificate:
    """Checks that no loss depends on what it predicts, and that no target stands in its own past.

    "targets": a loss depends on no other target, and the probabilities exp(-loss) of all tokens as the target of a
    position add up to at most 1, so it is -ln of a distribution that does not know the target. (A sum below 1, as with
    label smoothing, cannot make a loss too low.) "future": it depends on no later input. "gradient": nor has it a
    gradient with respect to one, if there is a model. "shift": no target is an input at its position or before; in
    given pairs, no row of targets is its inputs at one distance.

    Args:
        losses: inputs and targets (B, T) -> nats of each target (B, T). Autocast is off around it, since its rounding
            would hide a leak.
        batches: a function of tokens (N,) and a generator that gives the pairs of inputs and targets, int64 (B, T)
            each, of one epoch; or these pairs themselves, such as `[(inputs, targets)]` or a loader, of which at most
            64 are read. A negative target is ignored. Only a function shows every wrong shift: it is called with
            distinct ids, in and outside of the vocabulary, and with random tokens.
        model: the module that `losses` calls. It is checked in both modes, with its own and with random weights.
            Its parameters, buffers, gradients and modes are restored afterwards, and so is the random state of torch;
            other attributes are not. None: the current mode only.
        vocab_size: None: that of `model.config`.

    Raises:
        ValueError: no loss per target; no batches; or a wrong type, shape or token.
    """
    certificate = Certificate("loss")
    with certificate.running(), restored(model):
        vocab_size = vocab_size or getattr(getattr(model, "config", None), "vocab_size", None)
        if vocab_size is None:
            raise ValueError("vocab_size is unknown; give vocab_size=")
        if callable(batches):
            check_shift(certificate, batches, vocab_size)
            pairs = batches_of(batches, torch.randint(vocab_size, (TEXT_SIZE,)))
        else:
            pairs = checked_batches(batches)
            certificate.add(check_shift_of_rows(pairs))
        pairs = [pair for pair in pairs if (pair[1] >= 0).any()]
        if not pairs:
            raise ValueError("there is no batch with targets; give a pair (inputs, targets), not all negative")
        if (largest := max(int(x.max()) for pair in pairs for x in pair)) >= vocab_size:
            raise ValueError(f"batches has the id {largest}, which is not below vocab_size={vocab_size}")
        parameter = None if model is None else next(model.parameters(), None)
        device = pairs[0][0].device if parameter is None else parameter.device
        inputs, targets = (x.to(device) for x in pairs[0])
        function = losses if model is None else model
        subject = Model("losses", function, vocab_size, inputs.shape[1], visible_past, device=device)
        for name in modes(model):
            check_loss(certificate, subject, checked_losses(losses, device), inputs, targets, name)
    return certificate


def modes(model: nn.Module | None) -> Iterator[str]:
    """Names of the weights and modes to test, which the model has while they are."""
    if model is None:
        yield "current mode"
        return
    for weights in ("own", "random"):
        if weights == "random":  # weights of 0 hide what a loss depends on
            randomize(model)
        for training in (False, True):
            model.train(training)
            yield f"weights={weights} mode={'training' if training else 'evaluation'}"


@contextlib.contextmanager
def restored(model: nn.Module | None) -> Iterator[None]:
    """Restores parameters, buffers, gradients and modes of the model, and the random state, after the block."""
    modules = [] if model is None else [(part, part._buffers, part.training) for part in model.modules()]
    parameters = [] if model is None else [(p, p.detach().clone(), p.grad) for p in model.parameters()]
    for p, _, _ in parameters:
        p.grad = None
    for part, buffers, _ in modules:
        part._buffers = {name: None if b is None else b.clone() for name, b in buffers.items()}
    try:
        with same_random_numbers(parameters[0][0].device if parameters else torch.device("cpu")):
            yield
    finally:
        for part, buffers, training in modules:
            part._buffers, part.training = buffers, training
        with torch.no_grad():
            for p, value, gradient in parameters:
                p.copy_(value)  # in place: compiled code may know its address
                p.grad = gradient


# The loss
def checked_losses(losses: Losses, device: torch.device) -> Losses:
    """The losses without autocast; they raise ModelError if there is not one per target."""

    def checked(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, enabled=False):
            out = losses(inputs.clone(), targets.clone())
        if not isinstance(out, Tensor) or out.shape != targets.shape:
            returned = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            needed = f"needs one loss per target, {tuple(targets.shape)}"
            raise ModelError(f'losses(inputs, targets) returns {returned} but {needed}; use reduction="none"')
        return out

    return checked


def check_loss(
    certificate: Certificate, model: Model, losses: Losses, inputs: Tensor, targets: Tensor, name: str
) -> None:
    """A loss is repeatable, depends on no later input and on no other target, and is that of a distribution."""
    n, length = inputs.shape
    texts = [Texts(model.vocab_size, tokens=tokens[tokens >= 0].cpu()) for tokens in (inputs, targets)]
    state = State(name, of_inputs(model, lambda ids: losses(ids, targets), n), texts[0])
    certificate.add(state.repeatable())
    certificate.judge(state, state.future(length, length + 1))
    if (result := check_hidden(state, length, QUERIES)) is not None:
        certificate.add(result)
    known = lambda ids: torch.where(targets >= 0, ids, targets)  # noqa: E731
    state = State(name, of_targets(model, lambda ids: losses(inputs, known(ids)), n), texts[1])
    certificate.judge(state, state.future(length, length + 1, "targets"))
    certificate.add(check_sum(state.model, targets, name))


def of_inputs(model: Model, losses: Callable[[Tensor], Tensor], n: int, tolerance: float = ROUNDING) -> Model:
    """Losses (B, T) as a model of inputs (B, T). They depend on all logits.

    Args:
        n: B.
        tolerance: of a `Model`.
    """
    call = lambda _, ids: losses(ids)[..., None]  # noqa: E731
    nouns = ("the loss at position", "input")
    fields = {"ways": {}, "calls": {}, "batch_size": n, "some_logits": False, "tolerance": tolerance, "nouns": nouns}
    return replace(model, call=call, **fields)


def of_targets(model: Model, losses: Callable[[Tensor], Tensor], n: int, tolerance: float = ROUNDING) -> Model:
    """Losses (B, T) as a model of targets (B, T), each of which sees its own one."""
    visible = lambda length: torch.eye(length, dtype=torch.bool)  # noqa: E731
    model = of_inputs(model, losses, n, tolerance)
    return replace(model, visible=visible, nouns=("the loss at position", "target"))


@torch.no_grad()
def check_sum(model: Model, targets: Tensor, variant: str) -> Result:
    """The probabilities of all tokens as the target of a position add up to at most 1; of a large vocabulary, those of
    the tokens of the batch and of random ones.

    Args:
        model: the losses as a function of the targets.
    """
    targets = targets.cpu()  # MPS has no float64
    ids, counted = torch.arange(model.vocab_size), targets >= 0
    if model.vocab_size > MAX_SUMMED:
        others = torch.randperm(model.vocab_size, generator=torch.Generator().manual_seed(0))
        ids = torch.cat([targets[counted].unique(), others]).unique_consecutive()[:MAX_SUMMED].unique()
    losses = torch.stack([model(torch.full_like(targets, i))[..., 0].cpu().double() for i in ids.tolist()])  # (V, B, T)
    ignored = (losses[:, counted] == 0).all(1).nonzero()[:1, 0]  # one token may be, such as one for padding
    losses[ignored] = math.inf
    is_low = any(torch.equal(losses, losses.to(dtype).double()) for dtype in (torch.bfloat16, torch.float16))
    excess = ((-losses).exp().sum(0) - 1).masked_fill(~counted, 0.0)
    bound, worst, where, query = LOW_PRECISION_ROUNDING if is_low else SUM_ROUNDING, excess.max().item(), "", None
    if wrong := first_true(~(excess <= bound)):
        row, query = wrong
        where = f"the probabilities exp(-loss) of {len(ids)} tokens at position {query} of row {row} add up to "
        where += f"1 + {excess[row, query]:.4f}: the loss depends on its own target"
    worst = math.inf if math.isnan(worst) else worst
    return Result("targets", variant, targets.shape[1], worst, bound, excess.numel(), where, query=query)


# The batches
def checked_batches(batches: Iterable[Batch]) -> list[Batch]:
    """The first batches. Raises ValueError if an item is not a pair of int64 tensors of one shape (B, T)."""
    pairs = list(itertools.islice(batches, MAX_BATCHES))
    for pair in pairs:
        kinds = [f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in pair]
        if len(kinds) != 2 or kinds[0] != kinds[1] or not kinds[0].startswith("torch.int64") or pair[0].dim() != 2:
            raise ValueError(
                f"batches yields {' and '.join(kinds)}; yield inputs and shifted targets, int64 (B, T) each"
            )
    return pairs


def batches_of(batches: Batches, tokens: Tensor) -> list[Batch]:
    """The first batches of a text (N,). Raises ValueError if there are none."""
    if pairs := checked_batches(batches(tokens, torch.Generator().manual_seed(0))):
        return pairs
    raise ValueError(f"batches(tokens, generator) yields nothing of {len(tokens):,} tokens; yield (inputs, targets)")


def check_shift(certificate: Certificate, batches: Batches, vocab_size: int, name: str = "") -> None:
    """No target stands among its inputs: at its own position or before it.

    The batches are those of a text without repeated tokens, whose ids are not below `vocab_size`. So each token of a
    batch is known by its place in the text, and tokens that the pipeline inserts are no part of it. A second text has
    every id of the vocabulary once, because a pipeline may treat some ids differently.

    Args:
        name: of the state in the results; "": the kind of the text.
    """
    try:
        pairs = batches_of(batches, torch.arange(TEXT_SIZE) + vocab_size)
    except Exception as error:  # of a pipeline that looks tokens up
        certificate.note(f"shift is left out, because batches(distinct ids) raised {one_line(error)}")
        return
    certificate.add(shift_of(pairs, name or "distinct tokens", lambda ids: ids >= vocab_size))
    inserted = torch.cat([x[x < vocab_size] for pair in pairs for x in pair]).unique()
    try:
        pairs = batches_of(batches, torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0)))
    except Exception:  # too short a text, of a small vocabulary
        return
    certificate.add(shift_of(pairs, name or "all ids once", lambda ids: (ids >= 0) & ~torch.isin(ids, inserted)))


def shift_of(pairs: list[Batch], variant: str, is_known: Callable[[Tensor], Tensor]) -> Result:
    """Looks for known targets among the inputs at or before their position, in batches without repeated tokens."""
    n_targets, n_seen, where, leak, length = 0, 0, "", {}, 0
    for number, (inputs, targets) in enumerate(pairs):
        length, known = inputs.shape[1], is_known(targets)
        values, order = inputs.sort(dim=1, stable=True)
        rank = torch.searchsorted(values, targets.contiguous()).clamp(max=length - 1)
        seen_at = torch.where(values.gather(1, rank) == targets, order.gather(1, rank), length)  # (B, T) first equal
        seen = known & (seen_at <= torch.arange(length, device=inputs.device))
        n_targets, n_seen = n_targets + int(known.sum()), n_seen + int(seen.sum())
        if not where and seen.any():
            row, query = first_true(seen)
            leak: dict[str, Any] = {"query": query, "key": int(seen_at[row, query])}
            which = f"the target at position {query} of row {row} of batch {number}"
            where = f"{which} is the input at position {leak['key']}"
    return Result("shift", variant, length, n_seen, 0, n_targets, where, **leak)


def check_shift_of_rows(pairs: list[Batch]) -> Result:
    """No row of given batches has targets that equal its inputs at a fixed distance at or before them.

    It misses single targets, reversed inputs and distances of 64 positions and more, all of which `check_shift` finds.
    A row that is equal at a distance ahead as well, as a constant one is, passes.
    """
    length, tested, worst, where = 0, 0, 0.0, ""
    for number, (x, y) in enumerate(pairs):
        length, tested = x.shape[1], tested + int((y >= 0).sum())
        # (B, distances, T): the input at each distance, those ahead first; -1 where there is none
        inputs = nn.functional.pad(x, (MAX_DISTANCE - 1, MAX_AHEAD), value=-1).unfold(1, length, 1).flip(1)
        counted = (y[:, None] >= 0) & (inputs >= 0)
        share, best = (((y[:, None] == inputs) & counted).sum(-1) / counted.sum(-1).clamp(min=MIN_COMPARED)).max(1)
        share = share.masked_fill(best < MAX_AHEAD, 0.0)  # (B,), of equal ones the first, so one ahead
        worst = max(worst, share.max().item())
        if worst >= MIN_EQUAL and not where:
            row = int(share.argmax())
            share_of_row = f"{100 * worst:.0f}% of the targets in row {row} of batch {number}"
            where = f"{share_of_row} are the inputs {int(best[row]) - MAX_AHEAD} positions before them"
    return Result("shift", "given batches", length, worst, MIN_EQUAL, tested, where)
