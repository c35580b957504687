"""The settings of a run as numbers: checked once, then completed once by what the text decides."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tril.data.config import SOURCES, DataConfig, parse
from tril.data.settings import Setting, build, declared, defaults, plain, typed, without_effect
from tril.model.config import GPTConfig, check_memory
from tril.model.evaluation.config import EvaluateConfig
from tril.model.training.settings import (
    CallbacksConfig,
    CausalityConfig,
    CheckpointConfig,
    LoggerConfig,
    OptimConfig,
    SweepConfig,
    TopLevelConfig,
    TrainerConfig,
    TrainingConfig,
)
from tril.scripts.cli.errors import UserError, unknown_setting, user_errors
from tril.scripts.cli.typed import Typed

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GROUPS = {
    "model": GPTConfig,
    "optim": OptimConfig,
    "trainer": TrainerConfig,
    "callbacks": CallbacksConfig,
    "logger": LoggerConfig,
    "checkpoint": CheckpointConfig,
    "causality": CausalityConfig,
    "sweep": SweepConfig,
}
COMMANDS = {"evaluate": EvaluateConfig}  # what other commands declare; their yaml takes it by NAME_settings
CHARACTERS = 65 + 2  # of tiny shakespeare, and the tokens for end-of-text and unknown characters
MIN_FLEX_HEAD = 16  # head size that the kernels of FlexAttention need
NOTHING_TYPED = Typed()
OPEN = ("callbacks", "logger")  # groups in which the command line may add a _target_ under a name of its own
OF_THE_COMMAND = ("resume", "init_from", "plan", "allow_targets", "hydra.run.dir")  # no settings of a run


@dataclass(frozen=True, kw_only=True)
class RunConfig(TrainingConfig):
    """The settings of a run.

    Attributes:
        targets: callbacks and loggers with a `_target_`, which the command line adds: dotted key -> arguments.
    """

    model: GPTConfig
    data: DataConfig
    sweep: SweepConfig = SweepConfig()
    targets: Mapping[str, dict] = field(default_factory=dict)

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], command_line: Typed = NOTHING_TYPED, *, in_sweep: bool = False
    ) -> "RunConfig":
        """Checks nested plain values. Imports no torch, and reads no text.

        Args:
            command_line: what was typed.
            in_sweep: a typed setting without an effect is not refused, since it may have one in other runs.

        Raises:
            UserError: names the wrong settings in one line.
        """
        _refuse_unknown(command_line)
        with user_errors():
            config = cls._build(settings)
            _check_combinations(config)
            if not in_sweep:
                _refuse_without_effect(config, command_line)
        return config

    @classmethod
    def _build(cls, settings: Mapping[str, Any]) -> "RunConfig":
        groups, targets = {}, {}
        for name, group in GROUPS.items():
            values = settings.get(name, {})
            if not isinstance(values, Mapping):
                remedy = f"change one, such as {name}.KEY=VALUE"
                raise ValueError(f"{name}={typed(values)} must be a group of settings; {remedy}")
            own = dict(values)
            for key in [*own] if name in OPEN else ():
                if isinstance(own[key], Mapping) and "_target_" in own[key]:
                    targets[f"{name}.{key}"] = dict(own.pop(key))
            if name in OPEN:  # what was removed with ~callbacks.NAME is off
                own = dict.fromkeys(group.__pydantic_fields__) | own
            groups[name] = build(group, own, name)
        top = {key: settings[key] for key in defaults(TopLevelConfig) if key in settings}
        if "data" not in settings or not isinstance(settings["data"], Mapping):
            raise ValueError(f"data={settings.get('data')} must be a group of settings; choose one with data=NAME")
        text = parse(settings["data"], data_presets())
        return cls(top=build(TopLevelConfig, top), data=text, targets=targets, **groups)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, of which `of` makes the same settings, apart from the targets."""
        groups = {name: plain(getattr(self, name)) for name in GROUPS if name != "sweep"}
        return {**plain(self.top), "data": data_settings(self.data), **groups}

    def canonical(self) -> dict[str, Any]:
        """What a run computes, as nested plain values: equal for two runs whose results are necessarily equal."""
        values = self.to_dict() | {"targets": plain(self.targets)}
        same = {"model": plain(self.model.canonical()), "optim": plain(self.optim.canonical())}
        return {key: value for key, value in (values | same).items() if key not in ("logger", "checkpoint")}

    def on_this_machine(self) -> "RunConfig":
        """The settings with the hardware that they choose; imports torch.

        Raises:
            UserError: this machine lacks what they need.
        """
        from tril.data.cache import keep_compiled_code
        from tril.model.training.hardware import select_hardware

        keep_compiled_code()  # before torch looks for a compiler
        sharded = self.trainer.strategy == "model_parallel"  # which does not compile
        compile = False if sharded and self.top.compile == "auto" else self.top.compile
        with user_errors():
            if compile and sharded:
                raise ValueError(f"compile={typed(compile)} does not go with trainer=fsdp; set compile=false")
            hardware = select_hardware(self.trainer.accelerator, self.trainer.precision, compile)
            if self.model.backend == "flex" and hardware.accelerator != "cuda":
                device = f"needs trainer.accelerator=cuda to train, not {hardware.accelerator}"
                raise ValueError(f"model.backend=flex {device}; use model.backend=fused")
        return replace(self, hardware=hardware)

    def fitted(self, text: Any) -> "RunConfig":
        """The settings with what the prepared text decides: the vocabulary, and with it the steps of trainer.max_flops.

        Raises:
            UserError: the settings do not fit the text.
        """
        with user_errors():
            model = with_vocabulary(self.model, text.meta["vocab_size"])
            check_memory(model)
            return replace(self, model=model)._with_max_flops()

    def _with_max_flops(self) -> "RunConfig":
        """With the steps that trainer.max_flops gives; raises ValueError if no number of steps has so many FLOPs."""
        trainer = self.trainer
        if trainer.max_flops is None:
            return self
        import torch

        from tril.model.gpt import GPT
        from tril.model.training.schedule import steps_for_flops

        with torch.device("meta"):
            flops = GPT(self.model).flops_per_token() * self.tokens_per_step() * self.devices
        limits = {"max_steps": trainer.max_steps, "val_check_interval": trainer.val_check_interval}
        steps, interval = steps_for_flops(trainer.max_flops, flops, **limits)
        return replace(self, trainer=replace(trainer, max_steps=steps, val_check_interval=interval, max_flops=None))

    def with_likely_vocabulary(self) -> "RunConfig":
        """With the vocabulary that the tokenizer will probably have, for commands that do not prepare the text.

        Raises:
            UserError: it cannot be told.
        """
        tokenizer = self.data.tokenizer
        with user_errors():
            if self.model.vocab_size is not None:
                return self
            if tokenizer.kind == "hub":
                remedy = "set it, as in model.vocab_size=50304"
                raise ValueError(f"model.vocab_size=null needs a local tokenizer; {remedy}")
            from tril.data.tokenizer import AUTO_VOCAB_SIZE, n_ids
            from tril.data.tokenizer import build as build_tokenizer

            sizes = {"bpe": tokenizer.vocab_size or AUTO_VOCAB_SIZE, "char": CHARACTERS}
            size = sizes.get(tokenizer.kind) or n_ids(build_tokenizer(tokenizer, ()))
            return replace(self, model=replace(self.model, vocab_size=size))

    @property
    def has_processes(self) -> bool:
        """Whether the settings ask for several processes."""
        return (self.trainer.strategy, self.trainer.devices, self.trainer.num_nodes) != ("auto", 1, 1)

    def refuse_processes(self) -> None:
        """Raises UserError for a run of several processes, which only a command can start."""
        trainer = self.trainer
        if self.has_processes:
            chosen = f"trainer.strategy={trainer.strategy} with trainer.devices={trainer.devices}"
            raise UserError(f"{chosen} starts processes; use tril train in a terminal, or trainer=default")

    def check_processes(self) -> None:
        """Raises UserError unless torchrun or srun started as many processes as the settings say; imports Lightning."""
        if self.has_processes or "RANK" in os.environ:
            from tril.model.training.parallel import check_processes

            with user_errors():
                check_processes(self.trainer, self.devices)

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.trainer.max_steps

    @property
    def accumulate(self) -> int:
        """Micro-batches per step."""
        return self.trainer.accumulate_grad_batches

    @property
    def devices(self) -> int:
        """Devices of the run as configured, each with batches of its own; Lightning counts a CPU as one."""
        import torch

        devices, nodes = self.trainer.devices, self.trainer.num_nodes
        if devices == "auto":
            devices = torch.cuda.device_count() if self.hardware and self.hardware.accelerator == "cuda" else 1
        return nodes * devices

    def tokens_per_step(self) -> int:
        """Training tokens per step and device."""
        return self.data.batch_size * self.model.context_length * self.accumulate

    def seed_for(self, purpose: str) -> int:
        """A separate seed for each purpose, so that a change of one (such as dropout) does not affect the others."""
        return int.from_bytes(hashlib.sha256(f"{self.top.seed}/{purpose}".encode()).digest()[:4], "big")


