"""What the heads do while a model trains: a glance at a little validation text after every validation."""

from lightning import Callback, LightningModule, Trainer

from tril.model.heads.ablation import every_head, head_name
from tril.model.heads.attention_maps import Text
from tril.model.heads.scores import text_scores
from tril.model.training.callbacks.metrics import Metrics

LOGGED = ("entropy", "first")  # of `tril.model.heads.scores.SCORES`


class HeadMetrics(Callback):
    """Logs of every head the mean entropy of its weights (nats) and their mean mass on the first token, as heads/entropy/L0H0 and so on.

    windows  how many of the validation part, from its beginning; a few cost less than a hundredth of the training between two validations
    """

    def __init__(self, windows: int = 2):
        if not isinstance(windows, int) or windows < 1:
            raise ValueError(
                f"callbacks.heads.windows={windows} must be a whole number, at least 1; ~callbacks.heads leaves it out"
            )
        self.windows = windows

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = pl_module.model
        if not trainer.is_global_zero or model.config.n_heads == 0:
            return
        ids, targets = next(iter(trainer.datamodule.val_dataloader()))
        text = Text(ids[: self.windows], targets[: self.windows], pl_module.document_eot)
        heads, _ = text_scores(model, text)
        names = [head_name(head) for head in every_head(model.config)]
        Metrics.write(
            trainer,
            {
                f"heads/{score}/{name}": value
                for score in LOGGED
                for name, value in zip(names, heads[score].flatten().tolist())
            },
        )
