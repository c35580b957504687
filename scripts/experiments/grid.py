"""The runs of a grid: their settings, whether these are valid, how large the models are and how long training takes."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tril.scripts.cli.command_line import explain
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.errors import UserError, message_of
from tril.scripts.cli.formats import clock, plain_table

VALUE = re.compile(r"(seed|(\+\+)?\w+(\.\w+)+)=")  # an override that sets a value, not the choice of a group
MAX_FOLDER_NAME = 120  # characters


@dataclass
class PlannedRun:
    """A valid run of the grid.

    Attributes:
        overrides: of the command line, key=value each.
        values: of the swept keys.
        folder: its name below the sweep's folder.
        arm: a name of its values, the same for all seeds.
        sizes: parameters, FLOPs per token and estimated seconds; empty if the grid runs on other machines.
    """

    overrides: list[str]
    settings: dict[str, Any]
    config: RunConfig
    values: dict[str, object] = field(default_factory=dict)
    folder: str = ""
    arm: str = ""
    sizes: dict[str, float] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return self.config.top.seed

    def entry(self) -> dict:
        """Its entry of sweep.json."""
        named = {"folder": self.folder, "values": self.values, "seed": self.seed, "overrides": self.overrides}
        return named | {"estimated_seconds": None} | self.sizes


@dataclass(frozen=True)
class Rejected:
    """A combination of the grid that cannot be trained, and the reason."""

    overrides: list[str]
    reason: str


def compose_grid(composer: "Composer", *, elsewhere: bool) -> tuple[list[PlannedRun], list[Rejected]]:
    """Composes and checks every combination that Hydra makes of the command.

    Args:
        elsewhere: the runs start on other machines, so this one's hardware is not checked.

    Raises:
        UserError: the command as a whole is wrong.
    """
    swept = [f"{key}={value}" for key, value in (composer.config.hydra.sweeper.params or {}).items()]
    try:
        parsed = composer.parser.parse_overrides(swept + list(composer.config.hydra.overrides.task))
        [grid] = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise UserError(explain(error, composer.config_name)) from error
    runs: dict[str, PlannedRun] = {}
    rejected = []
    for overrides in ([text for text in combination if not text.startswith("sweep.")] for combination in grid):
        run = composer.plan(overrides, elsewhere=elsewhere)
        if isinstance(run, Rejected):
            rejected.append(run)
            continue
        first = runs.setdefault(same_run(run), run)
        if first is not run:
            pairs = zip(overrides, first.overrides, strict=True)
            differing = " ".join(other for override, other in pairs if override != other)
            rejected.append(Rejected(overrides, f"the same run as {differing}: the difference has no effect"))
    return list(runs.values()), rejected


class Composer:
    """Composes the settings of runs.

    Hydra takes tenths of a second to compose and to explain an unknown key. Runs that differ in values alone are
    therefore composed once, and an error that many runs share is explained once.
    """

    def __init__(self, config: DictConfig, config_name: str):
        self.loader, self.config, self.config_name = GlobalHydra.instance().config_loader(), config, config_name
        self.parser = OverridesParser.create(config_loader=self.loader)
        self.composed: dict[tuple[str, ...], DictConfig] = {}  # by the overrides that choose groups
        self.reasons: dict[str, str] = {}  # by Hydra's message

    def plan(self, overrides: list[str], *, elsewhere: bool) -> PlannedRun | Rejected:
        """The run of these overrides, if they are valid."""
        try:
            settings = self.settings(overrides)
            config = RunConfig.of(settings)
            return PlannedRun(overrides, settings, config if elsewhere else config.on_this_machine())
        except OmegaConfBaseException as error:  # raised while a value is read
            return Rejected(overrides, explain(error, self.config_name))
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
            message = str(error)
            if message not in self.reasons:
                self.reasons[message] = self._reason(overrides, error)
            raise ValueError(self.reasons[message]) from error

    def _reason(self, overrides: list[str], error: Exception) -> str:
        try:
            self.loader.load_sweep_config(self.config, overrides)
        except (HydraException, OmegaConfBaseException) as hydras_error:  # says more about an unknown key
            error = hydras_error
        return explain(error, self.config_name)


def plain_settings(cfg: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain values, without Hydra's own."""
    settings = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    return OmegaConf.to_container(settings, resolve=True, throw_on_missing=True)  # pyright: ignore[reportReturnType]


def same_run(run: PlannedRun) -> str:
    """A key that is equal for two runs whose results are necessarily equal."""
    return json.dumps(run.config.canonical(), sort_keys=True)


