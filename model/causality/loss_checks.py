"""The certificate of a loss and of the data pipeline before it, for any project.

    report = certify_loss(losses, batches, model=model, vocab_size=V)    # the loss and its batches
    report = certify_loss(train=tokens, validation=other_tokens)         # two texts

B batch, T positions, N tokens of a text, V vocabulary, K kinds of random tokens.
"""

import itertools
import math
import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tril.model.causality.batch_checks import (
    MAX_BATCHES,
    Batch,
    Batches,
    check_overlap,
    check_shift,
    check_shift_of_rows,
    checked_batches,
    first_batches,
    random_batches,
    windows_like,
)
from tril.model.causality.canary import KINDS, WARMUP, Canary, Z
from tril.model.causality.case import Result, first_true, one_line
from tril.model.causality.certificate import Certificate
from tril.model.causality.loss_probe import Losses, LossProbe, mode_name, modes, per_target, restored
from tril.model.causality.subject import randomize, same_random_numbers
from tril.model.causality.target_checks import check_targets, logits_of

TRAINING_SECONDS = 20.0  # of the canary
FRESH_TOKENS = 4096
LR = 3e-3


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
    label smoothing, cannot make a loss too low.) "no future": it depends on no later input. "shift": no target is an
    input at its position or before. "pipeline canary": trained on random tokens, it does not predict fresh ones.
    "overlap": the validation text is not in the training text.

    Args:
        losses: inputs and targets (B, T) -> nats of each target (B, T); for the canary, differentiable.
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
            certificate.results.append(check_overlap(train, validation))
        if losses is not None:
            with restored(model):
                _certify_pipeline(certificate, losses, batches, model, tokens, vocab_size, steps)
    if not certificate.results:
        raise ValueError("certify_loss has nothing to check; give losses and batches, or train and validation")
    return certificate


def _certify_pipeline(
    certificate: Certificate,
    losses: Losses,
    batches: Iterable[Batch] | Batches,
    model: nn.Module | None,
    tokens: Tensor | None,
    vocab_size: int | None,
    steps: int,
) -> None:
    if tokens is not None and not callable(batches):
        raise ValueError("tokens is read by a function batches(tokens, generator) only; give one, or leave tokens out")
    if vocab_size is None:
        vocab_size = vocab_size_of(model)
    if callable(batches):
        certificate.results.append(shift_of_pipeline(certificate, batches, tokens, vocab_size))
        make, real = batches, first_batches(batches, tokens, vocab_size)
    else:
        real = list(checked_batches(batches))
        if not real:
            raise ValueError("batches yields nothing; give at least one pair (inputs, targets)")
        make = windows_like(real[0])
        certificate.results.append(check_shift_of_rows(real))
    probe = LossProbe(losses, *real[0], vocab_size, model)
    largest = max(int(probe.inputs.max()), int(probe.targets.max()))
    if largest >= vocab_size:
        raise ValueError(f"vocab_size={vocab_size} must be above every token, and the batches have {largest}")
    if not probe.counted.any():
        raise ValueError("every target of the first batch is negative, so ignored; give a batch with targets")
    for case in modes(model):
        probe.case = case
        certificate.results.append(probe.measure())
        if certificate.results[-1].passed:  # else nothing can be compared
            certificate.results += [*check_targets(probe), *check_future(probe)]
    if model is None or not any(p.requires_grad for p in model.parameters()):
        certificate.notes.append("no pipeline canary, which needs a model with parameters; give model=")
        return
    try:
        certificate.results += check_canary(probe, make, steps)
    except RuntimeError as error:  # losses without gradient
        certificate.notes.append(f"no pipeline canary: {one_line(error)}")


def vocab_size_of(model: nn.Module | None) -> int:
    """V of the logits of the model. Raises ValueError if it gives none."""
    try:
        assert model is not None
        with torch.no_grad():
            logits = logits_of(model, torch.zeros(2, 8, dtype=torch.int64, device=next(model.parameters()).device))
        assert logits.dim() == 3
    except Exception:  # a model that needs other arguments
        raise ValueError("vocab_size is unknown: model(ids) gives no logits (B, T, V); give vocab_size=") from None
    return logits.shape[-1]