def with_vocabulary(model: GPTConfig, needed: int) -> GPTConfig:
    """The model with the vocabulary of the tokenizer, unless a larger one was chosen.

    Raises:
        ValueError: the chosen vocabulary has fewer rows than the tokenizer has tokens.
    """
    if model.vocab_size is not None and model.vocab_size < needed:
        remedy = "raise it, or leave it null"
        raise ValueError(
            f"model.vocab_size={model.vocab_size} is too small for the tokenizer's {needed} tokens; {remedy}"
        )
    return replace(model, vocab_size=model.vocab_size or needed)


@cache
def known_settings() -> dict[str, Setting]:
    """What the groups of a run and all kinds of text declare, by dotted key."""
    texts = [("data", kind) for kind in SOURCES.values()]
    groups = [("", TopLevelConfig), *GROUPS.items(), *texts, ("data", DataConfig)]
    return {each.key: each for prefix, group in groups for each in declared(group, prefix)}


def known_names() -> list[str]:
    """What can be typed for a run: its settings and groups of settings, config groups, and keys of the command."""
    parents = {key[: dot.start()] for key in known_settings() for dot in re.finditer(r"\.", key)}
    switches = [f"{prefix}.{name}" for prefix in OPEN for name in GROUPS[prefix].__pydantic_fields__]
    choices = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir())
    return list(dict.fromkeys([*known_settings(), *sorted(parents), *switches, *choices, *OF_THE_COMMAND]))