def report_rejected(runs: Sequence[PlannedRun], rejected: Sequence[Rejected], *, skip_invalid: bool) -> None:
    """Prints the combinations that are left out.

    Raises:
        UserError: there are some and `skip_invalid` is False, or no valid run remains.
    """
    if not rejected:
        return
    every = [*runs, *rejected]
    columns = zip(*(run.overrides for run in every), strict=True)
    differing = [i for i, texts in enumerate(columns) if len(set(texts)) > 1]
    seeds: dict[tuple[str, str], list[str]] = {}  # by the other overrides and the reason
    for combination in rejected:
        chosen = [combination.overrides[i] for i in differing]
        rest = " ".join(text for text in chosen if not text.startswith("seed="))
        seeds.setdefault((rest, combination.reason), []).extend(
            text.removeprefix("seed=") for text in chosen if text.startswith("seed=")
        )
    lines = [
        f"  {rest}{f' seed={chr(44).join(values)}' if values else ''}: {reason}"
        for (rest, reason), values in seeds.items()
    ]
    if skip_invalid and runs:
        print("\n".join([f"{len(rejected)} of {len(every)} runs are left out:", *lines]), flush=True)
        return
    remedy = "correct them, or leave them out with sweep.skip_invalid=true" if runs else "correct them"
    error = UserError(f"{len(rejected)} of {len(every)} runs of the grid are invalid; {remedy}")
    for line in lines:
        error.add_note(line)
    raise error


def name_runs(runs: Sequence[PlannedRun]) -> list[str]:
    """Sets the values and the folder of each run; returns the swept keys without the seed."""
    texts, swept = texts_of(runs), swept_keys(runs)
    for run, text in zip(runs, texts, strict=True):
        run.values = {key: value_of(run.settings, key, text[key]) for key in swept}
        of_arm = {key: text[key] for key in swept}
        run.arm, run.folder = folder_name(of_arm) or "configuration", folder_name(of_arm | {"seed": run.seed})
    return swept


def swept_keys(runs: Sequence[PlannedRun]) -> list[str]:
    """The keys in whose text the runs differ, without the seed."""
    texts = texts_of(runs)
    return [key for key in texts[0] if key != "seed" and len({text[key] for text in texts}) > 1]


def texts_of(runs: Sequence[PlannedRun]) -> list[dict[str, str]]:
    """Key -> text of the overrides of each run."""
    return [
        {key.lstrip("+"): text for key, _, text in (override.partition("=") for override in run.overrides)}
        for run in runs
    ]


def value_of(settings: Mapping[str, Any], key: str, choice: str | None) -> object:
    """The value of a key; for a config group `choice`, the name of its option."""
    value: Any = settings
    for name in key.partition("@")[0].replace("/", ".").split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return choice if isinstance(value, Mapping) else value


def folder_name(values: Mapping[str, object]) -> str:
    """The values as a name that file systems accept, with a hash if it had to be changed."""
    text = ",".join(f"{key}={value}" for key, value in values.items())
    clean = re.sub(r"[^\w.,=+-]", "_", text)[:MAX_FOLDER_NAME]
    return clean if clean == text else f"{clean}-{sha256(text.encode()).hexdigest()[:8]}"


def estimate_runs(runs: Sequence[PlannedRun]) -> tuple[list[PlannedRun], list[Rejected]]:
    """Prepares the text, sets sizes and estimated seconds of each run, rejects runs for which the text is too short."""
    import torch

    from tril.data.batches import TrainWindows, ValWindows
    from tril.model.gpt import GPT
    from tril.model.training import run_estimate as estimate

    speeds, estimated, rejected = {}, [], []
    for run in runs:
        try:
            data, length, val_windows = run.config.data, run.config.model.context_length, 0
            prepared = data.prepare()
            for text in prepared.texts.values():
                TrainWindows(text.tokens("train"), length, data.batch_size, run.seed)
                val_windows += ValWindows(text.tokens("val"), length, data.batch_size).n_windows
            run.config = run.config.fitted(prepared.meta["vocab_size"])
            config, model = run.config, run.config.model
            assert config.hardware is not None  # only runs on this machine are estimated
        except (ValueError, OSError) as error:
            rejected.append(Rejected(run.overrides, message_of(error)))
            continue
        with torch.device("meta"):
            run.sizes |= estimate.sizes(GPT(model))
        key = repr((model, config.optim, data.batch_size, config.hardware))
        if key not in speeds:
            speeds[key] = estimate.measure(model, config.optim, data.batch_size, config.hardware)
        run.sizes["estimated_seconds"] = speeds[key].run(
            steps=config.steps,
            windows_per_step=data.batch_size * config.accumulate,
            val_windows=val_windows,
            validations=-(-config.steps // config.trainer.val_check_interval),
        )
        estimated.append(run)
    return estimated, rejected


def grid_table(runs: Sequence[PlannedRun], states: Sequence[str]) -> str:
    """One line for each configuration: seeds, sizes, seconds of one run, and the states of its runs."""
    lines = [["", "seeds", "parameters", "MFLOP per token", "time of a run", "so far"]]
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        groups.setdefault(str(run.values), []).append(i)
    for members in groups.values():
        run, seeds = runs[members[0]], ",".join(str(runs[i].seed) for i in members)
        label = ", ".join(f"{key}={value}" for key, value in run.values.items()) or "the configuration"
        counts = {state: sum(states[i] == state for i in members) for state in ("finished", "unfinished", "failed")}
        sizes = ["?"] * 3
        if run.sizes:
            mflops = run.sizes["flops_per_token"] / 1e6
            sizes = [f"{run.sizes['parameters']:,}", f"{mflops:,.1f}", clock(run.sizes["estimated_seconds"])]
        lines.append([label, seeds, *sizes, ", ".join(f"{n} {state}" for state, n in counts.items() if n)])
    return plain_table(lines, text_columns=(0, len(lines[0]) - 1))
