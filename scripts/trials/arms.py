"""The two arms of a comparison: their overrides, the code that trains them, and whether both are valid."""

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from tril.scripts.cli.command_line import Typed, compose
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.errors import message_of
from tril.scripts.trials.source_tree import SourceTree

CERTIFIED = "the referee compares certified runs only"
NOT_OF_AN_ARM = {  # keys that the referee chooses
    "seed": "set the first seed with seed=N, outside of the arms",
    "resume": "the referee continues its runs by itself",
    "ablation": "name one configuration",
    "tune": "tune in a sweep, then set optim.lr_scale",
    "sweep": "the referee trains no grid",
    "hydra": "the referee chooses the folders; set the folder of all with out=FOLDER",
}


@dataclass(frozen=True)
class Arm:
    """One side of the comparison.

    Attributes:
        name: "baseline" or "candidate".
        overrides: of the command line of its runs, key=value each, without the seed.
        tree: the code that trains it.
        key: a hash of its settings and code; arms with the same key share their runs.
    """

    name: str
    overrides: tuple[str, ...]
    tree: SourceTree
    key: str

    def to_dict(self, root: Path) -> dict:
        """Its entry of referee.json."""
        named = {"overrides": list(self.overrides), "commit": self.tree.commit}
        return named | {"code": self.tree.digest, "runs": runs_folder(root, self).as_posix()}


def runs_folder(root: Path, arm: Arm) -> Path:
    """Where the runs of an arm are, one folder for each seed."""
    return root / "runs" / arm.key


def make_arm(name: str, text: str, common: str, tree: SourceTree) -> Arm:
    """Composes and checks the settings of an arm.

    Raises:
        ValueError: overrides that are not valid.
    """
    overrides = split_overrides(name, common, text)
    try:
        settings = _checked_settings(overrides)
    except (ValueError, OSError) as error:
        raise ValueError(f"{name}: {message_of(error)}") from error
    content = json.dumps([settings, tree.digest], sort_keys=True, default=str)
    return Arm(name, tuple(overrides), tree, hashlib.sha256(content.encode()).hexdigest()[:12])


def split_overrides(name: str, common: str, text: str) -> list[str]:
    """The overrides of both arms and of this one, which replaces common values of the same key.

    Raises:
        ValueError: a text without "=", or a key that is not of an arm.
    """
    by_key: dict[str, str] = {}
    for source, words in (("common", common), (name, text)):
        try:
            overrides = shlex.split(words)
        except ValueError as error:
            raise ValueError(f"cannot read {source}={words!r} ({error}); close the quotes") from error
        for override in overrides:
            key = override.partition("=")[0].lstrip("+~")
            if "=" not in override and not override.startswith("~"):
                raise ValueError(f"{source}: cannot read {override!r}; settings are written key=value")
            for word in (key, key.partition(".")[0], key.partition("/")[0]):
                if word in NOT_OF_AN_ARM:
                    raise ValueError(f"{source}: {override} cannot be set for an arm; {NOT_OF_AN_ARM[word]}")
            by_key[key] = override
    return list(by_key.values())


def _checked_settings(overrides: list[str]) -> dict:
    """Composes with the running code and checks as train.py does; the settings that decide what a run computes."""
    typed = Typed.of(overrides)
    config = RunConfig.of(compose("train", typed).settings, typed).on_this_machine()
    if config.causality.allow_leak:
        raise ValueError(f"causality.allow_leak=true allows false losses; {CERTIFIED}")
    if config.callbacks.causality is None:
        raise ValueError(f"callbacks.causality=null leaves out the certificate; {CERTIFIED}")
    return _without_seed(config.canonical())


def _without_seed(settings: dict) -> dict:
    return {key: value for key, value in settings.items() if key != "seed"}
