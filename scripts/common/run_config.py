"""The checked settings of a run."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from tril.scripts.common.cli import CONFIGS, build, message_of, nearest, plain, task_overrides

if TYPE_CHECKING:
    from tril.data.config import DataConfig
    from tril.model.config import GPTConfig
    from tril.model.training.hardware import Hardware
    from tril.model.training.optim import OptimConfig
    from tril.model.training.trainer_config import CheckpointConfig, TopLevelConfig, TrainerConfig

GROUPS = ("model", "data", "optim", "optim.schedule", "trainer", "callbacks", "checkpoint", "causality")
SINGLE = ("seed", "compile", "resume", "init_from", "output_dir", "allow_changes", "allow_targets")
KEYS = (*GROUPS, "logger", "sweep", "hydra", *SINGLE)


@dataclass(frozen=True)
class RunConfig:
    """The settings of configs/train.yaml. `hardware` is None for a run on another machine."""

    top: "TopLevelConfig"
    model: "GPTConfig"
    optim: "OptimConfig"
    data: "DataConfig"
    trainer: "TrainerConfig"
    checkpoint: "CheckpointConfig"
    hardware: "Hardware | None"

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.trainer.max_steps

    @property
    def accumulate(self) -> int:
        """Micro-batches per step."""
        return self.trainer.accumulate_grad_batches

    @property
    def val_interval(self) -> int:
        """Micro-batches between two validations, as Lightning counts them; the setting counts optimizer steps."""
        return self.trainer.val_check_interval * self.accumulate

    @property
    def devices(self) -> int:
        """Devices of the run as configured; Lightning counts a CPU as one."""
        import torch

        devices, nodes = self.trainer.devices, self.trainer.num_nodes
        if devices in ("auto", -1):
            devices = torch.cuda.device_count() if self.hardware and self.hardware.accelerator == "cuda" else 1
        return nodes * (len(devices) if isinstance(devices, list) else devices)

    @property
    def data_ranks(self) -> int:
        """Processes, which each have batches of their own."""
        return self.devices

    def tokens_per_step(self) -> int:
        """Training tokens per step and device."""
        return self.data.batch_size * self.model.context_length * self.accumulate


def check_config(cfg: DictConfig, *, elsewhere: bool = False) -> RunConfig:
    """Builds the settings; imports torch, but not Lightning, and reads no data.

    Args:
        cfg: configs/train.yaml, composed.
        elsewhere: the run is for another machine, whose hardware is unknown.

    Raises:
        ValueError: lists the invalid settings of a group.
        OSError: a file or folder that does not exist.
    """
    from pydantic import ValidationError

    if cfg.get("init_from") is not None:  # a single run has applied it already
        raise ValueError(f"init_from={cfg.init_from} is for a single run of train.py; leave it out here")
    for name in GROUPS:
        if not isinstance(group := OmegaConf.select(cfg, name), DictConfig):
            raise ValueError(f"{name}={group} must be a group of settings; change one, such as {name}.KEY=VALUE")
    try:
        config = _build_config(cfg, elsewhere)
    except ValidationError as error:
        raise ValueError(message_of(error)) from error
    _check_combinations(config, plain(cfg.causality)["allow_leak"])
    return config


def data_presets() -> dict[str, dict]:
    """The settings of the data groups, which the sources of a mixture may name."""
    import yaml

    paths = sorted((CONFIGS / "data").glob("*.yaml"))
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths}


def _build_config(cfg: DictConfig, elsewhere: bool) -> RunConfig:
    from tril.data.cache import keep_compiled_code
    from tril.data.config import parse
    from tril.model.config import GPTConfig
    from tril.model.training.hardware import select_hardware
    from tril.model.training.optim import OptimConfig
    from tril.model.training.schedule import ScheduleConfig
    from tril.model.training.trainer_config import (
        CausalityConfig,
        CheckpointConfig,
        SweepConfig,
        TopLevelConfig,
        TrainerConfig,
    )

    top = TopLevelConfig(seed=cfg.seed, compile=cfg.compile)
    build(CausalityConfig, cfg.causality, "causality")
    if isinstance(cfg.get("sweep"), DictConfig):  # a benchmark has none
        build(SweepConfig, cfg.sweep, "sweep")
    checkpoint = build(CheckpointConfig, cfg.checkpoint, "checkpoint")
    checked = {
        field.name: cfg.trainer[field.name]  # raises if a required key is missing
        for field in dataclasses.fields(TrainerConfig)
        if field.name in cfg.trainer or field.default is dataclasses.MISSING
    }
    trainer = TrainerConfig(**checked)
    model, optim = plain(cfg.model), plain(cfg.optim)
    optim["schedule"] = build(ScheduleConfig, optim["schedule"], "optim.schedule")
    if model["vocab_size"] is None:  # the tokenizer's, unknown before the data are prepared
        model["vocab_size"] = 1
    model, optim, data = (
        build(GPTConfig, model, "model"),
        build(OptimConfig, optim, "optim"),
        parse(plain(cfg.data), data_presets()),
    )
    keep_compiled_code()  # sets the folder of compiled code, which torch reads when it looks for a compiler
    sharded = trainer.strategy == "model_parallel"  # which does not compile
    if sharded and top.compile not in ("auto", False):
        raise ValueError(f"compile={str(top.compile).lower()} does not go with trainer=fsdp; set compile=false")
    compile = False if sharded else top.compile
    hardware = None if elsewhere else select_hardware(trainer.accelerator, trainer.precision, compile)
    return RunConfig(top, model, optim, data, trainer, checkpoint, hardware)


def _check_combinations(config: RunConfig, allow_leak: bool) -> None:
    """Raises ValueError for settings of different groups that exclude each other."""
    from tril.model.backends import MIN_HEAD_DIM
    from tril.model.training.hardware import CUDA_GRAPHS

    model, hardware = config.model, config.hardware
    if not model.causal and not allow_leak:
        effect = "lets every position attend to later ones, so its losses would be false"
        raise ValueError(f"model.causal=false {effect}; set causality.allow_leak=true if that is intended")
    if (budget := config.data.token_budget) is not None and budget <= model.context_length:
        window = f"must be more than model.context_length={model.context_length}, the tokens of one window"
        raise ValueError(f"data.token_budget={budget} {window}; raise it, or leave it out for all tokens")
    if model.backend == "flex" and hardware is not None and hardware.accelerator != "cuda":
        device = f"needs trainer.accelerator=cuda to train, not {hardware.accelerator}"
        raise ValueError(f"model.backend=flex {device}; use model.backend=fused")
    if model.backend == "flex" and 0 < model.head_size < MIN_HEAD_DIM:
        size = f"a head size of at least {MIN_HEAD_DIM}, not {model.head_size} (model.head_dim, or dim / n_heads)"
        raise ValueError(f"model.backend=flex needs {size}; use model.backend=fused")
    # The second micro-batch would overwrite the gradients of the first.
    if hardware is not None and hardware.compile == CUDA_GRAPHS and config.accumulate > 1:
        needs = f"needs trainer.accumulate_grad_batches=1, not {config.accumulate}"
        raise ValueError(f"compile={CUDA_GRAPHS} {needs}; use compile=default")


def refuse_processes(config: RunConfig) -> None:
    """Raises ValueError for a run of several processes, which only a command can start."""
    trainer = config.trainer
    if trainer.strategy != "auto" or trainer.devices != 1 or trainer.num_nodes != 1:
        chosen = f"trainer.strategy={trainer.strategy} with trainer.devices={trainer.devices}"
        raise ValueError(f"{chosen} starts processes; use tril train in a terminal, or trainer=default")


def refuse_unused(config: RunConfig, overrides: Sequence[str] | None = None) -> None:
    """Raises ValueError for a key that has no effect: Muon's under optim.kind=adamw, the base model's without
    optim.scale_with_width, and keys of the model that another one replaces.

    Args:
        config: the settings.
        overrides: key=value each; None: those of the command line.
    """
    from tril.model.training.optim import BASE_KEYS, MUON_KEYS

    model, overrides = config.model, task_overrides() if overrides is None else overrides
    typed = {key.lstrip("+"): value for key, _, value in (override.partition("=") for override in overrides)}
    for name in (override.partition("=")[0].lstrip("+~").split(".")[0] for override in overrides if override[0] == "+"):
        if name not in KEYS and "/" not in name and "@" not in name and not (CONFIGS / name).is_dir():  # or a new group
            raise ValueError(f"there is no setting {name}{nearest(name, KEYS)}")
    names = re.findall(r"[{,]\s*([^:,{}]+?)\s*:", typed.get("data.sources", ""))
    if twice := [name for name in names if names.count(name) > 1]:  # of which Hydra keeps the last
        raise ValueError(f"data.sources={typed['data.sources']} has {twice[0]} twice; leave out one of them")
    for key in ("sweep.skip_invalid", "sweep.new"):
        if key in typed:
            raise ValueError(f"{key}={typed[key]} has no effect on a single run; leave it out, or add -m for a grid")
    for name in MUON_KEYS if config.optim.kind == "adamw" else ():
        if (key := f"optim.{name}") in typed and getattr(config.optim, name) != getattr(config.optim.canonical(), name):
            raise ValueError(f"{key}={typed[key]} has no effect with optim.kind=adamw; leave it out, or use optim=muon")
    for key in () if config.optim.scale_with_width else BASE_KEYS:
        if (name := f"optim.{key}") in typed:
            remedy = "set optim.scale_with_width=true, or leave it out"
            raise ValueError(f"{name}={typed[name]} has no effect without optim.scale_with_width; {remedy}")
    for key in ("data.url", "data.sha256"):
        if typed.get(key, "null") != "null" and (path := getattr(config.data.source, "path", None)) is not None:
            cause = f"data.path={path}, since it is about a download; leave one of them out"
            raise ValueError(f"{key}={typed[key]} has no effect with {cause}")
    if model.pos != "rope" and "model.rope_base" in typed:
        cause = f"model.pos={model.pos}; leave it out, or use model.pos=rope"
        raise ValueError(f"model.rope_base={typed['model.rope_base']} has no effect with {cause}")
    if model.mlp_hidden is not None and "model.mlp_ratio" in typed:
        cause = f"model.mlp_hidden={model.mlp_hidden}, the hidden width itself; leave one of them out"
        raise ValueError(f"model.mlp_ratio={typed['model.mlp_ratio']} has no effect with {cause}")


def choose_vocab_size(chosen: int | None, needed: int) -> int:
    """Rows of the embedding. Raises ValueError if the tokenizer has more tokens than were chosen."""
    if chosen is not None and chosen < needed:
        raise ValueError(
            f"model.vocab_size={chosen} is too small for the tokenizer's {needed} tokens; raise it, or leave it null"
        )
    return chosen or needed
