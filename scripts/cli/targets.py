"""Callbacks and loggers that the command line names by a `_target_`.

A `_target_` runs the code that it names. So it is used only if it is typed, never from a saved run, and only if it is a
callback or logger of Lightning; allow_targets=[package.module.Class] allows another one.
"""

import importlib
from collections.abc import Collection, Mapping
from typing import Any

from tril.scripts.cli.errors import message_of

PACKAGES = ("lightning.pytorch.callbacks.", "lightning.pytorch.loggers.")


def build_targets(targets: Mapping[str, Mapping[str, Any]], allowed: Collection[str]) -> tuple[list, list]:
    """The callbacks and the loggers that the command line adds.

    Args:
        targets: dotted key -> `_target_` and arguments.
        allowed: targets besides those of Lightning.

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
        arguments = dict(value)
        name = str(arguments.pop("_target_"))
        module, _, attribute = name.rpartition(".")
        if name not in allowed and not f"{module}.".startswith(PACKAGES):  # before the import, which runs it
            remedy = f"if you trust it, add allow_targets=[{name}] to the command line"
            raise ValueError(f"{key}._target_={name} is not a callback or logger of Lightning; {remedy}")
        try:
            target = getattr(importlib.import_module(module), attribute)
            made = target(**arguments)
        except Exception as error:  # whatever the constructor raises is about its arguments
            raise ValueError(f"{key}._target_={name}: {message_of(error)}") from error
        if not isinstance(made, kind):
            raise ValueError(f"{key}._target_={name} is no {kind.__name__.lower()} of Lightning; correct it")
        built[kind].append(made)
    return built[Callback], built[Logger]
