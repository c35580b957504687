"""The settings of a run as numbers: checked once, then completed by this machine and by the text."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from tril.data.settings import (
    build,
    canonical,
    declared,
    defaults,
    flatten,
    setting,
    strict_settings,
    typed,
    unflatten,
    without_effect,
)
from tril.data.sources import SOURCES, parse
from tril.model.config import GPTConfig
from tril.model.training.settings import (
    CallbacksConfig,
    CausalityConfig,
    CheckpointConfig,
    OptimConfig,
    TopLevelConfig,
    TrainerConfig,
    TrainingConfig,
)
from tril.scripts.cli.errors import user_errors

if TYPE_CHECKING:
    from tril.model.training.hardware import Hardware

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GROUPS = {
    "model": GPTConfig,
    "optim": OptimConfig,
    "trainer": TrainerConfig,
    "callbacks": CallbacksConfig,
    "checkpoint": CheckpointConfig,
    "causality": CausalityConfig,
}
FOR_TRAINING = ("backend", "checkpoint_activations", "embd_dropout", "attn_dropout", "resid_dropout")  # of a model
FOLDER = "hydra.run.dir"  # of a run


@dataclass(frozen=True, config=strict_settings())
class TrainCommand:
    """What train.py does besides the settings of a run."""

    resume: str | None = setting(None, "latest, a run's folder or a checkpoint: continue that run with its settings")
    init_from: str | None = setting(
        None,
        "a new run from the weights, config and tokenizer of a checkpoint, a run's folder, hf:FOLDER, hf:ORG/NAME of "
        "the hub, or nanogpt:FILE",
    )
    minutes: float | None = setting(
        None, "time limit of the run; Tril chooses the model's size and the steps unless you set them", gt=0, lt=1e5
    )


@plain_dataclass(frozen=True, kw_only=True)
class RunConfig(TrainingConfig):
    """The settings of a run. `of` checks them; `complete` adds what the machine and the text decide.

    Attributes:
        targets: loggers, and callbacks with a `_target_`: dotted key -> `_target_` and arguments.
    """

    targets: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Mapping[str, Any], given: Mapping[str, str] | None = None) -> "RunConfig":
        """Checks nested plain values. Imports no torch, and reads no text.

        Args:
            settings: other keys than those of a run are left out.
            given: settings of the command line; one that has no effect is an error. None: none is; in a sweep it may
                have an effect in other runs.

        Raises:
            UserError: names the wrong settings in one line.
        """
        with user_errors():
            groups = {name: settings.get(name, {}) for name in (*GROUPS, "data", "logger")}
            for name, values in groups.items():
                if not isinstance(values, Mapping):
                    one = f"must be a group of settings; change one, such as {name}.KEY=VALUE"
                    raise ValueError(f"{name}={typed(values)} {one}")
            callbacks, loggers = groups["callbacks"], groups["logger"]
            made = {key for key, node in callbacks.items() if isinstance(node, Mapping) and "_target_" in node}
            targets = {f"logger.{key}": node for key, node in loggers.items() if node is not None}
            targets |= {f"callbacks.{key}": callbacks[key] for key in callbacks if key in made}
            groups["callbacks"] = {key: node for key, node in callbacks.items() if key not in made}
            config = cls(
                top=build(TopLevelConfig, {key: settings[key] for key in defaults(TopLevelConfig) if key in settings}),
                data=parse(with_absolute_paths(groups["data"])),
                targets=targets,
                **{name: build(kind, groups[name], name) for name, kind in GROUPS.items()},
            )
            _check_combinations(config)
            if given is not None:
                parts = [("", config.top), *((name, getattr(config, name)) for name in (*GROUPS, "data"))]
                refuse_unused(parts, given)
        return config

    def complete(self, hardware: "Hardware", vocab_size: int) -> "RunConfig":
        """The settings with what the machine and the text decide: precision and the vocabulary.

        Args:
            vocab_size: of the tokenizer. A larger model.vocab_size is kept.

        Raises:
            ValueError: model.vocab_size is smaller.
        """
        chosen = self.model.vocab_size or vocab_size
        if chosen < vocab_size:
            needed = f"too small for the tokenizer's {vocab_size} tokens; raise it, or leave it null"
            raise ValueError(f"model.vocab_size={chosen} is {needed}")
        return replace(
            self,
            model=replace(self.model, vocab_size=chosen),
            trainer=replace(self.trainer, precision=hardware.precision),
            hardware=hardware,
        )

    def decide_compilation(self) -> "RunConfig":
        """The settings with compile=auto decided by the FLOPs of the run; imports torch."""
        from tril.model.gpt import GPT

        assert self.hardware is not None
        lengths = self.data.window_lengths(self.model.context_length)
        flops = self.train_tokens() * GPT.without_values(self.model).flops_per_token(lengths)
        hardware = self.hardware.for_flops(flops)
        return replace(self, top=replace(self.top, compile=hardware.compile), hardware=hardware)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, of which `of` makes the same settings, apart from the targets.

        config.yaml has them, and a checkpoint, there with dotted keys.
        """
        (source,) = (name for name, kind in SOURCES.items() if kind is type(self.data))
        data = {"source": source} | to_jsonable_python(self.data)
        groups = {name: to_jsonable_python(getattr(self, name)) for name in GROUPS}
        return {**to_jsonable_python(self.top), "data": data, **groups}

    def canonical(self) -> dict[str, Any]:
        """What a run computes, as nested plain values: equal for two runs whose results are necessarily equal."""
        callbacks = {key: node for key, node in self.targets.items() if key.startswith("callbacks.")}
        same = replace(self, model=self.model.canonical(), optim=canonical(self.optim))
        values = same.to_dict() | {"targets": to_jsonable_python(callbacks)}
        return {key: value for key, value in values.items() if key != "checkpoint"}

    def seed_for(self, purpose: str) -> int:
        """A separate seed for each purpose, so that a change of one (such as dropout) does not affect the others."""
        return int.from_bytes(hashlib.sha256(f"{self.top.seed}/{purpose}".encode()).digest()[:4], "big")


