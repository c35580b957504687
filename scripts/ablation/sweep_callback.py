"""What `train.py -m` does around its cells: looks at the whole grid before the first begins, and reports after the last.

The same command finds the same folder again, so that it goes on where it stopped; so does one with more seeds or more values.
"""

import json
import sys
import traceback
from hashlib import sha256
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from tril.model.files import write_json
from tril.model.runs import ROOTS, SWEEP, new_folder, state_of
from tril.scripts.ablation.grid import compose, legal, measure, name, settings_of, table, unplaced, value_of
from tril.scripts.ablation.run_process import clock
from tril.scripts.common.cli import UserError, fail, quoted, user_errors

HERE = ("BasicLauncher", "JoblibLauncher", "LocalLauncher")  # launchers whose jobs run on this machine


class Sweep(Callback):
    """Hydra's callback around a multirun. Hydra turns exceptions of callbacks into warnings, so what goes wrong ends the process here."""

    def __init__(self) -> None:
        self.folder: Path | None = None  # of a grid; another sweeper chooses its cells as it goes

    def on_multirun_start(self, config: DictConfig, **kwargs) -> None:
        if not config.hydra.sweeper._target_.endswith(f".{BasicSweeper.__name__}"):
            return
        try:
            self.folder = prepare(config, kwargs["config_name"])
        except UserError as error:
            fail(error)
        except Exception:
            traceback.print_exc()
            sys.exit(1)

    def on_multirun_end(self, config: DictConfig, **kwargs) -> None:
        if self.folder is None:
            return
        cells = json.loads((self.folder / SWEEP).read_text(encoding="utf-8"))["cells"]
        states = {cell["folder"]: state_of(self.folder / cell["folder"]) for cell in cells}
        missing = [f"{cell} ({state})" for cell, state in states.items() if state != "finished"]
        print(
            f"\n{len(cells) - len(missing)} of {len(cells)} cells are finished; python scripts/report.py dir={self.folder}",
            flush=True,
        )
        if missing:
            print(f"NOT finished: {'; '.join(missing)}; the same command tries again", flush=True)
            sys.exit(1)


def prepare(config: DictConfig, config_name: str) -> Path:
    """Checks the cells, lists them, chooses the sweep's folder and tells Hydra. Raises UserError where a cell cannot be."""
    if config.resume is not None:
        raise UserError("resume goes on with a single run; a sweep goes on when the same command is started again")
    for key in ("skip_invalid", "new"):
        if not isinstance(config.sweep[key], bool):
            raise UserError(f"sweep.{key}={config.sweep[key]} must be true or false")
    elsewhere = config.hydra.launcher._target_.rpartition(".")[2] not in HERE
    cells = legal(compose(config, config_name, elsewhere=elsewhere), skip_invalid=config.sweep.skip_invalid)
    if not elsewhere:  # a login node prepares no text, and its speed says nothing
        measure(cells)
        cells = legal(cells, skip_invalid=config.sweep.skip_invalid)
    swept = name(cells)
    with user_errors():
        own = family(unplaced(config), swept)
        folder, there = find(config, own)
        folder.mkdir(parents=True, exist_ok=True)
    entries = [cell.entry() for cell in cells]
    entries += [old for old in there if old["folder"] not in {entry["folder"] for entry in entries}]
    baseline = {key: value_of(config, key, config.hydra.runtime.choices.get(key)) for key in swept}
    content = {"family": own, "swept": swept, "baseline": baseline, "cells": entries}
    write_json(folder / SWEEP, content)

    states = [state_of(folder / cell.folder) for cell in cells]
    to_run = len(cells) - states.count("finished")
    print(f"{table(cells, states, clock)}\n\nfolder  {folder}\n{to_run} of {len(cells)} cells to run", end="")
    left = [cell.sizes.get("estimated_seconds") for cell, state in zip(cells, states) if state != "finished"]
    print(
        "" if None in left else f", about {clock(sum(left))} of computing, going by a few steps of each",
        end="\n\n",
        flush=True,
    )

    with read_write(config.hydra), open_dict(config.hydra):  # from these Hydra composes every job
        config.hydra.sweep.dir, config.hydra.sweep.subdir = str(folder), "."
        config.hydra.overrides.hydra += [
            quoted(f"hydra.sweep.dir={folder}", ("hydra.sweep.dir",)),
            "hydra.sweep.subdir=.",
        ]
    return folder


def family(config: DictConfig, swept: list[str]) -> str:
    """The same for all commands that sweep the same keys over the same settings: their cells belong together."""
    base = settings_of(config) | {"seed": None}
    return sha256(json.dumps([sorted(swept), base], sort_keys=True).encode()).hexdigest()


def find(config: DictConfig, own: str) -> tuple[Path, list[dict]]:
    """The folder of the sweep, and the cells that it has already. Raises ValueError for a folder of another sweep."""
    if any(override.startswith("hydra.sweep.dir=") for override in config.hydra.overrides.hydra):
        folder = Path(config.hydra.sweep.dir)
        there = read(folder / SWEEP) if (folder / SWEEP).is_file() else {"family": own, "cells": []}
        if there["family"] != own:
            raise ValueError(f"hydra.sweep.dir={folder} holds a sweep of other keys or settings; choose another folder")
        return folder, there["cells"]
    known = (
        []
        if config.sweep.new
        else sorted(Path(ROOTS[1]).glob(f"*/*/{SWEEP}"), key=lambda path: path.stat().st_mtime, reverse=True)
    )
    for path in known:
        if (there := read(path))["family"] == own:
            return path.parent, there["cells"]
    return new_folder(ROOTS[1]), []


def read(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {"family": content["family"], "cells": content["cells"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a list of cells ({error}); restore it, or move its folder away") from error
