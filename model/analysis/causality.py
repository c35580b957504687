"""The causality certificate: proof by measurement that no output of a model sees the future, and that each sees all of its past.

Every output position is tested against every input position, by changing tokens and by gradients, over a grid of backends, precisions,
windows, lengths and weights; decoding, padding and packing are compared with the full pass at the level of logits.
"""

import contextlib
import itertools
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from model.analysis.canary import LENGTH as CANARY_LENGTH
from model.analysis.canary import Z, canary
from model.analysis.cell import Cell, Result
from model.analysis.checks import run_checks
from model.analysis.reach import expected
from model.analysis.subject import GPTSubject, randomise
from model.backends import BACKENDS
from model.gpt import GPT, GPTConfig

CHECKS = {
    "no future": "no logit changes with a token that it may not see, or has a gradient from it",
    "all of the past": "every position that may be seen has a gradient",
    "attention": "no weight on a forbidden key; softmax(q k / sqrt(D)) on the others",
    "decoding": "full pass = chunks of any size with the cache = left-padded batch",
    "rows": "no sample of a batch changes another",
    "documents": "packed documents = each of them alone",
    "canary": f"trained on random tokens, it does not predict fresh ones ({Z:g} standard errors)",
}
PRECISIONS = ("32-true", "bf16-mixed")
FRESH_VOCABULARY = 128  # rows of a fresh model that no tokenizer asks for more: positions are what is tested
OTHER_WINDOW = 16       # tested beside the window of the config
ODD = 37                # a length that is no multiple of any block
DROPOUT = 0.2           # of the cells in training mode
SHARPER = 100.0         # q and k that much larger, so scores of 10^4
FIRST = 3  # failures that are told
LARGE, SMALL = 3e12, 3e10  # FLOPs for the reach at one length: of the model's own cell, and of each other one


@dataclass
class Certificate:
    """What was measured. `reach` holds the model's own (T, T) matrices, "gradient" and "perturbation", nan where not tested."""

    subject: str
    results: list[Result] = field(default_factory=list)
    reach: dict[str, Tensor] = field(default_factory=dict)
    allowed: Tensor | None = None
    seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.passed for result in self.results)

    def failures(self) -> list[Result]:
        """Those that name layer and head first."""
        order = ["attention", *CHECKS]
        return sorted((result for result in self.results if not result.passed), key=lambda result: order.index(result.check))

    def checks(self) -> dict[str, int]:
        """How many results each check has, in the order of CHECKS."""
        counts = Counter(result.check for result in self.results)
        return {name: counts[name] for name in CHECKS if counts[name]}

    def summary(self) -> dict:
        """Plain values, small enough for a checkpoint."""
        failed = [f"{result.check}: {result.where}; {result.cell}, length {result.length}" for result in self.failures()[:FIRST]]
        return {"passed": self.passed, "checks": self.checks(), "failed": failed, "seconds": round(self.seconds, 2)}

    def line(self) -> str:
        """What a run says of it."""
        verdict = f"sees no future ({', '.join(self.checks())})" if self.passed else f"FAILS: {self.summary()['failed'][0]}"
        return f"causal  {verdict}; certified in {self.seconds:.1f} s"

    def to_dict(self) -> dict:
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        return {"subject": self.subject, **self.summary(), "versions": versions, "results": [asdict(result) for result in self.results]}

    def table(self) -> str:
        """One line a check: how often, over how many pairs or logits, the worst figure beside its bound."""
        lines = [f"{'check':<16} {'runs':>5} {'failed':>6} {'compared':>12}  {'worst (of bound)':<22} what"]
        for name, what in CHECKS.items():
            mine = [r for r in self.results if r.check == name]
            if not mine:
                lines.append(f"{name:<16} {'-':>5} {'-':>6} {'-':>12}  {'not applicable':<22} {what}")
                continue
            worst = max(mine, key=lambda r: (not r.passed, r.worst / r.bound if r.bound else r.worst))
            if name == "all of the past":
                worst = min(mine, key=lambda r: r.worst)
            figure = f"{worst.worst:.2g} ({worst.bound:.2g})"
            lines.append(f"{name:<16} {len(mine):>5} {sum(not r.passed for r in mine):>6} {sum(r.tested for r in mine):>12,}  {figure:<22} {what}")
        return "\n".join(lines)


def certify(subject: str, cells: Iterable[Cell], *, progress: Callable[[str], None] = lambda name: None) -> Certificate:
    """Runs all checks on all cells; the first cell is the model's own: its reach is the picture, and it sings the canary."""
    certificate = Certificate(subject)
    with certificate.timed():
        for number, cell in enumerate(cells):
            progress(cell.name)
            certificate.results += run_checks(cell)
            if number == 0:
                certificate.reach, certificate.allowed = cell.reach, expected(cell.lengths[-1], cell.subject.windows)
                certificate.results += sing(cell)
    return certificate


def sing(cell: Cell) -> Iterator[Result]:
    """The canary's result; none of a function that cannot be trained."""
    if cell.subject.module is None:
        return
    found = canary(cell.subject)
    where = f"loss {found.loss:.4f} on random tokens, of which {found.bound:.4f} is the least"
    yield cell.result("canary", CANARY_LENGTH, max(0.0, -found.margin / found.error), Z, found.n_tokens, found.passed, where)


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

    compile     compiled models too
    exhaustive  every pair of positions in every cell, whatever it costs; else long inputs are sampled where all pairs are too dear
    """
    own = "initial" if weights is None else "trained"
    random = randomise(GPT(config), torch.Generator().manual_seed(0)).state_dict()

    def cell(kind: str, precision: str, *, training: bool = False, compiled: bool = False, main: bool = False, **changes) -> Cell:
        if changes.get("backend") == "flex":
            changes["attn_dropout"] = 0.0  # it has none
        changed = replace(config, **changes)
        model = GPT(changed)
        model.load_state_dict(weights if kind == "trained" else model.state_dict() if kind == "initial" else random)
        if kind == "sharp":
            sharpen(model)
        labels = {"weights": kind, "backend": changed.backend, "precision": precision, "window": changed.window}
        labels |= {name: True for name, on in (("dropout", training), ("compiled", compiled)) if on}
        plain = kind in ("random", "trained") and not (training or compiled)
        return Cell(
            GPTSubject(model.to(device).train(training), precision=precision, compile=compiled),
            labels,
            _lengths(changed) if plain else [min(ODD, config.context_length)],
            budget=math.inf if exhaustive else LARGE if main else SMALL,
            past=plain,
            function=plain,
        )

    yield cell("random" if weights is None else own, precisions[0], main=True)
    windows = [config.window, OTHER_WINDOW] if config.window is None and config.causal else [config.window]
    dropout = dict.fromkeys(("embd_dropout", "attn_dropout", "resid_dropout"), DROPOUT)
    for backend, precision in itertools.product(backends, precisions):
        if backend == "flex" and device == "cpu" and precision != precisions[0]:
            continue  # without its kernels, which are for GPUs, flex is a slow reference: one precision tells all
        for window in windows:
            yield cell("random", precision, backend=backend, window=window)
        yield cell(own, precision, backend=backend)
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


def _lengths(config: GPTConfig) -> list[int]:
    """1, 2, an odd one, around the window, all of the context."""
    around = [] if config.window is None else [config.window, config.window + 1]
    return sorted({min(n, config.context_length) for n in (1, 2, ODD, *around, config.context_length)})
