"""Settings of a run that belong to no other group: the seed, compilation, causality and the trainer."""

from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from tril.model.training.hardware import Accelerator, Compile, Precision
from tril.model.validation import strict_settings

Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=strict_settings())
class TopLevelConfig:
    """The single keys of configs/train.yaml."""

    seed: Annotated[int, Field(ge=0, lt=2**64)]  # the range of torch.Generator
    compile: Compile


@dataclass(frozen=True, config=strict_settings("causality"))
class CausalityConfig:
    """`allow_leak` trains a model whose outputs see the future."""

    allow_leak: bool


@dataclass(frozen=True, config=strict_settings("trainer"))
class TrainerConfig:
    """The arguments of `lightning.Trainer` that a run depends on; Lightning checks the others."""

    accelerator: Accelerator
    precision: Precision
    max_steps: Count
    max_time: Any
    val_check_interval: Count
    accumulate_grad_batches: Count
    log_every_n_steps: Count
    limit_train_batches: Any = None
    limit_val_batches: Any = None

    @model_validator(mode="after")
    def _check_limits(self) -> "TrainerConfig":
        if isinstance(self.max_time, int | float):
            limit = "must be DD:HH:MM:SS, such as 00:00:10:00 for ten minutes, or null"
            raise ValueError(f"trainer.max_time={self.max_time} {limit}")
        if self.limit_val_batches == 0:
            raise ValueError("trainer.limit_val_batches=0 skips the validation that every run ends with; leave it out")
        limit, batches = self.limit_train_batches, self.accumulate_grad_batches
        whole = isinstance(limit, int) and limit % batches == 0 or isinstance(limit, float) and limit == 1
        if batches > 1 and limit is not None and not whole:
            needs = f"must be a multiple of trainer.accumulate_grad_batches={batches}, so that every step is complete"
            remedy = f"use {max(1, int(limit) // batches) * batches}"
            raise ValueError(f"trainer.limit_train_batches={limit} {needs}; {remedy}")
        return self
