"""Short runs of Lightning's Trainer on random tokens, for the tests of callbacks."""

import tempfile

import torch
from lightning import Callback, Trainer

from tril.model.gpt import GPT, GPTConfig
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.hardware import Hardware
from tril.model.training.module import TrainingModule
from tril.model.training.optim import OptimConfig
from tril.model.training.schedule import ScheduleConfig

V, T, B, STEPS = 31, 12, 2, 8
SHAPE = {"vocab_size": V, "context_length": T, "n_layers": 2, "dim": 16, "n_heads": 2, "tie_embeddings": False}
CPU = Hardware("cpu", "32-true", None, "a CPU", None)
OPTIM = OptimConfig(schedule=ScheduleConfig(kind="linear", warmup_steps=2))


def batches(n: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, (B, T) each."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (n, B, T + 1), generator=random)
    return [(each[:, :-1], each[:, 1:]) for each in ids]


def new_model(**choices) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SHAPE, **choices}))


def new_module(model: GPT, **options) -> TrainingModule:
    return TrainingModule(model, OPTIM, total_steps=STEPS, val_bytes={"": float}, payload={}, **options)


def fit(module: TrainingModule, *callbacks: Callback, checkpoint=None, done: int = 0, **options) -> Trainer:
    """Trains on `batches`, in their order; those of a resumed run without the `done` first ones."""
    metrics = Metrics(CPU, tempfile.mkdtemp())
    options = {"accelerator": "cpu", "logger": metrics.run_log, "log_every_n_steps": 2, **options}
    options |= {"num_sanity_val_steps": 0, "check_val_every_n_epoch": None, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "max_steps": STEPS}
    trainer = Trainer(callbacks=[metrics, *callbacks], **{"val_check_interval": STEPS, **options})
    train = Remaining(batches(STEPS * trainer.accumulate_grad_batches), done)
    trainer.fit(module, train, Remaining(batches(2)), ckpt_path=checkpoint, weights_only=True)
    return trainer


class Remaining:
    """A loader of which a resumed run reads the rest; as the loaders of a run, it has the length of the whole."""

    batch_size, world_size = B, 1

    def __init__(self, items: list, done: int = 0) -> None:
        self.items, self.done, self.n_windows = items, done, B * len(items)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self):
        return iter(self.items[self.done :])


class Before(Callback):
    """Calls `change(module)` before a step, counted from 1."""

    def __init__(self, step: int, change):
        self.step, self.change = step, change

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step + 1 == self.step and batch_idx % trainer.accumulate_grad_batches == 0:
            self.change(pl_module)


def weights(module: TrainingModule) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.model.state_dict().items()}


def damaged_losses(module: TrainingModule, bad: dict[int, float]) -> TrainingModule:
    """The module with the losses of some batches multiplied by a factor, such as NaN: batch index -> factor."""
    step = module.training_step
    module.training_step = lambda batch, batch_idx: step(batch, batch_idx) * bad.get(batch_idx, 1.0)
    return module
