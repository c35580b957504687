"""The runs of a grid: their settings, whether these are valid, and how large the models are."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tril.model.formats import plain_table
from tril.scripts.cli.app import explain, plain_settings
from tril.scripts.cli.config import CONFIGS, RunConfig
from tril.scripts.cli.errors import UserError, message_of
from tril.scripts.cli.run import choose_hardware
from tril.scripts.experiments.sweep import label_of, text_of

VALUE = re.compile(r"(seed|(\+\+)?\w+(\.\w+)+)=")  # an override that sets a value, not the choice of a group
MAX_FOLDER_NAME = 120  # characters


@dataclass
class PlannedRun:
    """A valid run of a sweep.

    Attributes:
        overrides: of the command line, key=value each.
        values: of the swept keys.
        sizes: parameters and FLOPs per token, once `fit_to_text` has set them.
    """

    overrides: list[str]
    settings: dict[str, Any]
    config: RunConfig
    values: dict[str, object] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return self.config.top.seed

    @property
    def variant(self) -> str:
        """A name of its values, the same for all seeds."""
        return folder_name(self.values) or "configuration"

    @property
    def folder(self) -> str:
        """Its name below the sweep's folder."""
        return folder_name(self.values | {"seed": self.seed})

    @property
    def identity(self) -> str:
        """Equal for two runs whose results are necessarily equal."""
        return json.dumps(self.config.canonical(), sort_keys=True)

    def entry(self) -> dict:
        """Its entry of sweep.json."""
        named = {"folder": self.folder, "values": self.values, "seed": self.seed, "overrides": self.overrides}
        return named | self.sizes


@dataclass(frozen=True)
class Rejected:
    """A combination of the grid that cannot be trained, and the reason."""

    overrides: list[str]
    reason: str


def compose_grid(composer: "Composer") -> tuple[list[PlannedRun], list[Rejected]]:
    """Composes and checks every combination that Hydra makes of the command.

    Raises:
        UserError: the command as a whole is wrong.
    """
    swept = [f"{key}={value}" for key, value in (composer.config.hydra.sweeper.params or {}).items()]
    try:
        parsed = composer.parser.parse_overrides(swept + list(composer.config.hydra.overrides.task))
        [grid] = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise UserError(explain(error, composer.config_name, [])) from error
    runs: dict[str, PlannedRun] = {}
    rejected = []
    for overrides in ([text for text in combination if not text.startswith("sweep.")] for combination in grid):
        run = composer.plan(overrides)
        if isinstance(run, Rejected):
            rejected.append(run)
            continue
        first = runs.setdefault(run.identity, run)
        if first is not run:
            differing = " ".join(text for text in first.overrides if text not in run.overrides)
            rejected.append(Rejected(overrides, f"the same run as {differing}: the difference has no effect"))
    return list(runs.values()), rejected


class Composer:
    """Composes the settings of runs.

    Hydra takes tenths of a second to compose, so runs that differ in values alone are composed once.
    """

    def __init__(self, config: DictConfig, config_name: str) -> None:
        self.loader, self.config, self.config_name = GlobalHydra.instance().config_loader(), config, config_name
        self.parser = OverridesParser.create(config_loader=self.loader)
        self.composed: dict[tuple[str, ...], DictConfig] = {}  # by the overrides that choose groups

    def plan(self, overrides: list[str]) -> PlannedRun | Rejected:
        """The run of these overrides, if they are valid."""
        try:
            settings = self.settings(overrides)
            config = RunConfig.of(settings)
            words = as_arguments(self.parser.parse_overrides(overrides))
            return PlannedRun(words, settings, replace(config, hardware=choose_hardware(config)))
        except OmegaConfBaseException as error:  # raised while a value is read
            return Rejected(overrides, explain(error, self.config_name, self.parser.parse_overrides(overrides)))
        except (ValueError, OSError) as error:
            return Rejected(overrides, message_of(error))

    def settings(self, overrides: list[str]) -> dict[str, Any]:
        """The settings of a run as plain values; raises ValueError for invalid overrides."""
        values = [override for override in overrides if VALUE.match(override)]
        groups = tuple(override for override in overrides if override not in values)
        try:
            if groups not in self.composed:
                cfg = self.loader.load_sweep_config(self.config, list(groups))
                self.composed[groups] = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
            cfg = copy.deepcopy(self.composed[groups])
            for parsed in self.parser.parse_overrides(values):
                OmegaConf.update(cfg, parsed.key_or_group, parsed.value(), force_add=True)
            return plain_settings(cfg)
        except (HydraException, OmegaConfBaseException) as error:
            cause: Exception = error
            try:
                self.loader.load_sweep_config(self.config, overrides)
            except (HydraException, OmegaConfBaseException) as hydras_error:  # says more about an unknown key
                cause = hydras_error
            parsed = self.parser.parse_overrides(overrides)
            raise ValueError(explain(cause, self.config_name, parsed)) from cause


