"""The settings in a run's folder. The folder can come from somebody else, so they are plain values: no interpolation is
resolved, and what could write outside of the folder, load a class or connect to a server has to be typed again.
"""

import functools
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from tril.model.runs import SETTINGS, run_folder
from tril.scripts.common.arguments import quoted
from tril.scripts.common.cli import CONFIGS, flatten
from tril.scripts.common.targets import RENAMED

MAX_BYTES, MAX_DEPTH = 2**20, 50  # of config.yaml, which has 4 kB
MAX_FILES = 100_000  # in a run's folder
EXACT = ("_target_", "url", "cache_dir")  # last names of keys whose texts must be those of Tril's configs
LINK_OF_WANDB = re.compile(r"wandb/[^/]+/logs/debug-core\.log")  # to ~/.cache/wandb; wandb only creates it
FOLDER = "${output_dir}"  # in Tril's configs


class _Loader(get_yaml_loader()):
    """Reads numbers as OmegaConf writes them, and refuses what Tril never writes."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) or self.depth == MAX_DEPTH:
            problem = f"an alias, a tag, or more than {MAX_DEPTH} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_settings(path: Path) -> Any:
    """The content of a config.yaml. Raises ValueError for a damaged one."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes")
        return yaml.load(content.decode("utf-8"), _Loader)
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split()).replace(' in "<unicode string>",', ",")
        raise ValueError(f"{path} cannot be read ({problem}); restore it") from error


def saved_settings(checkpoint: Path) -> dict[str, Any]:
    """The config.yaml of the run that wrote a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or the folder has a link to another place.
    """
    path = run_folder(checkpoint) / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist, so the data of {checkpoint} are unknown; name a run's folder")
    refuse_links(path.parent)
    saved = read_settings(path)
    if not (
        isinstance(saved, dict) and isinstance(saved.get("output_dir"), str) and isinstance(saved.get("data"), dict)
    ):
        raise ValueError(f"{path} does not have the settings of a run; restore it, or start a new run")
    return saved


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


def foreign(settings: Mapping[str, Any], folder: Path, typed: Mapping[str, Any]) -> dict[str, Any]:
    """The saved callbacks, loggers and data settings that are used only if they are typed: dotted keys and values.

    Args:
        settings: of the run in `folder`, as plain values.
        typed: settings whose values are trusted.
    """
    groups = ("callbacks", "logger", "data")
    return dict(found for name in groups for found in _foreign(settings.get(name), typed.get(name), name, folder))


def as_typed(settings: Mapping[str, Any]) -> str:
    """The settings as they are typed in a shell."""
    texts = ((key, f"{key}={value}") for key, value in settings.items())
    return " ".join(x if re.fullmatch(r"[\w.:/=+-]+", x) else shlex.quote(quoted(x, (key,))) for key, x in texts)


def _foreign(value: Any, typed: Any, key: str, folder: Path) -> Iterator[tuple[str, Any]]:
    if value == typed:
        return
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _foreign(item, typed.get(name) if isinstance(typed, dict) else None, f"{key}.{name}", folder)
    elif isinstance(value, list):
        if any(True for item in value for _ in _foreign(item, None, key, folder)):
            yield key, value
    elif isinstance(value, str) and _is_foreign(key, value, folder):
        yield key, value


def _is_foreign(key: str, text: str, folder: Path) -> bool:
    known = _own().get(key)
    if known and RENAMED.get(text, text) in known and text != FOLDER:
        return False
    if key.rpartition(".")[2] in EXACT or "://" in text:
        return True
    if key.startswith("data."):  # texts to read
        return False
    if known is None and not Path(text).is_absolute():  # where it is relative to is unknown
        return True
    place = Path(text) if known and FOLDER in known else folder / text
    return not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(folder))


@functools.cache
def _own() -> dict[str, list]:
    """The values of callbacks, loggers and data in Tril's configs, by dotted key."""
    own: dict[str, list] = {}
    for path in CONFIGS.glob("*/*.yaml"):
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        for key, value in flatten(content if path.parent.name == "experiment" else {path.parent.name: content}).items():
            own.setdefault(key, []).append(value)
    return own
