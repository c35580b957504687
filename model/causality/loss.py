"""The certificate of a loss and of the data pipeline before it, for any project.

    report = certify_loss(losses, batches, model=model, vocab_size=V)    # the loss and its batches
    report = certify_loss(train=tokens, validation=other_tokens)         # two texts

B batch, T positions, N tokens of a text, V vocabulary, K kinds of random tokens.
"""

import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tril.model.causality.certificate import Certificate
from tril.model.causality.checks import SLACK, Result, first_true
from tril.model.causality.model import logits_in, one_line, randomize, same_random_numbers

Losses = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 (B, T) each
Batches = Callable[[Tensor, torch.Generator], Iterable[Batch]]

MAX_BATCHES = 64  # compared by "shift"
TEXT_SIZES = (1 << 16, 1 << 21)  # tokens: the second one where the first one gives no batch
MIN_COMPARED, MIN_EQUAL = 8, 0.9  # targets of a row, fewer may be equal by chance; share of them
MAX_DISTANCE, MAX_AHEAD = 64, 4  # positions from a target back, and ahead, to its copy among the inputs
PASSAGE_TOKENS, MIN_PASSAGE_TOKENS = 50, 16  # of a long text, and of one of less than 1,000 tokens
MAX_SHARE = 0.01  # of the validation tokens
MAX_NOISE = 1e-4  # of the largest loss: two runs of one batch that differ more are not repeatable
ROUNDING = 1e-5  # of the largest loss, for functions that round differently when a hidden token changes
SUM_ROUNDING, LOW_PRECISION_ROUNDING = 1e-4, 0.05  # of a sum of probabilities, of losses in float32 and in bf16
MAX_SUMMED = 512  # tokens of the vocabulary, each of which takes a pass; their probabilities add up to at most 1, too
REDRAWS = 6  # of two kinds each, next to those of special ids
TRAINING_SECONDS, LR, WARMUP = 20.0, 3e-3, 10  # of the canary
KINDS, FRESH_TOKENS = 4, 4096  # few kinds, so that a model which copies them learns it in a few steps
Z = 5.0  # standard errors below ln K that count as a leak; chance reaches that once in 3.5 million tests


def certify_loss(
    losses: Losses | None = None,
    batches: Iterable[Batch] | Batches = (),
    *,
    model: nn.Module | None = None,
    tokens: Tensor | None = None,
    vocab_size: int | None = None,
    train: Tensor | None = None,
    validation: Tensor | None = None,
    steps: int = 200,
) -> Certificate:
    """Checks that no loss depends on what it predicts, and that no target stands in its own past.

    "targets": a loss depends on no other target, and the probabilities exp(-loss) of all tokens as the target of a
    position add up to at most 1, so it is -ln of a distribution that does not know the target. (A sum below 1, as with
    label smoothing, cannot make a loss too low.) "future": it depends on no later input. "shift": no target is an input
    at its position or before. "canary": trained on random tokens, it does not predict fresh ones. "overlap": the
    validation text is not in the training text.

    Args:
        losses: inputs and targets (B, T) -> nats of each target (B, T); for the canary, differentiable. Autocast is off
            around it, since its rounding would hide a leak.
        batches: a function of tokens (N,) and a generator that gives the pairs of inputs and targets, int64 (B, T)
            each, of one epoch; or these pairs themselves, such as `[(inputs, targets)]` or a loader, of which at most
            64 are read. A negative target is ignored. Only a function shows every wrong shift: it is called with
            distinct ids that are not in the vocabulary, and with random tokens.
        model: the module that `losses` calls. It is checked in both modes, with its own and with random weights, and
            trained in place. Its parameters, buffers, gradients and modes are restored afterwards, and so are the
            random states of torch, numpy and Python; other attributes are not.
            None: the current mode only, and no canary.
        tokens: the text (N,) that `batches` is called with; None: random tokens.
        vocab_size: None: the last dimension of what `model(inputs)` returns.
        train, validation: token ids (N,) of both texts.
        steps: of the canary, which stops after 20 seconds.

    Raises:
        ValueError: no loss per target; no batches; a wrong type, shape or token; or nothing to check.
    """
    certificate = Certificate("loss")
    with certificate.timed():
        if train is not None or validation is not None:
            certificate.add([check_overlap(train, validation)])
        if losses is not None:
            with restored(model):
                certificate.add(_pipeline_results(losses, batches, model, tokens, vocab_size, steps))
    if not certificate.results:
        raise ValueError("certify_loss has nothing to check; give losses and batches, or train and validation")
    return certificate


