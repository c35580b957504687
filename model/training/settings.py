"""The settings of a run apart from its model and its text. This module does not import torch."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import canonical, setting, strict_settings

Count = Annotated[int, Field(ge=1, lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Accelerator = Literal["auto", "cuda", "mps", "cpu"]
Precision = Literal["auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed"]
Compile = Literal["auto", True, False, "default", "reduce-overhead", "max-autotune-no-cudagraphs", "regional"]
PRECISIONS = {  # Lightning's and other short names
    "32": "32-true", "fp32": "32-true", "float32": "32-true",
    "16": "16-mixed", "fp16": "16-mixed", "float16": "16-mixed",
    "bf16": "bf16-mixed", "bfloat16": "bf16-mixed",
}  # fmt: skip


@dataclass(frozen=True, config=strict_settings())
class TopLevelConfig:
    """The single settings of a run."""

    seed: int = setting(0, "initialization, data order, dropout and sampling have streams of their own", ge=0, lt=2**64)
    compile: Compile = setting("auto", "torch.compile: auto (on CUDA), true, false, a mode, or regional (one block)")


@dataclass(frozen=True, config=strict_settings("causality"))
class CausalityConfig:
    """What the causality certificate means for a run."""

    allow_leak: bool = setting(False, "train a model whose outputs depend on future tokens: an experiment")


@dataclass(frozen=True, config=strict_settings("sweep"))
class SweepConfig:
    """Settings of `python train.py -m`."""

    skip_invalid: bool = setting(False, "leave out invalid runs of the grid, instead of refusing the grid")
    new: bool = setting(False, "start in a new folder, even if the same sweep was started before")


@dataclass(frozen=True, config=strict_settings("checkpoint"))
class CheckpointConfig:
    """When a run writes checkpoints apart from its validations, its last step and its stop by a signal."""

    every_minutes: Finite | None = setting(10.0, "null: not by time", gt=0)
    every_n_steps: Count | None = setting(None, "optimizer steps")


@dataclass(frozen=True, config=strict_settings("optim.schedule"))
class ScheduleConfig:
    """The shape of the learning rate over a run, see `model.training.schedule`."""

    kind: Literal["linear", "cosine", "wsd", "constant"] = setting("wsd", "wsd: stable, then linear down")
    warmup_steps: int = setting(20, "linear warm-up; at most the length of the run", ge=0)
    decay_fraction: float = setting(
        0.7, "the fraction of the run, at its end, that decays", needs="kind=wsd", gt=0, le=1
    )
    min_lr_ratio: float = setting(
        0.0, "end of the decay, relative to the peak", needs="kind=linear|cosine|wsd", ge=0, le=1
    )


@dataclass(frozen=True, config=strict_settings("optim"))
class OptimConfig:
    """How the weights are updated. Learning rates are peaks; the schedule scales all of them."""

    kind: Literal["muon", "adamw"] = setting("muon", "set by optim=NAME")
    lr: Finite = setting(0.02, "AdamW's peak learning rate", gt=0)
    muon_lr: Finite = setting(0.014, "Muon's, for updates of spectral norm 1", needs="kind=muon", gt=0)
    lr_scale: Finite = setting(1.0, "multiplies the learning rates; +tune=lr chooses it for each variant", gt=0)
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = setting(  # not strict: yaml has lists
        (0.9, 0.95), "AdamW: decay rates of the averages of the gradient and of its square"
    )
    eps: Finite = setting(1e-8, "AdamW: in the denominator, for stability", gt=0)
    weight_decay: Finite = setting(0.0, "AdamW, matrices only; norms and biases never decay", ge=0)
    muon_weight_decay: Finite = setting(0.0, "Muon", needs="kind=muon", ge=0)
    momentum: Fraction = setting(0.9, "Muon; 0.95 for long runs and large batches", needs="kind=muon")
    nesterov: bool = setting(True, "Muon: Nesterov momentum", needs="kind=muon")
    ns_steps: int = setting(5, "Newton-Schulz iterations; 3 is cheaper", needs="kind=muon", ge=1, le=100)
    adjust_lr: Literal["original", "match_rms_adamw"] = setting(
        "original", "Muon's rate by matrix shape; match_rms_adamw suits AdamW's lr and decay", needs="kind=muon"
    )
    scale_with_width: bool = setting(False, "rates are those of the next two sizes, and follow the width (muP)")
    base_width: Count = setting(192, "dim of the model whose rates these are", needs="scale_with_width")
    base_head_dim: Count = setting(48, "its head size", needs="scale_with_width")
    schedule: ScheduleConfig = ScheduleConfig()

    def canonical(self) -> "OptimConfig":
        """The same optimizer with every field that has no effect at its default, so that equal runs compare equal."""
        return canonical(self)


@dataclass(frozen=True, config=strict_settings("trainer"))
class TrainerConfig:
    """The arguments of `lightning.Trainer` that a run may have."""

    accelerator: Accelerator = setting("auto", "CUDA, else MPS, else CPU")
    precision: Precision = setting("auto", "bf16-mixed if the hardware has bf16, else 32-true (16-mixed on older GPUs)")
    max_steps: Count = setting(900, "optimizer steps")
    max_flops: Finite | None = setting(
        None, "FLOPs of the whole training: they decide the steps, in place of max_steps", gt=0
    )
    max_time: Any = setting(None, "DD:HH:MM:SS; stops a run early")
    val_check_interval: Count = setting(150, "optimizer steps between two complete validations; the last step has one")
    accumulate_grad_batches: Count = setting(1, "micro-batches per optimizer step")
    log_every_n_steps: Count = setting(10, "optimizer steps between two lines of metrics.csv")
    strategy: Literal["auto", "ddp", "model_parallel"] = setting("auto", "auto: ddp if there are several devices")
    num_nodes: Count = setting(1, "above 1 with torchrun or srun")
    limit_train_batches: Any = setting(None, "batches of an epoch: a number, or a share such as 0.5")
    limit_val_batches: Any = setting(None, "batches of a validation: a number, or a share such as 0.5")
    devices: Any = setting(1, "of each node; auto: all")
    gradient_clip_val: Finite | None = setting(None, "largest norm of the gradient; null: not clipped", ge=0)
    gradient_clip_algorithm: Literal["norm", "value"] | None = setting(None, "null: norm", needs="gradient_clip_val")
    check_val_every_n_epoch: Count | None = setting(None, "null: validation by steps, not by epochs")
    num_sanity_val_steps: int | None = setting(0, "validation batches before training", ge=-1)
    min_steps: Count | None = setting(None, "steps that early stopping does not cut")
    min_epochs: Count | None = setting(None, "epochs that early stopping does not cut")
    max_epochs: int | None = setting(None, "passes over the text; null: trainer.max_steps decides", ge=-1)
    enable_model_summary: bool | None = setting(False, "Lightning's; train.py prints a description")
    enable_progress_bar: bool | None = setting(False, "Lightning's; there is callbacks.progress")
    deterministic: Literal[True, False, "warn"] | None = setting(None, "torch's deterministic algorithms only")
    benchmark: bool | None = setting(None, "cuDNN's choice of algorithms by timing")
    detect_anomaly: bool = setting(False, "torch's anomaly detection, slow")
    profiler: Literal["simple", "advanced", "pytorch"] | None = setting(None, "writes fit-profile.txt")

    @field_validator("precision", mode="before")
    @classmethod
    def _common_name(cls, precision: Any) -> Any:
        return PRECISIONS.get(str(precision), precision)

    @field_validator("accelerator", mode="before")
    @classmethod
    def _kind_of_gpu(cls, accelerator: Any) -> Any:
        if accelerator != "gpu":
            return accelerator
        import torch

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
        if self.min_steps is not None and self.min_steps > self.max_steps:
            limit = f"must be at most trainer.max_steps={self.max_steps}"
            raise ValueError(f"trainer.min_steps={self.min_steps} {limit}; lower it, or leave it out")
        limit, batches = self.limit_train_batches, self.accumulate_grad_batches
        whole = isinstance(limit, int) and limit % batches == 0 or isinstance(limit, float) and limit == 1
        if batches > 1 and limit is not None and not whole:
            needs = f"must be a multiple of trainer.accumulate_grad_batches={batches}, so that every step is complete"
            remedy = f"use {max(1, int(limit) // batches) * batches}"
            raise ValueError(f"trainer.limit_train_batches={limit} {needs}; {remedy}")
        return self


@dataclass(frozen=True, config=strict_settings("callbacks"))
class WithoutOptions:
    """A callback that is on or, as null, off."""


@dataclass(frozen=True, config=strict_settings("callbacks.gradients"))
class GradientsConfig:
    """Norms of the gradients; no update is made with one that is not finite."""

    on_nonfinite: Literal["stop", "skip"] = setting("stop", "skip: leaves the update of such a step out")
    max_skips: Count = setting(10, "consecutive steps", needs="on_nonfinite=skip")


@dataclass(frozen=True, config=strict_settings("callbacks.heads"))
class HeadsConfig:
    """Entropy and first-token mass of every head, after each validation."""

    windows: Count = setting(2, "validation windows that are read")


@dataclass(frozen=True, config=strict_settings("callbacks.progress"))
class ProgressConfig:
    """A progress bar, or lines."""

    lines: Count = setting(20, "if the output is not a terminal")


@dataclass(frozen=True, config=strict_settings("callbacks.samples"))
class SamplesConfig:
    """A text after each validation."""

    # prompt=1 is parsed as a number
    prompt: Annotated[str, BeforeValidator(lambda x: str(x) if isinstance(x, int | float) else x)] = setting(
        "", "empty: start a new document"
    )
    max_new_tokens: Count = setting(100, "length of the sample")
    temperature: Finite = setting(0.8, "0: always the most probable token", ge=0)


@dataclass(frozen=True, config=strict_settings("callbacks.early_stop"))
class EarlyStopConfig:
    """Stops a run whose validation loss no longer falls; best.ckpt holds the best weights."""

    patience: Count = setting(4, "consecutive validations without a lower loss, after which the run stops")
    min_delta: Finite = setting(0.0, "a loss counts as lower if it is lower by more than this, nats per token", ge=0)
    min_passes: Finite = setting(10.0, "a run of at most so many passes over its text is not stopped; 0: any run", ge=0)


@dataclass(frozen=True, config=strict_settings("callbacks"))
class CallbacksConfig:
    """The callbacks of a run; null: none."""

    causality: WithoutOptions | None = WithoutOptions()  # before the first step; refuses a model that sees the future
    gradients: GradientsConfig | None = GradientsConfig()
    gc: WithoutOptions | None = WithoutOptions()  # Python's garbage collector runs at validations only
    windows: WithoutOptions | None = WithoutOptions()  # the validation loss of every window, for paired comparisons
    heads: HeadsConfig | None = HeadsConfig()
    progress: ProgressConfig | None = ProgressConfig()
    samples: SamplesConfig | None = SamplesConfig()
    early_stop: EarlyStopConfig | None = EarlyStopConfig()


@dataclass(frozen=True, config=strict_settings("logger.wandb"))
class WandbConfig:
    """Weights & Biases, in addition to metrics.csv. Without an account the run stays on disk."""

    project: str = setting("tril", "at wandb")
    entity: str | None = setting(None, "the team at wandb; null: your own account")
    name: str | None = setting(None, "null: that of the run's folder")
    group: str | None = setting(None, "null: that of the sweep's folder")
    tags: tuple[str, ...] | None = setting(None, "a list", strict=False)
    id: str | None = setting(None, "of the run at wandb; null: a new one, which a resumed run keeps")
    log_model: bool = setting(False, "the best checkpoint as an artifact, at the end of the run")


@dataclass(frozen=True, config=strict_settings("logger.tensorboard"))
class TensorBoardConfig:
    """TensorBoard, in addition to metrics.csv; `tensorboard --logdir outputs` shows all runs."""


@dataclass(frozen=True, config=strict_settings("logger"))
class LoggerConfig:
    """Trackers, in addition to metrics.csv, which every run writes."""

    wandb: WandbConfig | None = None
    tensorboard: TensorBoardConfig | None = None
