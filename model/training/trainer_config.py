"""Settings of a run that belong to no other group: the seed, compilation, causality and the trainer."""

import re
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import strict_settings
from tril.model.training.hardware import Accelerator, Compile, Precision

Count = Annotated[int, Field(ge=1, lt=2**63)]
PRECISIONS = {  # Lightning's and other short names
    "32": "32-true", "fp32": "32-true", "float32": "32-true",
    "16": "16-mixed", "fp16": "16-mixed", "float16": "16-mixed",
    "bf16": "bf16-mixed", "bfloat16": "bf16-mixed",
}  # fmt: skip


@dataclass(frozen=True, config=strict_settings())
class TopLevelConfig:
    """The single keys of configs/train.yaml."""

    seed: Annotated[int, Field(ge=0, lt=2**64)]  # the range of torch.Generator
    compile: Compile


@dataclass(frozen=True, config=strict_settings("causality"))
class CausalityConfig:
    """`allow_leak` trains a model whose outputs see the future."""

    allow_leak: bool


@dataclass(frozen=True, config=strict_settings("sweep"))
class SweepConfig:
    """Settings of `python train.py -m`."""

    skip_invalid: bool
    new: bool


@dataclass(frozen=True, config=strict_settings("checkpoint"))
class CheckpointConfig:
    """When a run writes checkpoints apart from its validations, its last step and its stop by a signal; None: never."""

    every_minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    every_n_steps: Count | None


@dataclass(frozen=True, config=strict_settings("trainer"))
class TrainerConfig:
    """The arguments of `lightning.Trainer` that a run may have, and `tensor_parallel_size`."""

    accelerator: Accelerator
    precision: Precision
    max_steps: Count
    max_time: Any
    val_check_interval: Count
    accumulate_grad_batches: Count
    log_every_n_steps: Count
    strategy: Literal["auto", "ddp", "model_parallel"] = "auto"
    num_nodes: Count = 1
    tensor_parallel_size: Count | None = 1
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    devices: Any = 1
    gradient_clip_val: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    check_val_every_n_epoch: Count | None = None
    num_sanity_val_steps: Annotated[int, Field(ge=-1)] | None = 0
    min_steps: Count | None = None
    min_epochs: Count | None = None
    max_epochs: Annotated[int, Field(ge=-1)] | None = None
    enable_model_summary: bool | None = False
    enable_progress_bar: bool | None = False
    deterministic: Literal[True, False, "warn"] | None = None
    benchmark: bool | None = None
    detect_anomaly: bool = False
    profiler: Literal["simple", "advanced", "pytorch"] | None = None

    @field_validator("precision", mode="before")
    @classmethod
    def _common_name(cls, precision: Any) -> Any:
        return PRECISIONS.get(str(precision), precision)

    @field_validator("accelerator", mode="before")
    @classmethod
    def _kind_of_gpu(cls, accelerator: Any) -> Any:
        if accelerator != "gpu":
            return accelerator
        return "mps" if torch.backends.mps.is_available() else "cuda"

    @field_validator("max_time")
    @classmethod
    def _check_time(cls, time: Any) -> Any:
        if time is None or isinstance(time, str) and re.fullmatch(r"\d{1,6}(:\d\d){3}", time, re.ASCII):
            return time
        raise ValueError(f"trainer.max_time={time} must be DD:HH:MM:SS, such as 00:00:10:00 for ten minutes, or null")

    @field_validator("devices")
    @classmethod
    def _check_devices(cls, devices: Any) -> Any:
        numbers = devices if isinstance(devices, list) else [devices]
        limit = 0 if isinstance(devices, list) else 1
        if devices in ("auto", -1) or numbers and all(type(n) is int and limit <= n < 2**16 for n in numbers):
            return devices
        raise ValueError(f"trainer.devices={devices} must be a number of devices, a list of their numbers, or auto")

    @field_validator("limit_train_batches", "limit_val_batches")
    @classmethod
    def _check_share(cls, limit: Any, info: ValidationInfo) -> Any:
        if limit is None or type(limit) is int and limit >= 0 or type(limit) is float and 0 <= limit <= 1:
            return limit
        needs = "must be a number of batches, or a share of them as 0.5; leave it out for all"
        raise ValueError(f"trainer.{info.field_name}={limit} {needs}")

    @model_validator(mode="after")
    def _check_limits(self) -> "TrainerConfig":
        if self.limit_train_batches == 0:
            raise ValueError("trainer.limit_train_batches=0 leaves nothing to train on; leave it out")
        if self.max_epochs == 0:
            raise ValueError("trainer.max_epochs=0 leaves nothing to train; leave it out, trainer.max_steps is enough")
        if self.limit_val_batches == 0:
            raise ValueError("trainer.limit_val_batches=0 skips the validation that every run ends with; leave it out")
        limit, batches = self.limit_train_batches, self.accumulate_grad_batches
        whole = isinstance(limit, int) and limit % batches == 0 or isinstance(limit, float) and limit == 1
        if batches > 1 and limit is not None and not whole:
            needs = f"must be a multiple of trainer.accumulate_grad_batches={batches}, so that every step is complete"
            remedy = f"use {max(1, int(limit) // batches) * batches}"
            raise ValueError(f"trainer.limit_train_batches={limit} {needs}; {remedy}")
        return self
