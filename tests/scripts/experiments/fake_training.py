"""Takes the place of training processes: each run ends at once, with losses that are a known function."""

import json
import math

import numpy as np

from tril.model.atomic_files import write_json

CHOOSING = [0, 4, 8]  # the documents that choose, of twelve
TRIAL_SEED = 1000


class FakeTraining:
    """Losses that are parabolas in the logarithm of the multiplier.

    Attributes:
        best: number of heads -> the multiplier with the lowest loss on the documents that choose. On the other
            documents, and on the whole text, the lowest loss is at 1 / best.
        started: number of heads, multiplier, seed, and whether it was resumed, of each run.
        outcomes: multiplier -> "fails", "diverges", "stopped" or "killed", instead of a finished run.
    """

    def __init__(self, best):
        self.best, self.started, self.outcomes = best, [], {}

    def spawn(self, arguments, log, lock):
        folder, settings = log.parent, dict(text.partition("=")[::2] for text in arguments)
        if resumed := "resume" in settings:
            settings = json.loads((folder / "settings.json").read_text())
        (folder / "settings.json").write_text(json.dumps(settings))
        assert not [key for key in settings if "tune" in key], "a run does not know that it was tuned"
        heads, scale, seed = int(settings["model.n_heads"]), float(settings["optim.lr_scale"]), int(settings["seed"])
        self.started.append((heads, scale, seed, resumed))
        outcome = self.outcomes.get(scale)
        if outcome in ("stopped", "killed"):
            (folder / "checkpoints").mkdir()
            (folder / "checkpoints" / "last.ckpt").touch()
            if outcome == "killed":
                raise KeyboardInterrupt
            return 128 + 15
        if outcome == "fails":
            log.write_text("out of memory\n")
            return 1
        self.finish(folder, heads, scale, diverged=outcome == "diverges")
        return 0

    def finish(self, folder, heads, scale, diverged):
        chooses = math.nan if diverged else 3 + math.log2(scale / self.best[heads]) ** 2
        others = 3 + math.log2(scale * self.best[heads]) ** 2
        losses, targets = np.full(12, others), np.full(12, 100)
        losses[CHOOSING] = chooses
        np.savez(
            folder / "windows_last.npz",
            step=8,
            context_length=30,
            nll=np.full(40, others * 30),
            targets=np.full(40, 30),
            document_nll=losses * targets,
            document_targets=targets,
        )
        final = None if diverged else others
        summary = {"final_val_loss": final, "final_val_bpb": 1.0, "seconds": 10.0, "tokens": 50, "flops_per_token": 7}
        write_json(folder / "summary.json", summary)  # atomic as that of a run: other jobs read it while it is written

    def trials(self):
        """Number of heads and multiplier of the runs with the seed of the trials."""
        return [(heads, scale) for heads, scale, seed, _ in self.started if seed == TRIAL_SEED]

    def runs(self):
        """Number of heads, multiplier and seed of the others."""
        return [(heads, scale, seed) for heads, scale, seed, _ in self.started if seed != TRIAL_SEED]
