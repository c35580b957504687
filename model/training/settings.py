"""The settings of a run apart from its model and its text; configs/ has the values of a run. Imports no torch."""

import re
from dataclasses import dataclass as plain_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import group, setting, strict_settings
from tril.data.sources.base import Source
from tril.model.config import GPTConfig

if TYPE_CHECKING:
    from tril.model.training.hardware import Hardware

Count = Annotated[int, Field(ge=1, lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Accelerator = Literal["auto", "cuda", "mps", "cpu"]
Precision = Literal["auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed"]
Compile = Literal["auto", True, False, "regional", "reduce-overhead"]


class UserError(ValueError):
    """A mistake of the user. Its message is one line: value, limit, remedy. Notes list parts of a grid."""


class Stopped(SystemExit):
    """A signal ended the run after a step, whose checkpoint is last.ckpt. The text says how to continue.

    Args:
        text: one line.
        code: the exit status.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(code)
        self.text = text


@dataclass(frozen=True, config=strict_settings())
class TopLevelConfig:
    """The single settings of a run."""

    seed: int = setting(
        0,
        "random seed; initialization, data order, dropout and sampling use independent streams",
        common=True,
        ge=0,
        lt=2**64,
    )
    compile: Compile = setting(
        "auto",
        "torch.compile; auto: on CUDA, and on a CPU one block in runs of at least 4e13 FLOPs; regional: one block; "
        "reduce-overhead: CUDA graphs",
        common=True,
    )


@dataclass(frozen=True, config=strict_settings("causality"))
class CausalityConfig:
    """What the causality certificate means for a run."""

    allow_leak: bool = setting(False, "train a model whose outputs depend on future tokens: an experiment")


@dataclass(frozen=True, config=strict_settings("checkpoint"))
class CheckpointConfig:
    """When a run writes checkpoints apart from its validations, its last step and its stop by a signal."""

    every_minutes: Finite | None = setting(10.0, "null: not by time", gt=0)
    every_n_steps: Count | None = setting(None, "optimizer steps")


@dataclass(frozen=True, config=strict_settings("optim.schedule"))
class ScheduleConfig:
    """The shape of the learning rate over a run, see `model.training.schedule`."""

    kind: Literal["linear", "cosine", "wsd", "constant"] = setting("wsd", "wsd: stable, then linear down", common=True)
    warmup_steps: int = setting(20, "linear warm-up; at most the length of the run", common=True, ge=0)
    decay_fraction: float = setting(
        0.7, "the fraction of the run, at its end, that decays", common=True, needs="kind=wsd", gt=0, le=1
    )
    min_lr_ratio: float = setting(
        0.0, "end of the decay, relative to the peak", needs="kind=linear|cosine|wsd", ge=0, le=1
    )


@dataclass(frozen=True, config=strict_settings("optim"))
class OptimConfig:
    """How the weights are updated. Learning rates are peaks; the schedule scales all of them."""

    kind: Literal["muon", "adamw"] = setting("muon", "set by optim=NAME")
    lr: Finite = setting(0.02, "AdamW's peak learning rate", common=True, gt=0)
    muon_lr: Finite = setting(
        0.014, "Muon's peak learning rate; its updates have spectral norm 1", common=True, needs="kind=muon", gt=0
    )
    lr_scale: Finite = setting(1.0, "multiplies the learning rates", common=True, gt=0)
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = setting(  # not strict: yaml has lists
        (0.8, 0.99), "AdamW: decay rates of the averages of the gradient and of its square"
    )
    eps: Finite = setting(1e-8, "AdamW: in the denominator, for stability", gt=0)
    weight_decay: Finite = setting(0.0, "AdamW, matrices only; norms and biases never decay", common=True, ge=0)
    muon_weight_decay: Finite = setting(
        0.0, "weight decay of the matrices that Muon updates", common=True, needs="kind=muon", ge=0
    )
    momentum: Fraction = setting(0.9, "Muon; 0.95 for long runs and large batches", needs="kind=muon")
    nesterov: bool = setting(True, "Muon: Nesterov momentum", needs="kind=muon")
    ns_steps: int = setting(5, "Newton-Schulz iterations; 3 is cheaper", needs="kind=muon", ge=1, le=100)
    adjust_lr: Literal["original", "match_rms_adamw"] = setting(
        "original", "Muon's rate by matrix shape; match_rms_adamw suits AdamW's lr and decay", needs="kind=muon"
    )
    normalize_rows: bool = setting(
        False, "Muon: equal norms of the rows of an update, by factors of at most 2", needs="kind=muon"
    )
    schedule: ScheduleConfig = group(ScheduleConfig)


@dataclass(frozen=True, config=strict_settings("trainer"))
class TrainerConfig:
    """The arguments of `lightning.Trainer` that a run may have."""

    accelerator: Accelerator = setting("auto", "CUDA, else MPS, else CPU", common=True)
    precision: Precision = setting(
        "auto", "bf16-mixed if the hardware has bf16, else 32-true (16-mixed on older GPUs)", common=True
    )
    max_steps: Count = setting(1600, "optimizer steps", common=True)
    max_time: Any = setting(None, "DD:HH:MM:SS; stops a run early", common=True)
    val_check_interval: Count = setting(
        400, "optimizer steps between two complete validations; the last step has one", common=True
    )
    accumulate_grad_batches: Count = setting(1, "micro-batches per optimizer step", common=True)
    log_every_n_steps: Count = setting(10, "optimizer steps between two lines of metrics.csv")
    strategy: Literal["auto", "ddp"] = setting("auto", "auto: ddp if there are several devices")
    num_nodes: Count = setting(1, "above 1 with torchrun or srun")
    limit_val_batches: Count | None = setting(None, "batches of a validation; null: all")
    devices: Any = setting(1, "number of devices of each node; auto: all", common=True)
    gradient_clip_val: Finite | None = setting(
        None, "largest norm of the gradient; null: not clipped", common=True, ge=0
    )

    @field_validator("max_time")
    @classmethod
    def _check_time(cls, time: Any) -> Any:
        is_time = isinstance(time, str) and re.fullmatch(r"\d{1,6}(:\d\d){3}", time, re.ASCII)
        if time is None or is_time and re.search("[1-9]", time):
            return time
        raise ValueError(f"trainer.max_time={time} must be DD:HH:MM:SS above zero, such as 00:00:10:00 for ten minutes")

    @field_validator("devices")
    @classmethod
    def _check_devices(cls, devices: Any) -> Any:
        if devices == "auto" or type(devices) is int and 1 <= devices < 2**16:
            return devices
        raise ValueError(f"trainer.devices={devices} must be a number of devices, or auto")

    @property
    def is_distributed(self) -> bool:
        """Whether a run has a process group, of one process or more."""
        return (self.strategy, self.devices, self.num_nodes) != ("auto", 1, 1)


@dataclass(frozen=True, config=strict_settings("callbacks"))
class WithoutOptions:
    """A callback that is on or, as null, off."""


@dataclass(frozen=True, config=strict_settings("callbacks.progress"))
class ProgressConfig:
    """A progress bar, or lines."""

    lines: Count = setting(20, "number of progress lines if the output is not a terminal")


@dataclass(frozen=True, config=strict_settings("callbacks.samples"))
class SamplesConfig:
    """A text after each validation, in samples.txt; three on the screen at the end."""

    prompt: str | None = setting(
        None, r"\n is a line end; null: one that suits the text; empty: start a new document", common=True, escapes=True
    )
    max_new_tokens: int = setting(64, "length of the sample", ge=1, le=10**9)
    temperature: Finite = setting(0.8, "0: always the most probable token", ge=0, le=1e6)
    repetition_penalty: Finite | None = setting(None, "as in tril sample", gt=0)


@dataclass(frozen=True, config=strict_settings("callbacks.early_stop"))
class EarlyStopConfig:
    """Stops a run whose validation loss no longer falls; best.ckpt holds the best weights."""

    patience: Count = setting(4, "consecutive validations without a lower loss, after which the run stops")
    min_passes: Finite = setting(10.0, "a run of at most so many passes over its text is not stopped; 0: any run", ge=0)


@dataclass(frozen=True, config=strict_settings("callbacks"))
class CallbacksConfig:
    """The callbacks that a run can have; null: off."""

    causality: WithoutOptions | None = None  # before the first step; refuses a model that sees the future
    heads: WithoutOptions | None = None  # their scores over the run, in heads.csv
    progress: ProgressConfig | None = None
    samples: SamplesConfig | None = None
    early_stop: EarlyStopConfig | None = None


@plain_dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What training reads of the settings of a run.

    Attributes:
        hardware: that the run uses; None until it is chosen.
    """

    top: TopLevelConfig
    model: GPTConfig
    data: Source
    optim: OptimConfig
    trainer: TrainerConfig
    callbacks: CallbacksConfig
    checkpoint: CheckpointConfig
    causality: CausalityConfig
    hardware: "Hardware | None" = None

    def tokens_per_step(self) -> int:
        """Training tokens per step and device."""
        return self.data.batch_size * self.model.context_length * self.trainer.accumulate_grad_batches

    @property
    def devices(self) -> int:
        """Devices of the run as configured, each with batches of its own; Lightning counts a CPU as one."""
        import torch

        devices, nodes = self.trainer.devices, self.trainer.num_nodes
        if devices == "auto":
            devices = torch.cuda.device_count() if self.hardware and self.hardware.accelerator == "cuda" else 1
        return nodes * devices

    def train_tokens(self) -> int:
        """Training tokens of the whole run."""
        return self.trainer.max_steps * self.tokens_per_step() * self.devices
