"""The result of a certification: every figure beside its bound, as a table, as plain values, in one line."""

import contextlib
import math
import platform
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from tril.model.causality.canary import Canary, Z
from tril.model.causality.case import Result

CHECKS = {
    "no future": "no logit changes with a token that it may not see, or has a gradient from it",
    "all of the past": "every position that may be seen has a gradient",
    "attention": "no weight on a forbidden key; softmax(q k / sqrt(D)) on the others",
    "decoding": "full pass = chunks of any size with the cache, whole or their last position = left-padded batch",
    "rows": "no sample of a batch changes another",
    "documents": "packed documents = each of them alone",
    "canary": f"trained on random tokens, it does not predict fresh ones ({Z:g} standard errors)",
}


@dataclass
class Certificate:
    """What was measured. `reach` holds the model's own (T, T) matrices, "gradient" and "perturbation", nan where not tested."""

    subject: str
    results: list[Result] = field(default_factory=list)
    reach: dict[str, Tensor] = field(default_factory=dict)
    allowed: Tensor | None = None
    canary: Canary | None = None
    seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.passed for result in self.results)

    def failures(self) -> dict[str, list[Result]]:
        """By check; attention first, which alone names layer and head."""
        failed = {
            name: [r for r in self.results if r.check == name and not r.passed] for name in ("attention", *CHECKS)
        }
        return {name: results for name, results in failed.items() if results}

    def checks(self) -> dict[str, int]:
        """How many results each check has, in the order of CHECKS."""
        counts = Counter(result.check for result in self.results)
        return {name: counts[name] for name in CHECKS if counts[name]}

    def summary(self) -> dict:
        """Plain values, small enough for a checkpoint."""
        failed = [
            f"{name}: {results[0].where}; {results[0].cell}, length {results[0].length}"
            for name, results in self.failures().items()
        ]
        return {"passed": self.passed, "checks": self.checks(), "failed": failed, "seconds": round(self.seconds, 2)}

    def line(self) -> str:
        """What a run says of it."""
        verdict = (
            f"sees no future ({', '.join(self.checks())})" if self.passed else f"FAILS: {self.summary()['failed'][0]}"
        )
        return f"causal  {verdict}; certified in {self.seconds:.1f} s"

    def to_dict(self) -> dict:
        """Everything but the matrices, for JSON."""
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        canary = None if self.canary is None else asdict(self.canary) | {"margin": self.canary.margin}
        results = [{name: _for_json(value) for name, value in asdict(result).items()} for result in self.results]
        return {"subject": self.subject, **self.summary(), "canary": canary, "versions": versions, "results": results}

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
            failed, tested = sum(not r.passed for r in mine), sum(r.tested for r in mine)
            figure = f"{worst.worst:.2g} ({worst.bound:.2g})"
            lines.append(f"{name:<16} {len(mine):>5} {failed:>6} {tested:>12,}  {figure:<22} {what}")
        if self.canary is not None:
            found = self.canary
            lines.append(
                f"canary: loss {found.loss:.4f} ± {found.error:.4f} nats per token; causal models cost {found.bound:.4f} or more"
            )
        return "\n".join(lines)


def _for_json(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
