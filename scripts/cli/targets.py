"""Callbacks and loggers that the command line names by a `_target_`.

A `_target_` runs the code that it names. So it is used only if it is typed, never from a saved run, and only if it is a
callback or logger of Lightning; allow_targets=[package.module.Class] allows another one.
"""

import importlib
from collections.abc import Collection, Mapping
from typing import Any

from tril.scripts.cli.errors import message_of

PACKAGES = ("lightning.pytorch.callbacks", "lightning.pytorch.loggers")


def build_targets(targets: Mapping[str, Any], allowed: Collection[str]) -> tuple[list, list]:
    """The callbacks and the loggers that the command line adds: dotted key -> arguments.

    Raises:
        ValueError: one that is neither, that is not allowed, or that refuses its arguments.
    """
    if not targets:
        return [], []
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger

    built: dict[type, list] = {Callback: [], Logger: []}
    for key, value in targets.items():
        kind = Callback if key.startswith("callbacks.") else Logger
        made = instantiate(value, key, allowed)
        if not isinstance(made, kind):
            raise ValueError(
                f"{key}._target_={value['_target_']} is no {kind.__name__.lower()} of Lightning; correct it"
            )
        built[kind].append(made)
    return built[Callback], built[Logger]


def instantiate(value: Any, key: str, allowed: Collection[str] = ()) -> Any:
    """Builds every mapping with a `_target_` in plain containers; other values stay unchanged.

    Unlike hydra.utils.instantiate, it resolves no interpolations and knows no other special key.

    Args:
        key: the name of the setting, for error messages.
        allowed: targets besides those of Lightning.

    Raises:
        ValueError: a target that is not allowed or does not exist, or arguments that it refuses.
    """
    if isinstance(value, list):
        return [instantiate(item, f"{key}.{i}", allowed) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    special = [name for name in value if str(name).startswith("_") and name != "_target_"]
    if special:
        raise ValueError(f"{key}.{special[0]} is not supported, only _target_ and arguments by name; leave it out")
    arguments = {name: instantiate(item, f"{key}.{name}", allowed) for name, item in value.items()}
    if "_target_" not in value:
        return arguments
    target = find_target(arguments.pop("_target_"), key, allowed)
    try:
        return target(**arguments)
    except Exception as error:  # whatever the constructor raises is about its arguments
        message = message_of(error)
        raise ValueError(message if message.startswith(key) else f"{key}: {message}") from error


def find_target(target: object, key: str, allowed: Collection[str]) -> Any:
    """The class or function with the dotted name `target`. Raises ValueError if it is not allowed or does not exist."""
    name = target if isinstance(target, str) else ""
    module, _, attribute = name.rpartition(".")
    is_lightnings = any(module == package or module.startswith(f"{package}.") for package in PACKAGES)
    if name not in allowed and not is_lightnings:  # decided before the import, which runs the module
        refused = f"{key}._target_={target} is not a callback or logger of Lightning"
        raise ValueError(f"{refused}; if you trust it, add allow_targets=[{target}] to the command line")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # the module exists and lacks one that it imports
            raise
        found = None
    of_lightning = isinstance(found, type) and found.__module__.partition(".")[0] == "lightning"
    if found is None or not (of_lightning or name in allowed):  # its modules give access to what they import
        raise ValueError(f"{key}._target_={target} does not exist; correct it, or install its package")
    return found