def shift_of_pipeline(certificate: Certificate, batches: Batches, tokens: Tensor | None, vocab_size: int) -> Result:
    """The result of "shift" by distinct tokens, or by rows where the pipeline refuses them."""
    try:
        result, note = check_shift(batches, vocab_size)
    except Exception as error:  # of a pipeline that looks tokens up
        result = check_shift_of_rows(first_batches(batches, tokens, vocab_size))
        note = f"shift: by rows, because batches(distinct ids) raised {one_line(error)}"
    certificate.notes += [note] if note else []
    return result


def check_future(probe: LossProbe) -> list[Result]:
    """No loss depends on a later input; nothing to check for a single position."""
    n_rows, length = probe.inputs.shape
    if length == 1:
        return []
    positions, worst, tested, where, query, key = torch.arange(length), 0.0, 0, "", None, None
    for tokens in probe.replacements(probe.inputs):
        cuts = torch.randint(1, length, (n_rows, 1), generator=probe.generator)
        after = (positions >= cuts).to(tokens.device)  # (B, T)
        change = (probe(torch.where(after, tokens, probe.inputs), probe.targets) - probe.base).abs()
        change = change.masked_fill(~probe.counted | after, 0.0)
        worst, tested = max(worst, change.max().nan_to_num(torch.inf).item()), tested + int((~after).sum())
        if not where and not change.max() <= probe.bound:
            row, query = first_true(~(change <= probe.bound))
            key = int(cuts[row])
            what = f"the loss at position {query} of row {row} changes by {change[row, query].item():.2g} nats"
            where = f"{what} when the inputs from position {key} on are replaced"
    return [probe.result("no future", worst, probe.bound, tested, where, query, key)]


def check_canary(probe: LossProbe, batches: Batches, steps: int, n_fresh: int = FRESH_TOKENS) -> list[Result]:
    """Trains the model through the pipeline on random tokens; its loss on fresh ones may not be below ln K.

    Targets that the pipeline inserts are left out.

    Args:
        n_fresh: fresh tokens in each mode, at least.

    Raises:
        RuntimeError: the losses have no gradient, or no batch has a random token as a target.
    """
    model, device = probe.model, probe.device
    assert model is not None
    usual = torch.arange(4, probe.vocab_size - 4) if probe.vocab_size >= 16 else torch.arange(probe.vocab_size)
    usual = usual[usual != (-1 if probe.ignored is None else probe.ignored)]  # ids at the ends often have a meaning
    kinds = usual[torch.randperm(len(usual), generator=probe.generator)[:KINDS]]
    pairs = random_batches(batches, kinds, probe.generator)

    def losses() -> Tensor:
        for inputs, targets in itertools.islice(pairs, MAX_BATCHES):
            inputs, targets = inputs.to(device), targets.to(device)
            chosen = torch.isin(targets, kinds.to(device))
            if chosen.any():
                return per_target(probe.losses, inputs, targets)[chosen].float()
        raise RuntimeError(f"no target of {MAX_BATCHES} batches is a token of the text")

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    end, results = time.monotonic() + TRAINING_SECONDS, []
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
            error = fresh.std().item() / len(fresh) ** 0.5
            test = Canary(fresh.mean().item(), error, math.log(len(kinds)), len(fresh), probe.inputs.shape[1])
            loss = f"loss {test.loss:.4f} ± {error:.4f} nats on random tokens of {len(kinds)} kinds"
            where = "" if test.passed else f"{loss}, but without a leak it is at least {test.bound:.4f}"
            probe.case = f"weights=trained mode={mode_name(training)}"
            results.append(probe.result("pipeline canary", test.below, Z, len(fresh), where))
    return results
