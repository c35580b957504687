"""Composes settings with Hydra: the declared defaults, the yaml files of configs/, and what was typed."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import hydra
import hydra.version
import yaml
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from tril.data.config import SOURCES
from tril.data.settings import defaults, nearest
from tril.model.training.settings import TopLevelConfig
from tril.scripts.cli.config import COMMANDS, CONFIGS, GROUPS, data_defaults, known_names
from tril.scripts.cli.errors import UserError, command, unknown_setting
from tril.scripts.cli.typed import Typed

VERSION_BASE = "1.3"  # of Hydra's behavior: since 1.2, it does not change the working directory
OWN_TEXT = ("train", "evaluate")  # programs for which data.path=FILE means data=files


@dataclass(frozen=True)
class Composed:
    """Composed settings.

    Attributes:
        settings: plain values, interpolations resolved.
        choices: the option of each config group; None: none.
        grid: the values of an ablation, by key.
    """

    settings: dict[str, Any]
    choices: dict[str, str | None]
    grid: dict[str, str]

    def check_single(self, typed: Typed) -> None:
        """Raises UserError if a single run has what belongs to a grid, such as an ablation without -m."""
        if self.grid and not any(key in typed for key in self.grid):
            remedy = f"run it with {command('train')} -m, or choose a value, such as {next(iter(self.grid))}=..."
            raise UserError(f"the ablation is a grid over {', '.join(self.grid)}; {remedy}")
        for key in ("sweep.skip_invalid", "sweep.new", "tune"):
            if key in typed:
                raise UserError(f"{key}={typed.get(key)} has no effect on a single run; leave it out, or add -m")


def compose(config_name: str, typed: Typed) -> Composed:
    """The settings of configs/`config_name`.yaml with what was typed.

    Raises:
        UserError: a wrong setting, in one line.
    """
    register_defaults()
    outer = GlobalHydra.instance().hydra  # of a program that uses Hydra itself
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), job_name=config_name, version_base=VERSION_BASE):
            cfg = hydra.compose(config_name, with_own_text(config_name, typed), return_hydra_config=True)
            choices, grid = dict(cfg.hydra.runtime.choices), dict(cfg.hydra.sweeper.get("params") or {})
            tree = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
            settings = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(explain(error, config_name)) from error
    finally:
        GlobalHydra.instance().hydra = outer
    return Composed(settings, choices, grid)  # pyright: ignore[reportArgumentType]


def with_own_text(config_name: str, typed: Typed) -> list[str]:
    """For Hydra's parser. data.path=FILE means data=files, unless something else chooses a text that has a path."""
    if config_name in OWN_TEXT and "data.path" in typed and "data" not in typed:
        experiment = [f"experiment={name}" for name in [typed.get("experiment")] if name]
        if not experiment or "path" not in hydra.compose(config_name, experiment).data:
            return ["data=files", *typed.texts]
    return typed.texts


@cache
def register_defaults() -> None:
    """Puts the defaults of all settings where the yaml files of configs/ name them.

    `settings` of a group has its defaults, `run_settings` those that belong to no config group, and `source_NAME` of
    the group `data` those of a text.
    """
    store = ConfigStore.instance()
    single = {name: defaults(group) for name, group in GROUPS.items() if not (CONFIGS / name).is_dir()}
    store.store("run_settings", defaults(TopLevelConfig) | single)
    for name in GROUPS.keys() - single.keys():
        store.store("settings", defaults(GROUPS[name]), group=name)
    for name, group in COMMANDS.items():
        store.store(f"{name}_settings", defaults(group))
    for name in SOURCES:
        store.store(f"source_{name}", data_defaults(name), group="data")


def run_hydra(options: argparse.Namespace, typed: Typed, task: Callable | None, config_name: str) -> None:
    """What `hydra.main` does with a parsed command line: a grid, whose runs are each a call of `task`, or --cfg job.

    Raises:
        UserError: wrong settings.
    """
    register_defaults()
    hydra.version.setbase(VERSION_BASE)
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base=VERSION_BASE):
            options.overrides = with_own_text(config_name, typed)
        _run_hydra(options, get_args_parser(), task or (lambda cfg: None), str(CONFIGS), config_name)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, config_name)) from error


def explain(error: Exception, config_name: str) -> str:
    """An error of Hydra or OmegaConf in one line that names the nearest valid choice or a remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:  # of a search path, there is none
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = error.options or [path.stem for path in (CONFIGS / group).glob("*.yaml")]
        options = [option for option in options if not option.startswith(("settings", "run_settings", "source_"))]
        return f"there is no {group}={name}{nearest(name, options)}"
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.lstrip("+").partition("=")
        remedy = f"put quotes within quotes, \"{key}='...'\"" if value else "settings are written key=value"
        return f"cannot read {error.override.lstrip('+')!r}; {remedy}"
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, ConfigKeyError | AttributeError):
        key = getattr(cause, "full_key", None) or str(error).split("'")[1].lstrip("+~")
        return str(unknown_setting(key, [name for name in known_keys(config_name) if name != key]))
    if several := re.match(r"Ambiguous value for argument '\+*(.*?)=(.*)'", str(error)):
        key, value = several.groups()
        remedy = "add -m for a grid of runs" if config_name == "train" else "give one"
        return f"{key}={value} has several values; {remedy}, or write a list as {key}=[{value}]"
    lines = [line.strip() for line in str(error).replace("++", "").splitlines() if line.strip()]
    return ": ".join(lines[:2])


def known_keys(config_name: str) -> list[str]:
    """Dotted names of the settings of a program."""
    values = yaml.safe_load((CONFIGS / f"{config_name}.yaml").read_text(encoding="utf-8"))
    return [*values, *(known_names() if "run_settings" in (values.get("defaults") or ()) else ())]
