"""The settings in a run's folder. The folder can come from somebody else, so they are data: plain values of known
settings. What could write elsewhere, load a class or connect to a server is never taken from it, and has to be typed.
"""

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tril.data.config import SOURCES, DataConfig
from tril.data.settings import declared, defaults
from tril.model.runs import SETTINGS, read_settings, run_folder
from tril.scripts.cli.config import flatten, is_known, known_settings
from tril.scripts.cli.typed import Override, Typed

MAPPINGS = ("data.sources",)  # settings whose value is a mapping
MAX_FILES = 100_000  # in a run's folder
LINK_OF_WANDB = re.compile(r"wandb/[^/]+/logs/debug-core\.log")  # to ~/.cache/wandb; wandb only creates it


def read_saved(checkpoint: Path) -> dict[str, Any]:
    """The content of the config.yaml of the run that wrote a checkpoint.

    Raises:
        FileNotFoundError: there is no config.yaml.
        ValueError: it is damaged, or the folder has a link to another place.
    """
    path = run_folder(checkpoint) / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist, so the data of {checkpoint} are unknown; name a run's folder")
    refuse_links(path.parent)
    saved = read_settings(path)
    if not isinstance(saved, dict) or not isinstance(saved.get("data"), dict):
        raise ValueError(f"{path} does not have the settings of a run; restore it, or start a new run")
    return saved


def saved_settings(checkpoint: Path, typed: Typed) -> dict[str, Any]:
    """The settings of the run that wrote a checkpoint, with what was typed in their place.

    Raises:
        FileNotFoundError: there is no config.yaml.
        ValueError: it is damaged, it has something that must be typed, or the folder has a link to another place.
    """
    saved = read_saved(checkpoint)
    refuse_foreign(saved, typed)
    for override in typed:
        set_value(saved, override)
    return saved


def refuse_foreign(saved: Mapping[str, Any], typed: Typed, groups: Collection[str] | None = None) -> None:
    """Raises ValueError for saved settings that are used only if they are typed, or that do not exist.

    Args:
        groups: those that are used; None: all.
    """
    foreign = {
        key: value
        for key, value in _foreign(saved)
        if (groups is None or key.partition(".")[0] in groups) and not any(_covers(each.key, key) for each in typed)
    }
    if not foreign:
        return
    known = known_settings(saved)
    for key, value in foreign.items():
        if not is_known(key, known):
            raise ValueError(f"the saved {key}={value} is no setting; remove it from {SETTINGS}")
    key, value = next(iter(foreign.items()))
    texts = " ".join(shlex.quote(f"{'' if key in known else '+'}{key}={value}") for key, value in foreign.items())
    raise ValueError(f"the saved {key}={value} is not taken from a saved run; if you trust it, type {texts}")


def _foreign(saved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    known, must_be_typed = set(known_settings(saved)), _typed_only(saved)
    for key, value in flatten(saved).items():
        is_part = any(key.startswith(f"{name}.") for name in MAPPINGS)
        if key not in known and not is_part and value not in ({}, None) or must_be_typed.get(key, value) != value:
            yield key, value


def _typed_only(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that must be typed, with their defaults."""
    source = SOURCES.get(saved["data"].get("source"))
    groups = [DataConfig, *([source] if source else [])]
    default = {key: value for group in groups for key, value in flatten({"data": defaults(group)}).items()}
    return {each.key: default.get(each.key) for group in groups for each in declared(group, "data") if each.typed_only}


def _covers(typed: str, key: str) -> bool:
    return key == typed or key.startswith(f"{typed}.")


def set_value(settings: dict[str, Any], override: Override) -> None:
    """Sets or removes what was typed in nested settings."""
    *groups, name = override.key.split(".")
    for group in groups:
        if not isinstance(settings.get(group), dict):
            settings[group] = {}
        settings = settings[group]
    if override.sign == "~":
        settings.pop(name, None)
    else:
        settings[name] = override.parsed()


def refuse_links(folder: Path) -> None:
    """Raises ValueError if a run's folder has a link to a place outside of it, or a device."""
    root = os.path.realpath(folder)
    left, n_files = [root], 0
    while left:
        for entry in os.scandir(left.pop()):
            n_files += 1
            if n_files > MAX_FILES:
                raise ValueError(f"{folder} has more than {MAX_FILES:,} files; name the folder of a run")
            name = os.path.relpath(entry.path, root)
            if entry.is_symlink():
                place = os.path.realpath(entry.path)
                if not Path(place).is_relative_to(root) and not LINK_OF_WANDB.fullmatch(Path(name).as_posix()):
                    raise ValueError(f"{folder / name} is a link to {place}, outside of the run's folder; remove it")
            elif entry.is_dir():
                left.append(entry.path)
            elif not entry.is_file():
                raise ValueError(f"{folder / name} is neither a file nor a folder; remove it")