def _refuse_unknown(command_line: Typed) -> None:
    """Raises UserError for a typed key that does not exist. Hydra itself refuses one without a dot and a sign."""
    known = known_names()
    for each in command_line:
        first, _, rest = each.key.partition(".")
        adds_target = first in OPEN and rest and rest.partition(".")[0] not in GROUPS[first].__pydantic_fields__
        of_hydra = first in ("hydra", "tune") or "/" in each.key or "@" in each.key
        if not (each.key in known or of_hydra or adds_target or each.is_group and not each.sign):
            raise UserError(str(unknown_setting(each.key, known)))
        if each.sign == "~" and (each.is_group or first not in (*OPEN, "hydra")):
            remedy = f"leave out ~{each.key}, or set {each.key}=VALUE"
            raise UserError(f"{each.key} is required, only single callbacks and loggers can be removed; {remedy}")


def _check_combinations(config: RunConfig) -> None:
    """Raises ValueError for settings of different groups that exclude each other."""
    model = config.model
    if not model.causal and not config.causality.allow_leak:
        effect = "lets every position attend to later ones, so its losses would be false"
        raise ValueError(f"model.causal=false {effect}; set causality.allow_leak=true if that is intended")
    if (budget := config.data.token_budget) is not None and budget <= model.context_length:
        window = f"must be more than model.context_length={model.context_length}, the tokens of one window"
        raise ValueError(f"data.token_budget={budget} {window}; raise it, or leave it out for all tokens")
    if model.backend == "flex" and 0 < model.head_size < MIN_FLEX_HEAD:
        size = f"a head size of at least {MIN_FLEX_HEAD}, not {model.head_size} (model.head_dim, or dim / n_heads)"
        raise ValueError(f"model.backend=flex needs {size}; use model.backend=fused")


def _refuse_without_effect(config: RunConfig, command_line: Typed) -> None:
    """Raises ValueError for a typed setting that has no effect with the others."""
    groups = [(name, getattr(config, name)) for name in GROUPS]
    groups += [("data", config.data.source), ("data.tokenizer", config.data.tokenizer)]
    for prefix, group in groups:
        values, default = (flatten({prefix: tree}) for tree in (plain(group), defaults(type(group))))
        for key, need in without_effect(group, prefix).items():
            if key in command_line and values[key] != default.get(key):
                need = f"{key.rpartition('.')[0]}.{need}"
                raise ValueError(
                    f"{key}={command_line.get(key)} has no effect without {need}; leave it out, or set that"
                )


def data_defaults(source: str) -> dict[str, Any]:
    """The defaults below `data:` of a kind of text."""
    return defaults(DataConfig) | defaults(SOURCES[source]) | {"source": source}


def data_presets() -> dict[str, dict]:
    """The settings of the data groups, which the sources of a mixture may name."""
    import yaml

    presets = {}
    for path in sorted((CONFIGS / "data").glob("*.yaml")):
        own = yaml.safe_load(path.read_text(encoding="utf-8"))
        base = data_defaults(own.pop("defaults")[0].removeprefix("source_"))
        presets[path.stem] = base | own | {"tokenizer": base["tokenizer"] | own.get("tokenizer", {})}
    return presets


def data_settings(data: DataConfig) -> dict[str, Any]:
    """The settings below `data:` as plain values, those of the text on the same level."""
    common = {name: value for name, value in vars(data).items() if name != "source"}
    (source,) = (name for name, kind in SOURCES.items() if kind is type(data.source))
    return plain(common) | plain(data.source) | {"source": source}


def flatten(tree: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}. An empty mapping stays."""
    flat = {}
    for key, value in tree.items():
        below = flatten(value, separator) if isinstance(value, Mapping) and value else None
        flat |= {key: value} if below is None else {f"{key}{separator}{name}": item for name, item in below.items()}
    return flat
