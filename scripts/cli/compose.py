"""Composes settings with Hydra: the declared defaults, the yaml files of configs/, and what was typed."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import hydra.version
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from tril.data.settings import nearest
from tril.scripts.cli.config import CONFIGS, GROUPS, data_defaults
from tril.scripts.cli.errors import UserError, unknown_setting
from tril.scripts.cli.typed import Typed

VERSION_BASE = "1.3"  # of Hydra's behavior: since 1.2, it does not change the working directory
OWN_TEXT = ("train", "plan", "evaluate")  # programs for which data.path=FILE means data=files


@dataclass(frozen=True)
class Composed:
    """Composed settings.

    Attributes:
        settings: plain values, interpolations resolved.
        choices: the option of each config group; None: none.
        hydra: Hydra's own configuration.
    """

    settings: dict[str, Any]
    choices: dict[str, str | None]
    hydra: DictConfig


def compose(config_name: str, typed: Typed, config_dir: str | None = None) -> Composed:
    """The settings of configs/`config_name`.yaml with what was typed.

    Args:
        config_dir: a folder with more config files, whose options come first.

    Raises:
        UserError: a wrong setting, in one line.
    """
    register_defaults()
    outer = GlobalHydra.instance().hydra  # of a program that uses Hydra itself
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), job_name=config_name, version_base=VERSION_BASE):
            searchpath = [f"hydra.searchpath=[file://{Path(config_dir).absolute()}]"] if config_dir else []
            overrides = with_own_text(config_name, typed).texts
            cfg = hydra.compose(config_name, [*searchpath, *overrides], return_hydra_config=True)
            hydra_cfg = cfg.hydra
            tree = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
            settings = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(explain(error, config_name)) from error
    finally:
        GlobalHydra.instance().hydra = outer
    assert isinstance(settings, dict)
    return Composed(settings, dict(hydra_cfg.runtime.choices), hydra_cfg)  # pyright: ignore[reportArgumentType]


def with_own_text(config_name: str, typed: Typed) -> Typed:
    """data.path=FILE means data=files, unless something else chooses a text that has a path."""
    if config_name not in OWN_TEXT or "data.path" not in typed or "data" in typed:
        return typed
    if experiment := typed.get("experiment"):
        chosen = hydra.compose(config_name, [f"experiment={experiment}"])
        if "path" in chosen.data:
            return typed
    return Typed((*Typed.of(["data=files"]), *typed))


@cache
def register_defaults() -> None:
    """Puts the defaults of all settings where the yaml files of configs/ name them.

    `settings` of a group has its defaults, `run_settings` those that belong to no config group, and `source_NAME` of
    the group `data` those of a text.
    """
    from tril.data.config import SOURCES
    from tril.data.settings import defaults
    from tril.model.training.settings import TopLevelConfig

    store = ConfigStore.instance()
    single = {name: defaults(group) for name, group in GROUPS.items() if not (CONFIGS / name).is_dir()}
    store.store("run_settings", defaults(TopLevelConfig) | single)
    for name in GROUPS.keys() - single.keys():
        store.store("settings", defaults(GROUPS[name]), group=name)
    for name in SOURCES:
        store.store(f"source_{name}", data_defaults(name), group="data")


def run_grid(task, typed: Typed, config_name: str = "train") -> None:
    """Hydra's multirun: `task` is called for each combination of values, by Hydra's launcher."""
    register_defaults()
    arguments = get_args_parser().parse_args(["--multirun", *with_own_text(config_name, typed).texts])
    run_hydra(arguments, task, config_name)


def run_hydra(arguments: argparse.Namespace, task, config_name: str) -> None:
    """What `hydra.main` does with a parsed command line, such as --cfg job; raises UserError for a wrong one."""
    register_defaults()
    hydra.version.setbase(VERSION_BASE)
    try:
        _run_hydra(arguments, get_args_parser(), task, str(CONFIGS), config_name)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, config_name)) from error


def explain(error: Exception, config_name: str) -> str:
    """An error of Hydra or OmegaConf in one line that names the nearest valid choice or a remedy."""
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = error.options or [path.stem for path in (CONFIGS / group).glob("*.yaml") if group]
        options = [
            option for option in options if option not in ("settings", "run_settings") and "source_" not in option
        ]
        # --config-name has none, and a search path with a line each
        return f"there is no {group}={name}{nearest(name, options)}" if options else str(error).splitlines()[0]
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.lstrip("+").partition("=")
        remedy = f"put quotes within quotes, \"{key}='...'\"" if value else "settings are written key=value"
        return f"cannot read {error.override.lstrip('+')!r}; {remedy}"
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, ConfigKeyError | AttributeError):
        key = getattr(cause, "full_key", None) or str(error).split("'")[1].lstrip("+~")
        return str(unknown_setting(key, known_keys(config_name)))
    if grid := re.match(r"Ambiguous value for argument '\+*(.*?)=(.*)'", str(error)):
        key, value = grid.groups()
        several = f"; add -m for a grid of runs, or write a list as {key}=[{value}]" if config_name == "train" else ""
        return f"{key}={value} has several values{several or '; give one'}"
    if isinstance(error, ConfigKeyError | ConfigAttributeError):  # read by our code after `~key` removed it
        return f"{error.full_key} is missing and required; leave out ~{error.full_key}, or set {error.full_key}=VALUE"
    lines = [line.strip() for line in str(error).replace("++", "").splitlines() if line.strip()]
    return ": ".join(lines[:2])


def known_keys(config_name: str) -> list[str]:
    """Dotted names of all settings and groups of the default composition."""
    register_defaults()
    with hydra.initialize_config_dir(str(CONFIGS), job_name=config_name, version_base=VERSION_BASE):
        cfg = hydra.compose(config_name, return_hydra_config=True)
    groups = [name for name in cfg.hydra.runtime.choices if "/" not in name]
    settings = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(settings, dict)
    return [*groups, "hydra.run.dir", *dotted({key: value for key, value in settings.items() if key != "hydra"})]


def dotted(tree: Mapping, prefix: str = "") -> list[str]:
    """The dotted names of all keys of nested mappings."""
    names = []
    for key, value in tree.items():
        names += [f"{prefix}{key}", *(dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else ())]
    return names