def _pipeline_results(
    losses: Losses,
    batches: Iterable[Batch] | Batches,
    model: nn.Module | None,
    tokens: Tensor | None,
    vocab_size: int | None,
    steps: int,
) -> Iterator[Result | str]:
    if tokens is not None and not callable(batches):
        raise ValueError("tokens is read by a function batches(tokens, generator) only; give one, or leave tokens out")
    if vocab_size is None:
        vocab_size = vocab_size_of(model)
    if callable(batches):
        yield from check_shift(batches, vocab_size)
        text = tokens if tokens is not None else torch.randint(vocab_size, (TEXT_SIZES[0],))
        make, real = batches, batches_of(batches, lambda size: text)
    else:
        real = list(checked_batches(batches))
        if not real:
            raise ValueError("batches yields nothing; give at least one pair (inputs, targets)")
        make = windows_like(real[0])
        yield check_shift_of_rows(real)
    probe = LossProbe(losses, *real[0], vocab_size, model)
    largest = max(int(probe.inputs.max()), int(probe.targets.max()))
    if largest >= vocab_size:
        raise ValueError(f"vocab_size={vocab_size} must be above every token, and the batches have {largest}")
    if not (probe.targets >= 0).any():
        raise ValueError("every target of the first batch is negative, so ignored; give a batch with targets")
    for variant in modes(model):
        yield from check_loss(replace(probe, variant=variant))
    if model is None or not any(p.requires_grad for p in model.parameters()):
        yield "no canary, which needs a model with parameters; give model="
        return
    try:
        yield from check_canary(probe, make, steps)
    except RuntimeError as error:  # losses without gradient
        yield f"no canary: {one_line(error)}"


def vocab_size_of(model: nn.Module | None) -> int:
    """V of the logits of the model. Raises ValueError if it gives none."""
    try:
        assert model is not None
        with torch.no_grad():
            ids = torch.zeros(2, 8, dtype=torch.int64, device=next(model.parameters()).device)
            logits = logits_in(model(ids))
        assert logits.dim() == 3
    except Exception:  # a model that needs other arguments
        raise ValueError("vocab_size is unknown: model(ids) gives no logits (B, T, V); give vocab_size=") from None
    return logits.shape[-1]


