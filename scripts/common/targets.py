"""Builds callbacks and loggers from `_target_` entries, of allowed classes only.

A run folder can come from somebody else, and instantiating whatever its config.yaml names would run their code. Hence
only Tril's and Lightning's own callbacks and loggers are built, unless the command line names others.
"""

import importlib
from collections.abc import Collection
from typing import Any

from tril.scripts.common.cli import message_of

PACKAGES = ("tril.model.training", "lightning.pytorch.callbacks", "lightning.pytorch.loggers")
RENAMED = {  # targets in run folders of older versions
    "model.training.callbacks.GarbageCollection": "tril.model.training.trainer.GarbageCollection",
    "model.training.callbacks.Metrics": "tril.model.training.callbacks.metrics.Metrics",
    "model.training.callbacks.Progress": "tril.model.training.callbacks.progress.Progress",
    "model.training.callbacks.Samples": "tril.model.training.callbacks.samples.Samples",
    "model.training.callbacks.WindowLosses": "tril.model.training.callbacks.window_losses.WindowLosses",
    "model.training.causality.Causality": "tril.model.training.callbacks.causality_check.CausalityCheck",
    "model.training.heads.HeadMetrics": "tril.model.training.callbacks.head_metrics.HeadMetrics",
    "model.training.loggers.wandb_logger": "lightning.pytorch.loggers.WandbLogger",
    "tril.model.training.loggers.wandb_logger": "lightning.pytorch.loggers.WandbLogger",
}


def instantiate(value: Any, key: str, allowed: Collection[str] = ()) -> Any:
    """Builds every mapping with a `_target_` in plain containers; other values stay as they are.

    Unlike hydra.utils.instantiate it resolves no interpolations, and it knows no other special key.

    Args:
        value: settings, interpolations resolved.
        key: their name on the command line, for error messages.
        allowed: targets that are allowed in addition.

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
    name = RENAMED.get(target, target) if isinstance(target, str) else ""
    module = name.rpartition(".")[0]
    if name in allowed:
        if (found := _import(name)) is None:
            raise ValueError(f"{key}._target_={target} does not exist; correct it, or install its package")
        return found
    if _in_packages(module):  # checked before the import, which runs the module
        found = _import(name)
        if _is_callback_or_logger(found):
            return found
    refused = f"{key}._target_={target} is not a callback or logger of Tril or Lightning"
    raise ValueError(f"{refused}; if you trust it, add allow_targets=[{target}] to the command line")


def _import(name: str) -> Any:
    """The object with this dotted name, module.attribute; None if it does not exist."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # the module exists and lacks one that it imports
            raise
        return None


def _in_packages(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in PACKAGES)


def _is_callback_or_logger(found: object) -> bool:
    """Whether it is a class of ours or of Lightning: a module of theirs also gives access to what it imports."""
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger

    return isinstance(found, type) and issubclass(found, Callback | Logger) and _in_packages(found.__module__)
