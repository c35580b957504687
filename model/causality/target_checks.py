"""The check "targets" of a loss: it depends on no other target, and its own is predicted by a distribution.

B batch, T positions, V vocabulary.
"""

import contextlib
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tril.model.causality.canary import Z
from tril.model.causality.case import Result, first_true
from tril.model.causality.loss_probe import LossProbe
from tril.model.causality.subject import same_random_numbers

SUM_ROUNDING, LOW_PRECISION_ROUNDING = 1e-4, 0.05  # of a sum of probabilities that should be 1, or of the largest loss
MAX_SUMMED = 512  # tokens of the vocabulary, each of which takes a pass; a larger vocabulary is sampled
MAX_FLOPS = 2e11  # of these passes
SAMPLES = 64  # passes of the estimate
MAX_DRAWN = 1 << 24  # probabilities in memory at once


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """(B, T, V), also of a model that returns them as `.logits`."""
    out = model(inputs)
    return getattr(out, "logits", out)


def check_targets(probe: LossProbe) -> list[Result]:
    """A loss depends on no other target, and is that of a distribution."""
    n_parameters = sum(p.numel() for p in probe.model.parameters()) if probe.model else 0
    cheap = 2 * n_parameters * probe.vocab_size * probe.inputs.numel() <= MAX_FLOPS
    own = summed if cheap and probe.vocab_size <= MAX_SUMMED else sampled
    return [check_other_targets(probe, probe.replacements(probe.targets)), own(probe)]


def check_other_targets(probe: LossProbe, replacements: Iterable[Tensor]) -> Result:
    """A loss depends on no other target: half of them are replaced by those of each replacement (B, T)."""
    worst, tested, where, query = 0.0, 0, "", None
    for tokens in replacements:
        chosen = (torch.rand(tokens.shape, generator=probe.generator) < 0.5).to(tokens.device) & probe.counted
        change = (probe(probe.inputs, torch.where(chosen, tokens, probe.targets)) - probe.base).abs()
        change = change.masked_fill(~probe.counted | chosen, 0.0)
        worst, tested = max(worst, change.max().nan_to_num(torch.inf).item()), tested + int(chosen.sum())
        if not where and not change.max() <= probe.bound:
            row, query = first_true(~(change <= probe.bound))
            size = f"by {change[row, query].item():.2g} nats"
            where = f"the loss at position {query} of row {row} changes {size} when other targets are replaced"
    return probe.result("targets", worst, probe.bound, tested, where, query)


def check_own_targets(probe: LossProbe, logits: Tensor) -> Result:
    """The first losses are -ln softmax of these logits (b, T, V), which were computed without the targets."""
    targets, rows = probe.targets[: len(logits)], len(logits)
    expected = F.cross_entropy(logits.double().mT, targets.clamp(min=0), reduction="none")
    difference = (probe.base[:rows] - expected).abs().masked_fill(~probe.counted[:rows], 0.0)
    low_precision = probe.low_precision or logits.dtype in (torch.bfloat16, torch.float16)
    rounding = LOW_PRECISION_ROUNDING if low_precision else SUM_ROUNDING
    bound, worst = rounding * expected.max().item(), difference.max().nan_to_num(torch.inf).item()
    if worst <= bound:
        return probe.result("targets", worst, bound, difference.numel(), "")
    row, query = first_true(~(difference <= bound))
    which = f"the loss at position {query} of row {row} differs by {difference[row, query].item():.2g} nats"
    where = f"{which} from -ln softmax of the logits, which do not know its target"
    return probe.result("targets", worst, bound, difference.numel(), where, query)


def summed(probe: LossProbe) -> Result:
    """The probabilities of all tokens as the target of a position add up to at most 1."""
    total = torch.zeros(probe.targets.shape, dtype=torch.float64, device=probe.device)
    for token in range(probe.vocab_size):
        losses = probe(probe.inputs, torch.where(probe.counted, token, probe.targets))
        if not losses[probe.counted].any() and probe.ignored in (None, token):
            probe.ignored = token
        else:
            total += (-losses).exp()
    above = (total - 1).masked_fill(~probe.counted, 0.0)
    bound, worst = LOW_PRECISION_ROUNDING if probe.low_precision else SUM_ROUNDING, above.max().item()
    if worst <= bound:
        return probe.result("targets", worst, bound, total.numel() * probe.vocab_size, "")
    row, query = first_true(~(above <= bound))
    which = f"the probabilities exp(-loss) of all {probe.vocab_size} tokens at position {query} of row {row}"
    where = f"{which} add up to {total[row, query].item():.4f}, not 1: the loss depends on its own target"
    return probe.result("targets", worst, bound, total.numel() * probe.vocab_size, where, query=query)


def sampled(probe: LossProbe) -> Result:
    """An estimate of the same sum over random positions: the mean of exp(-loss) / q over targets drawn from q.

    The mean is that sum for any q. Half of q is uniform, and half follows the logits of the model where it gives them.
    """
    at = probe.counted.flatten().nonzero()[:, 0]
    chosen = torch.randperm(len(at), generator=probe.generator)[: max(1, MAX_DRAWN // probe.vocab_size)]
    at = at[chosen.to(at.device)]  # (P,) positions
    q = torch.full((len(at), probe.vocab_size), 1 / probe.vocab_size, dtype=torch.float64, device=probe.device)
    with contextlib.suppress(Exception), same_random_numbers(probe.device), torch.no_grad():
        assert probe.model is not None  # without logits, and of a model that needs other arguments, q is uniform
        logits = logits_of(probe.model, probe.inputs).flatten(0, 1)[at, : probe.vocab_size]
        q = (q + logits.double().softmax(-1)) / 2
    ratios, ignored = [], set()
    samples = torch.multinomial(q.cpu(), SAMPLES, replacement=True, generator=probe.generator).to(q.device)
    for drawn in samples.split(1, dim=1):  # (P, 1)
        targets = probe.targets.flatten().scatter(0, at, drawn[:, 0]).view_as(probe.targets)
        losses = probe(probe.inputs, targets).flatten()[at]
        ratio, zero = (-losses).exp() / q.gather(1, drawn)[:, 0], losses == 0
        ignored |= set(drawn[zero, 0].tolist())
        ratios.append(torch.stack([ratio.mean(), ratio.masked_fill(zero, 0).mean()]))
    means = torch.stack(ratios)[:, int(len(ignored) == 1)]  # (SAMPLES,); a single token without loss is ignored
    total, error = means.mean().item(), means.std().item() / SAMPLES**0.5
    bound = Z * error + (LOW_PRECISION_ROUNDING if probe.low_precision else SUM_ROUNDING)
    which = f"the probabilities exp(-loss) of all {probe.vocab_size} tokens, estimated from {SAMPLES} passes,"
    where = f"{which} add up to {total:.4f} ± {error:.4f}, not 1: the loss depends on its own target"
    return probe.result("targets", total - 1, bound, SAMPLES * len(at), "" if total - 1 <= bound else where)