def as_arguments(parsed: Sequence[Override]) -> list[str]:
    """The overrides as arguments of train.py, which takes a text without the quotes of Hydra's grammar."""
    values = [each.value() for each in parsed]
    return [
        f"{each.get_key_element()}={value}" if isinstance(value, str) else str(each.input_line)
        for each, value in zip(parsed, values, strict=True)
    ]


def report_rejected(runs: Sequence[PlannedRun], rejected: Sequence[Rejected], *, skip_invalid: bool) -> None:
    """Prints the combinations that are left out, each once for all its seeds.

    Raises:
        UserError: there are some and `skip_invalid` is False, or no valid run remains.
    """
    if not rejected:
        return
    every = [*runs, *rejected]
    columns = list(zip(*(run.overrides for run in every), strict=True))
    varied = [i for i, texts in enumerate(columns) if len(set(texts)) > 1 and not texts[0].startswith("seed=")]
    lines = dict.fromkeys(f"  {' '.join(run.overrides[i] for i in varied)}: {run.reason}" for run in rejected)
    counts = f"{len(rejected)} of {len(every)} runs"
    if skip_invalid and runs:
        print("\n".join([f"{counts} are left out:", *lines]), flush=True)
        return
    remedy = "correct them, or leave them out with sweep.skip_invalid=true" if runs else "correct them"
    error = UserError(f"{counts} of the grid are invalid; {remedy}")
    for line in lines:
        error.add_note(line)
    raise error


def name_runs(runs: Sequence[PlannedRun]) -> list[str]:
    """Sets the values of each run; returns the swept keys, those in whose text the runs differ, without the seed."""
    texts = [
        {key.lstrip("+"): text for key, _, text in (override.partition("=") for override in run.overrides)}
        for run in runs
    ]
    keys = dict.fromkeys(key for text in texts for key in text if key != "seed")
    swept = [key for key in keys if len({text.get(key) for text in texts}) > 1]
    for run, text in zip(runs, texts, strict=True):
        run.values = {key: value_of(run.settings, key, text.get(key)) for key in swept}
    return swept


def value_of(settings: Mapping[str, Any], key: str, choice: str | None) -> object:
    """The value of a key; for a config group `choice`, the name of its option, and as typed for a group of settings."""
    name = key.partition("@")[0]
    if (CONFIGS / name).is_dir():
        return choice
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return choice if isinstance(value, Mapping) else value


def folder_name(values: Mapping[str, object]) -> str:
    """The values as a name that file systems accept, with a hash if it had to be changed."""
    text = ",".join(f"{key}={text_of(value)}" for key, value in values.items())
    clean = re.sub(r"[^\w.,=+-]", "_", text)[:MAX_FOLDER_NAME]
    return clean if clean == text else f"{clean}-{sha256(text.encode()).hexdigest()[:8]}"


def fit_to_text(runs: Sequence[PlannedRun]) -> tuple[list[PlannedRun], list[Rejected]]:
    """Prepares the text and sets the sizes of each run; rejects runs for which the text is too short."""
    import torch

    from tril.data.batches import TrainWindows, ValWindows
    from tril.model.gpt import GPT, sizes

    fitted, rejected = [], []
    for run in runs:
        try:
            data, length = run.config.data, run.config.model.context_length
            text = data.prepare()
            TrainWindows(text.tokens("train"), length, data.batch_size, run.seed)  # raises if the text is too short
            ValWindows(text.tokens("val"), length, data.batch_size)
            assert run.config.hardware is not None
            run.config = run.config.complete(run.config.hardware, text.meta["vocab_size"])
        except (ValueError, OSError) as error:
            rejected.append(Rejected(run.overrides, message_of(error)))
            continue
        with torch.device("meta"):
            run.sizes |= sizes(GPT(run.config.model), run.config.window_lengths)
        fitted.append(run)
    return fitted, rejected


def grid_table(runs: Sequence[PlannedRun], states: Sequence[str]) -> str:
    """One line for each variant: seeds, sizes, and the states of its runs."""
    lines = [["", "seeds", "parameters", "MFLOP per token", "so far"]]
    for variant in dict.fromkeys(run.variant for run in runs):
        members = [(run, state) for run, state in zip(runs, states, strict=True) if run.variant == variant]
        run = members[0][0]
        sizes = [f"{run.sizes['parameters']:,}", f"{run.sizes['flops_per_token'] / 1e6:,.1f}"]
        ended = [state for _, state in members if state != "not started"]
        so_far = ", ".join(f"{ended.count(state)} {state}" for state in sorted(set(ended)))
        lines.append([label_of(run.values), ",".join(str(run.seed) for run, _ in members), *sizes, so_far])
    return plain_table(lines, text_columns=(0, len(lines[0]) - 1))
