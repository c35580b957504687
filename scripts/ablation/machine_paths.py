"""Removes the absolute paths of a machine from what is published: only their last component stays."""

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any

NAME = r"[\w.@](?:[\w.@+~=%#-]|,(?=\w))*"
# a path within a text; not val/loss, ../x, ~/x, https://host/x or </b>
PATH = re.compile(rf"(?<![\w.:/\\<~-])(?:[A-Za-z]:[/\\]|\\\\|/)({NAME}(?:[/\\]{NAME})*)[/\\]?")


class PathRemover:
    """Replaces every absolute path in plain containers by its last component.

    Args:
        known: plain containers whose texts may be paths that `PATH` does not match, such as those with spaces.
    """

    def __init__(self, known: Iterable[Any]) -> None:
        paths = {text for tree in known for text in _texts(tree) if is_path(text) and not PATH.fullmatch(text)}
        self._known = sorted(paths, key=len, reverse=True)

    def __call__(self, value: Any) -> Any:
        """A copy of the plain containers in `value` without absolute paths."""
        if isinstance(value, dict):
            return {key: self(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self(item) for item in value]
        if not isinstance(value, str):
            return value
        for path in self._known:
            value = value.replace(path, _last_component(path))
        return PATH.sub(lambda match: re.split(r"[/\\]", match[1])[-1], value)


def is_path(value: object) -> bool:
    """Whether the value is an absolute path of any system."""
    return isinstance(value, str) and _pure(value).is_absolute()


def _pure(text: str) -> PurePath:
    posix = PurePosixPath(text)
    return posix if posix.is_absolute() else PureWindowsPath(text)


def _last_component(path: str) -> str:
    return _pure(path).name or path


def _texts(tree: Any) -> Iterator[str]:
    """All texts in plain containers."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from _texts(item)
    elif isinstance(tree, str):
        yield tree
