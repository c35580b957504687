"""The causality certificate: proof by measurement that no output of a model sees the future, and that each sees all of its past.

Every output position is tested against every input position, by changing tokens and by gradients, over a grid of backends, precisions,
windows, lengths and weights; decoding, padding and packing are compared with the full pass at the level of logits.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tril.model.backends import BACKENDS, FLEX_SMALLEST_HEAD
from tril.model.causality.canary import Z, canary
from tril.model.causality.case import ODD, Cell, lengths_to_test
from tril.model.causality.certificate import Certificate
from tril.model.causality.checks import run_checks
from tril.model.causality.subject import GPTSubject, randomise
from tril.model.gpt import GPT, GPTConfig

PRECISIONS = ("32-true", "bf16-mixed")
FRESH_VOCABULARY = 128  # rows of a fresh model that no tokenizer asks for more: positions are what is tested
OTHER_WINDOW = 16  # tested beside the window of the config
FLEX_ON_CPU = 130  # longest there: more than one of its blocks of 128
DROPOUT = 0.2  # of the cells in training mode
SHARPER = 100.0  # q and k that much larger, so scores of 10^4
LARGE, SMALL = 3e12, 2e10  # FLOPs for the reach at one length: of the model's own cell, and of each other one


def certify(subject: str, cells: Iterable[Cell], *, progress: Callable[[str], None] = lambda name: None) -> Certificate:
    """Runs all checks on all cells; the first cell is the model's own: its reach is the picture, and it sings the canary."""
    certificate = Certificate(subject)
    with certificate.timed():
        for number, cell in enumerate(cells):
            progress(cell.name)
            certificate.results += run_checks(cell)
            if number == 0:
                certificate.reach, certificate.allowed = cell.reach, cell.subject.visible(cell.lengths[-1])
                if cell.subject.differentiable:  # what has no gradient cannot be trained
                    certificate.canary = found = canary(cell.subject)
                    where = f"loss {found.loss:.4f} on random tokens, which cost {found.bound:.4f} at least"
                    certificate.results.append(
                        cell.result("canary", found.length, found.below, Z, found.n_tokens, found.passed, where)
                    )
    return certificate


def gpt_cells(
    config: GPTConfig,
    weights: dict[str, Tensor] | None = None,
    *,
    device: str = "cpu",
    compile: bool = False,
    exhaustive: bool = False,
    precisions: Sequence[str] = PRECISIONS,
    backends: Sequence[str] = tuple(BACKENDS),
) -> Iterator[Cell]:
    """The grid of a GPT: its own weights (of a checkpoint; None: as initialised), random ones and sharp ones, in every backend.
    Without attention there are no scores to be sharp, and no backends; flex is left out where it cannot compute heads so small.

    compile     compiled models too
    exhaustive  every pair of positions in every cell, whatever it costs; else long inputs are sampled where all pairs are too dear
    """
    own = "initial" if weights is None else "trained"
    random = randomise(GPT(config), torch.Generator().manual_seed(0)).state_dict()

    def cell(
        kind: str, precision: str, *, training: bool = False, compiled: bool = False, main: bool = False, **changes
    ) -> Cell:
        if changes.get("backend") == "flex" or not config.n_heads:
            changes["attn_dropout"] = 0.0  # they have none
        changed = replace(config, **changes)
        model = GPT(changed)
        model.load_state_dict(weights if kind == "trained" else model.state_dict() if kind == "initial" else random)
        if kind == "sharp":
            sharpen(model)
        labels = {"weights": kind, "backend": changed.backend, "precision": precision, "window": changed.window}
        labels |= {name: True for name, on in (("dropout", training), ("compiled", compiled)) if on}
        plain = kind in ("random", "trained") and not (training or compiled)
        lengths = [min(ODD, config.context_length)]
        if main or plain and kind == "random":
            lengths = lengths_to_test(config.context_length, [changed.window])
        if changed.backend == "flex" and device == "cpu":
            lengths = sorted({min(n, FLEX_ON_CPU) for n in lengths})
        return Cell(
            GPTSubject(model.to(device).train(training), precision=precision, compile=compiled),
            labels,
            lengths,
            budget=math.inf if exhaustive else LARGE if main else SMALL,
            past=kind in ("random", "trained") and not training,
            function=plain,
        )

    yield cell("random" if weights is None else own, precisions[0], main=True)
    windows = (
        [config.window, OTHER_WINDOW] if config.n_heads and config.window is None and config.causal else [config.window]
    )
    dropout = dict.fromkeys(("embd_dropout", "attn_dropout", "resid_dropout"), DROPOUT)
    if not config.n_heads:
        backends = [config.backend]  # none of them computes anything
    elif device == "cuda" and config.head_size < FLEX_SMALLEST_HEAD:
        backends = [backend for backend in backends if backend != "flex"]
    for backend, precision in itertools.product(backends, precisions):
        slow = (
            backend == "flex" and device == "cpu"
        )  # where it has no kernels, and computes the same in every precision
        if slow and precision != precisions[0]:
            continue
        for window in windows:
            yield cell("random", precision, backend=backend, window=window)
        if not slow:
            yield cell(own, precision, backend=backend)
        if config.n_heads:
            yield cell("sharp", precision, backend=backend)
        yield cell("random", precision, backend=backend, training=True, **dropout)
    if compile:
        yield from (cell("random", precision, compiled=True) for precision in precisions)


@torch.no_grad()
def sharpen(model: GPT) -> None:
    """Makes scores so large that a mask which is a finite number, or is added too late, loses against them."""
    for block in model.blocks:
        for norm, projection in ((block.attn.q_norm, block.attn.q_proj), (block.attn.k_norm, block.attn.k_proj)):
            getattr(norm, "weight", projection.weight).mul_(SHARPER)