def _check_combinations(config: RunConfig) -> None:
    """Raises ValueError for settings of different groups that exclude each other."""
    model = config.model
    if not model.causal and not config.causality.allow_leak:
        effect = "lets every position attend to later ones, so its losses would be false"
        raise ValueError(f"model.causal=false {effect}; set causality.allow_leak=true if that is intended")
    if (budget := config.data.token_budget) is not None and budget <= model.context_length:
        window = f"must be more than model.context_length={model.context_length}, the tokens of one window"
        raise ValueError(f"data.token_budget={budget} {window}; raise it, or leave it out for all tokens")
    trainer = config.trainer
    if config.top.compile == "reduce-overhead" and (trainer.is_distributed or trainer.accumulate_grad_batches > 1):
        # a graph overwrites the gradients of the one before
        needs = "one process and trainer.accumulate_grad_batches=1"
        raise ValueError(f"compile=reduce-overhead needs {needs}; use compile=true")


def check_single(given: Mapping[str, str], grid: Mapping[str, str]) -> None:
    """Raises ValueError if a single run has settings of a grid, such as an ablation without -m.

    Args:
        grid: the values of an ablation, by key.
    """
    if grid and not given.keys() & grid:
        remedy = f"add -m to train the grid, or choose a value, such as {next(iter(grid))}=..."
        raise ValueError(f"the ablation is a grid over {', '.join(grid)}; {remedy}")


def check_minutes(trainer: TrainerConfig, given: Mapping[str, str]) -> None:
    """Raises ValueError for settings that `minutes` excludes."""
    for key in ("trainer.max_steps", "trainer.max_time", "debug"):
        if key in given:
            raise ValueError(f"{key}={given[key]} excludes minutes, which decide the steps; leave one out")
    if trainer.is_distributed:
        raise ValueError("minutes need a single process, whose steps are timed; leave them out, or use trainer=default")


def is_given(given: Iterable[str], key: str) -> bool:
    """Whether a setting is among those on the command line, alone or with its group."""
    return any(f"{key}.".startswith(f"{each}.") for each in given)


def refuse_unused(groups: Iterable[tuple[str, Any]], given: Mapping[str, str]) -> None:
    """Raises ValueError for a given setting that has no effect with the others of its group, unless it is the default.

    Args:
        groups: settings with the prefix of their keys.
    """
    for prefix, values in groups:
        default, now = (
            flatten({prefix: each} if prefix else each) for each in (defaults(type(values)), to_jsonable_python(values))
        )
        for key, need in without_effect(values, prefix).items():
            if key in given and now[key] != default[key]:
                need = f"{key.rpartition('.')[0]}.{need}".lstrip(".")
                raise ValueError(f"{key}={given[key]} has no effect without {need}; leave it out, or set that")


def known_settings(source: str | None = None) -> dict[str, FieldInfo]:
    """What the groups of a run and the text `source` declare, or all texts, by dotted key."""
    texts = [("data", kind) for name, kind in SOURCES.items() if source in (None, name)]
    groups = [("", TopLevelConfig), *GROUPS.items(), *texts]
    return {key: each for prefix, kind in groups for key, each in declared(kind, prefix).items()}


def options_of(group: str) -> list[str]:
    """The options of a config group that have a yaml file."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def with_absolute_paths(data: Mapping[str, Any]) -> dict[str, Any]:
    """The settings below `data:` whose paths do not depend on the working directory, in which a run may be resumed."""

    def absolute(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(absolute, value)]
        return os.path.abspath(os.path.expanduser(value)) if isinstance(value, str) and value else value

    flat = flatten(data)
    paths = ["path", "val_path", "cache_dir", *(["tokenizer.path"] if flat.get("tokenizer.kind") == "file" else [])]
    return unflatten(flat | {key: absolute(flat[key]) for key in paths if key in flat})
