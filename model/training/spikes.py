"""Finds steps whose training loss is far above those before."""

from bisect import bisect_left, insort
from collections import deque
from typing import Any

WINDOW = 100  # steps
THRESHOLD = 6.0  # z-score, see `SpikeDetector`
SIGMAS_PER_IQR = 1.349  # of a normal distribution
MIN_SIGMA = 1e-3  # relative to the median, so that rounding of a constant loss is no spike


class SpikeDetector:
    """Compares the loss of each step with the losses of the `WINDOW` steps before it.

    Its z-score is (loss - median) / (interquartile range / 1.349): quartiles of the window in place of mean and
    standard deviation, because an earlier spike in the window, or the decrease at the start of a run, would inflate
    these. Consecutive steps above the threshold are one spike.

    Attributes:
        spikes: "step", "loss" in nats per token and "z" at the highest loss of each spike.
    """

    def __init__(self) -> None:
        self.spikes: list[dict[str, Any]] = []
        self._window: deque[float] = deque()
        self._sorted: list[float] = []  # the same losses
        self._inside = False  # the last step was part of a spike

    def add(self, step: int, loss: float) -> None:
        """Adds the finite loss of a step."""
        z = self._score(loss)
        if z > THRESHOLD:
            spike = {"step": step, "loss": loss, "z": z}
            if not self._inside:
                self.spikes.append(spike)
            elif loss > self.spikes[-1]["loss"]:
                self.spikes[-1] = spike
        self._inside = z > THRESHOLD
        self._window.append(loss)
        insort(self._sorted, loss)
        if len(self._window) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._window.popleft())]

    def _score(self, loss: float) -> float:
        """The z-score; 0 before the window is full."""
        if len(self._window) < WINDOW:
            return 0.0
        low, median, high = (self._sorted[WINDOW * quarter // 4] for quarter in (1, 2, 3))
        return (loss - median) / max((high - low) / SIGMAS_PER_IQR, MIN_SIGMA * abs(median), 1e-30)

    def state_dict(self) -> dict[str, Any]:
        return {"spikes": list(self.spikes), "window": list(self._window), "inside": self._inside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.spikes, self._inside = list(state["spikes"]), state["inside"]
        self._window, self._sorted = deque(state["window"]), sorted(state["window"])
