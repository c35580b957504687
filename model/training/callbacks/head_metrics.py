"""Logs attention statistics of every head while a model trains."""

from lightning import Callback, Trainer

from tril.model.heads.ablation import all_heads, head_name
from tril.model.heads.attention_maps import TokenWindows
from tril.model.heads.scores import text_scores
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.module import TrainingModule

LOGGED = ("entropy", "first")  # of `tril.model.heads.scores.SCORES`


class HeadMetrics(Callback):
    """Logs each head's mean entropy of its weights (nats) and mean mass on the first token, as heads/entropy/L0H0.

    Args:
        windows: the first validation windows, over which the means are taken.
    """

    def __init__(self, windows: int) -> None:
        self.windows = windows

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        model = pl_module.whole_model() if pl_module.model.config.n_heads else None  # gathers a sharded model
        if model is None or not trainer.is_global_zero:
            return
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue] set by fit
        ids, targets = data.first_val_windows(self.windows)
        text = TokenWindows(ids, targets, pl_module.losses.document_eot)
        heads, _ = text_scores(model, text)
        names = [head_name(head) for head in all_heads(model.config)]
        metrics = {
            f"heads/{score}/{name}": value
            for score in LOGGED
            for name, value in zip(names, heads[score].flatten().tolist(), strict=True)
        }
        Metrics.write(trainer, metrics)