@dataclass
class LossProbe:
    """A loss on one batch, in one mode of the model.

    Attributes:
        losses: inputs and targets (B, T) -> nats of each target (B, T).
        variant: names weights and mode.
        model: None: its mode is unknown.
    """

    losses: Losses
    inputs: Tensor
    targets: Tensor
    vocab_size: int
    model: nn.Module | None
    variant: str = "current mode"
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __post_init__(self) -> None:
        parameter = None if self.model is None else next(self.model.parameters(), None)
        self.device = self.inputs.device if parameter is None else parameter.device
        self.inputs, self.targets = self.inputs.to(self.device), self.targets.to(self.device)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """(B, T), without gradient and with the same random numbers every time."""
        random.seed(0)
        np.random.seed(0)
        grad = self.model is not None and self.model.training
        with same_random_numbers(self.device), torch.set_grad_enabled(grad):
            return self.per_target(inputs.clone(), targets.clone()).detach().clone()

    def per_target(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each target, (B, T). Raises ValueError if `losses` returns anything else."""
        with torch.autocast(self.device.type, enabled=False):
            out = self.losses(inputs, targets)
        if not isinstance(out, Tensor) or out.shape != targets.shape:
            found = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            needed = f"needs one loss per target, {tuple(targets.shape)}"
            raise ValueError(f'losses(inputs, targets) returns {found} but {needed}; use reduction="none"')
        return out

    def replacements(self, tokens: Tensor) -> Iterator[Tensor]:
        """(B, T) each: random tokens, those of the batch in another order, and ids that often have a meaning."""
        usual = tokens[tokens >= 0]
        for _ in range(REDRAWS):
            yield torch.randint(self.vocab_size, tokens.shape, generator=self.generator).to(tokens)
            yield usual[torch.randint(len(usual), tokens.shape, generator=self.generator).to(usual.device)]
        for token in sorted({0, 1, 2, self.vocab_size - 2, self.vocab_size - 1} & set(range(self.vocab_size))):
            yield torch.full_like(tokens, token)

    def result(self, check: str, worst: float, bound: float, tested: int, where: str = "", **leak: Any) -> Result:
        return Result(check, self.variant, self.inputs.shape[1], worst, bound, tested, where, **leak)


def check_loss(probe: LossProbe) -> Iterator[Result]:
    """A loss is repeatable, depends on no other target and on no later input, and is that of a distribution."""
    out = probe(probe.inputs, probe.targets)
    base, counted = out.double(), probe.targets >= 0
    scale = base[counted].abs().max().item()
    noise = (probe(probe.inputs, probe.targets).double() - base).abs().max().item()
    where = "" if noise <= MAX_NOISE * scale else f"the losses of two runs of one batch differ by {noise:.2g} nats"
    yield probe.result("equal", noise, MAX_NOISE * scale, base.numel(), where)
    if where:
        return
    bound, (n_rows, length) = max(SLACK * noise, ROUNDING * scale), probe.inputs.shape

    def compare(check: str, changes: Iterable[tuple[Tensor, Tensor, Tensor]], what: str) -> Result:
        worst, tested, where, leak = 0.0, 0, "", {}
        for inputs, targets, compared in changes:
            change = (probe(inputs, targets).double() - base).abs().masked_fill(~(counted & compared), 0.0)
            worst, tested = max(worst, change.max().nan_to_num(torch.inf).item()), tested + int(compared.sum())
            if not change.max() <= bound:
                row, query = first_true(~(change <= bound))
                leak = {"query": query}
                if check == "future":
                    leak["key"] = int(compared[row].sum())
                size = f"changes by {change[row, query].item():.2g} nats"
                where = f"the loss at position {query} of row {row} {size} when {what} are replaced"
                break
        return probe.result(check, worst, bound, tested, where, **leak)

    def other_targets() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for tokens in probe.replacements(probe.targets):
            chosen = (torch.rand(tokens.shape, generator=probe.generator) < 0.5).to(tokens.device) & counted
            yield probe.inputs, torch.where(chosen, tokens, probe.targets), ~chosen

    def later_inputs() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for tokens in probe.replacements(probe.inputs):
            cuts = torch.randint(1, length, (n_rows, 1), generator=probe.generator)
            after = (torch.arange(length) >= cuts).to(tokens.device)  # (B, T)
            yield torch.where(after, tokens, probe.inputs), probe.targets, ~after

    yield compare("targets", other_targets(), "other targets")
    if length > 1:
        yield compare("future", later_inputs(), "later inputs")
    yield check_sum(probe, out.dtype in (torch.bfloat16, torch.float16))


def check_sum(probe: LossProbe, low_precision: bool) -> Result:
    """The probabilities of all tokens as the target of a position add up to at most 1; of a large vocabulary, those of
    the tokens of the batch and of random ones."""
    counted, ids = probe.targets >= 0, torch.arange(probe.vocab_size)
    if probe.vocab_size > MAX_SUMMED:
        others = torch.randperm(probe.vocab_size, generator=probe.generator)
        ids = torch.cat([probe.targets[counted].cpu().unique(), others]).unique_consecutive()[:MAX_SUMMED].unique()
    total, ignored = torch.zeros(probe.targets.shape, dtype=torch.float64, device=probe.device), 0
    for token in ids.tolist():
        losses = probe(probe.inputs, torch.where(counted, token, probe.targets)).double()
        if not losses[counted].any() and not ignored:  # one token may be ignored, such as one for padding
            ignored = 1
        else:
            total += (-losses).exp()
    above = (total - 1).masked_fill(~counted, 0.0)
    bound, worst = LOW_PRECISION_ROUNDING if low_precision else SUM_ROUNDING, above.max().item()
    if worst <= bound:
        return probe.result("targets", worst, bound, total.numel() * len(ids))
    row, query = first_true(~(above <= bound))
    which = f"the probabilities exp(-loss) of {len(ids)} tokens at position {query} of row {row}"
    where = f"{which} add up to {total[row, query].item():.4f}, above 1: the loss depends on its own target"
    return probe.result("targets", worst, bound, total.numel() * len(ids), where, query=query)


def check_logits(probe: LossProbe, logits: Tensor) -> Result:
    """The losses are -ln softmax of these logits (B, T, V), which were computed without the targets."""
    losses, counted = probe(probe.inputs, probe.targets).double(), probe.targets >= 0
    expected = nn.functional.cross_entropy(logits.double().mT, probe.targets.clamp(min=0), reduction="none")
    difference = (losses - expected).abs().masked_fill(~counted, 0.0)
    bound, worst, where, leak = SUM_ROUNDING * expected.max().item(), difference.max().item(), "", {}
    if not worst <= bound:
        row, query = first_true(~(difference <= bound))
        size, leak = difference[row, query].item(), {"query": query}
        where = f"the loss at position {query} differs by {size:.2g} nats from -ln softmax of the logits of its inputs"
    return probe.result("targets", worst, bound, difference.numel(), where, **leak)


def modes(model: nn.Module | None) -> Iterator[str]:
    """Names of the weights and modes to test, which the model has while they are."""
    if model is None:
        yield "current mode"
        return
    parameter = next(model.parameters(), None)
    for weights in ("own",) if parameter is None else ("own", "random"):
        if parameter is not None and weights == "random":  # weights of 0 hide what a loss depends on
            randomize(model, torch.Generator(parameter.device).manual_seed(0))
        for training in (False, True):
            model.train(training)
            yield f"weights={weights} mode={'training' if training else 'evaluation'}"


@contextlib.contextmanager
def restored(model: nn.Module | None) -> Iterator[None]:
    """Restores parameters, buffers, gradients and modes of the model, and the random states of torch on its device,
    numpy and Python."""
    modules = list(model.modules()) if model else []
    parameters = list(model.parameters()) if model else []
    training, buffers = [module.training for module in modules], [dict(module._buffers) for module in modules]
    tensors = [*parameters, *(x for kept in buffers for x in kept.values() if x is not None)]
    values, gradients = [x.detach().clone() for x in tensors], [p.grad for p in parameters]
    python, numpy = random.getstate(), np.random.get_state()
    for p in parameters:
        p.grad = None
    try:
        with same_random_numbers(parameters[0].device if parameters else torch.device("cpu")):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, mode, kept in zip(modules, training, buffers, strict=True):
            module.training = mode
            module._buffers.update(kept)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                if not torch.equal(tensor, value):  # expanded buffers cannot be written
                    tensor.copy_(value)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient


def check_canary(probe: LossProbe, batches: Batches, steps: int, n_fresh: int = FRESH_TOKENS) -> Iterator[Result]:
    """Trains the model on uniformly random tokens of K kinds; its loss on fresh ones may not be below ln K.

    By Gibbs' inequality, the expected loss of any causal model is at least ln K. Targets that the pipeline inserts are
    left out. The weights are those of the training afterwards; see `restored`.

    Args:
        n_fresh: fresh tokens in each mode, at least.

    Raises:
        RuntimeError: the losses have no gradient, or no batch has a random token as a target.
    """
    model, device = probe.model, probe.device
    assert model is not None
    usual = torch.arange(4, probe.vocab_size - 4) if probe.vocab_size >= 16 else torch.arange(probe.vocab_size)
    kinds = usual[torch.randperm(len(usual), generator=probe.generator)[:KINDS]]  # ids at the ends have a meaning
    pairs = random_batches(batches, kinds, probe.generator)

    def losses() -> Tensor:
        for inputs, targets in itertools.islice(pairs, MAX_BATCHES):
            inputs, targets = inputs.to(device), targets.to(device)
            chosen = torch.isin(targets, kinds.to(device))
            if chosen.any():
                return probe.per_target(inputs, targets)[chosen].float()
        raise RuntimeError(f"no target of {MAX_BATCHES} batches is a token of the text")

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    end = time.monotonic() + TRAINING_SECONDS
    with same_random_numbers(device), torch.enable_grad():
        randomize(model, torch.Generator(device).manual_seed(0)).train()
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / WARMUP)
            losses().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if time.monotonic() > end:
                break
        for training in (False, True):
            model.train(training)
            parts: list[Tensor] = []
            with torch.set_grad_enabled(training):
                while sum(map(len, parts)) < n_fresh:
                    parts.append(losses().detach())
            fresh = torch.cat(parts).double()
            loss, error, bound = fresh.mean().item(), fresh.std().item() / len(fresh) ** 0.5, math.log(len(kinds))
            below = max(0.0, bound - loss) / error if loss < bound else 0.0
            words = f"loss {loss:.4f} ± {error:.4f} nats on random tokens of {len(kinds)} kinds"
            where = "" if below <= Z else f"{words}, but without a leak it is at least {bound:.4f}"
            mode = replace(probe, variant=f"weights=trained mode={'training' if training else 'evaluation'}")
            yield mode.result("canary", below, Z, len(fresh), where)


def checked_batches(batches: Iterable[Batch], limit: int = MAX_BATCHES) -> Iterator[Batch]:
    """The first batches.

    Raises:
        ValueError: an item is not a pair of int64 tensors of one shape (B, T).
    """
    for item in itertools.islice(batches, limit):
        if not (isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(x, Tensor) for x in item)):
            raise ValueError(f"batches yields {type(item).__name__}, not a pair of tensors; yield (inputs, targets)")
        inputs, targets = item
        if inputs.dim() != 2 or inputs.shape != targets.shape or {inputs.dtype, targets.dtype} != {torch.int64}:
            shapes = " and ".join(f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in (inputs, targets))
            raise ValueError(f"batches yields {shapes} but needs int64 (B, T) twice; shift before batching")
        yield inputs, targets


def batches_of(batches: Batches, text: Callable[[int], Tensor]) -> list[Batch]:
    """The first batches of a text of the size that they need: number of tokens -> tokens (N,).

    Raises:
        ValueError: no batch, or as `checked_batches`.
    """
    for size in TEXT_SIZES:
        found = list(checked_batches(batches(text(size), torch.Generator().manual_seed(0))))
        if found:
            return found
    raise ValueError("batches(tokens, generator) yields nothing; yield (inputs, targets), or give a longer text")


def random_batches(batches: Batches, kinds: Tensor, generator: torch.Generator) -> Iterator[Batch]:
    """Batches without end, of random tokens of these kinds (K,): each epoch has a new text."""
    for size in TEXT_SIZES:
        n_batches = 1
        while n_batches:
            n_batches, text = 0, kinds[torch.randint(len(kinds), (size,), generator=generator)]
            for batch in batches(text, generator):
                n_batches += 1
                yield batch


def windows_like(batch: Batch) -> Batches:
    """Windows of a text in the shape of a batch, whose targets are the next tokens, ignored where those are."""
    targets = batch[1].cpu()
    n_rows, length = targets.shape

    def batches(tokens: Tensor, generator: torch.Generator) -> Iterator[Batch]:
        for rows in tokens.split(n_rows * (length + 1)):
            if len(rows) == n_rows * (length + 1):
                rows = rows.view(n_rows, length + 1)
                yield rows[:, :-1], torch.where(targets < 0, targets, rows[:, 1:])

    return batches


def check_shift(batches: Batches, vocab_size: int) -> Iterator[Result | str]:
    """No target stands among its inputs: at its own position or before it. A note if targets are not the next tokens.

    The batches are those of a text without repeated tokens, whose ids are not below `vocab_size`. So each token of a
    batch is known by its place in the text, and tokens that the pipeline inserts are no part of it.
    """
    try:
        pairs = batches_of(batches, lambda size: torch.arange(size) + vocab_size)
    except ValueError:
        raise
    except Exception as error:  # of a pipeline that looks tokens up
        yield f"shift is left out, because batches(distinct ids) raised {one_line(error)}"
        return
    n_targets, n_seen, where, leak, length, distances = 0, 0, "", {}, 0, []
    for number, (inputs, targets) in enumerate(pairs):
        length, known = inputs.shape[1], targets >= vocab_size
        seen_at = first_equal(inputs, targets)  # (B, T)
        seen = known & (seen_at <= torch.arange(length, device=inputs.device))
        n_targets, n_seen = n_targets + int(known.sum()), n_seen + int(seen.sum())
        distances.append((targets - inputs)[known & (inputs >= vocab_size)])
        if not where and seen.any():
            row, query = first_true(seen)
            leak: dict[str, Any] = {"query": query, "key": int(seen_at[row, query])}
            which = f"the target at position {query} of row {row} of batch {number}"
            where = f"{which} is the input at position {leak['key']}{reason_of(query - leak['key'])}"
    yield Result("shift", "distinct tokens", length, n_seen, 0, n_targets, where, **leak)
    distance = abs(int(torch.cat(distances).mode().values)) if sum(map(len, distances)) else 0
    if not where and distance != 1:
        yield f"shift: most targets are {distance} tokens from their input in the text, not 1"


def first_equal(inputs: Tensor, targets: Tensor) -> Tensor:
    """The position of the first input of the row that equals each target, (B, T); T where there is none."""
    values, order = inputs.sort(dim=1, stable=True)
    rank = torch.searchsorted(values, targets.contiguous()).clamp(max=inputs.shape[1] - 1)
    return torch.where(values.gather(1, rank) == targets, order.gather(1, rank), inputs.shape[1])


def reason_of(distance: int) -> str:
    """The usual reason why a target is the input `distance` positions before it."""
    reasons = {0: ", as if the targets were not shifted", 1: ", as if they were shifted to the past"}
    return reasons.get(distance, "")


def check_shift_of_rows(batches: Iterable[Batch]) -> Result:
    """No row has targets that equal its inputs at a fixed distance at or before them.

    For batches that are given. It misses single targets, reversed inputs and distances of 64 positions and more, all of
    which `check_shift` finds. A row that is equal at a distance ahead as well, as a constant one is, passes.
    """
    length, tested, worst = 0, 0, 0.0
    for number, (inputs, targets) in enumerate(batches):
        length, tested = max(length, inputs.shape[1]), tested + int((targets >= 0).sum())
        ahead = torch.zeros(len(inputs), device=inputs.device)
        for distance in range(1, min(MAX_AHEAD + 1, inputs.shape[1])):
            ahead = torch.maximum(ahead, equal_share(inputs, targets, -distance))
        for distance in range(min(MAX_DISTANCE, inputs.shape[1])):
            share = equal_share(inputs, targets, distance)
            wrong = (share >= MIN_EQUAL) & (share > ahead)
            worst = max(worst, share[wrong].max().item() if wrong.any() else 0.0)
            if wrong.any():
                [row] = first_true(wrong)
                share_of_row = f"{100 * share[row].item():.0f} % of the targets in row {row} of batch {number}"
                where = f"{share_of_row} are the inputs {distance} positions before them{reason_of(distance)}"
                return Result("shift", "rows", length, worst, MIN_EQUAL, tested, where)
    return Result("shift", "rows", length, worst, MIN_EQUAL, tested)


def equal_share(inputs: Tensor, targets: Tensor, distance: int) -> Tensor:
    """Share of the targets of each row that equal the input `distance` positions before, (B,); 0 for too few."""
    size = targets.shape[1]
    asked = targets[:, max(distance, 0) : size + min(distance, 0)]
    given = inputs[:, max(-distance, 0) : size - max(distance, 0)]
    compared = (asked >= 0).sum(1)
    share = ((asked == given) & (asked >= 0)).sum(1) / compared.clamp(min=1)
    return share * (compared >= MIN_COMPARED)


def check_overlap(train: Tensor | None, validation: Tensor | None) -> Result:
    """At most 1 % of the validation tokens lie in a passage of n tokens that occurs in the training text.

    n is 50, and less for a validation text of less than 3,200 tokens. Passages are compared by hashes of 64 bits, of
    which 10^7 validation and 10^8 training tokens have 5e-5 expected collisions.

    Args:
        train, validation: token ids (N,).

    Raises:
        ValueError: one of them is missing, is empty, or has another type or shape.
    """
    for name, text in (("train", train), ("validation", validation)):
        if not isinstance(text, Tensor) or text.dim() != 1 or not len(text) or text.is_floating_point():
            found = tuple(text.shape) if isinstance(text, Tensor) else type(text).__name__
            raise ValueError(f"{name}={found} must be a tensor of token ids of shape (N,), N > 0; give both texts")
    assert train is not None and validation is not None
    size = min(PASSAGE_TOKENS, max(MIN_PASSAGE_TOKENS, len(validation) // 64), len(validation))
    hashes, known = (passage_hashes(text.cpu().numpy(), size) for text in (validation, train))
    starts = np.isin(hashes, known)  # (N - n + 1,)
    changes = np.zeros(len(validation) + 1, np.int64)
    changes[: len(starts)] += starts
    changes[size : size + len(starts)] -= starts
    share = float((np.cumsum(changes)[:-1] > 0).mean())
    where = ""
    if share > MAX_SHARE:
        what = f"{100 * share:.1f} % of the validation tokens lie in passages of {size} tokens of the training text"
        where = f"{what}; the first one starts at token {int(starts.argmax())} of the validation text"
    return Result("overlap", f"n={size}", len(validation), share, MAX_SHARE, len(validation), where)


def passage_hashes(ids: np.ndarray, size: int) -> np.ndarray:
    """The hash of each passage of `size` ids, uint64 (N - n + 1,); empty if N < n."""
    if len(ids) < size:
        return np.empty(0, np.uint64)
    hashes, base, rolled = mixed(ids.astype(np.uint64)), np.uint64(0x9E3779B97F4A7C15), np.uint64(0)
    rolled = np.zeros(len(ids) - size + 1, np.uint64)
    for offset in range(size):  # a polynomial, modulo 2^64
        rolled = rolled * base + hashes[offset : offset + len(rolled)]
    return mixed(rolled)


def mixed(values: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea and Flood 2014), a permutation of 64-bit integers."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
