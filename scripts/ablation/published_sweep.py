"""A published sweep: one small archive with everything from which its report can be computed again.

The archive holds sweep.json, the settings of the report, and of each run config.yaml, summary.json, the losses of the
validation windows and documents, and the log without the columns that no report reads; of each tuning trial the same
without the log and the best validation. Checkpoints, pictures and absolute paths of the machine are left out.
"""

import contextlib
import csv
import io
import json
import lzma
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from tril.model.atomic_files import atomic_path
from tril.model.runs import FAILURE, SUMMARY, SWEEP, read_settings
from tril.scripts.ablation.machine_paths import PathRemover, is_path
from tril.scripts.ablation.results import Sweep
from tril.scripts.ablation.run_files import CONFIG
from tril.scripts.ablation.sweep_files import read_json
from tril.scripts.ablation.tuning import CHOSEN

ARCHIVE = "runs.tar.xz"
REQUEST = "report.json"  # in the archive: baseline, which and margin of the published report
LOG_GROUPS = ("step", "train", "val", "lr")  # columns of a log that are kept; the others are those of single heads
DROPPED = ("folder", "sample_with")  # entries of summary.json that are paths
MAX_BYTES = 2**30  # of the unpacked files: an archive can be a thousand times smaller than its content


def pack(sweep: Sweep, path: Path, request: Mapping[str, object]) -> None:
    """Writes the archive. Equal files give equal bytes.

    Args:
        request: the settings of the report that are to hold when it is computed again.

    Raises:
        ValueError: a swept value is a path of this machine, or a damaged file.
    """
    for variant in sweep.variants:
        for key, value in variant.values.items():
            if is_path(value):
                raise ValueError(
                    f"{key}={value} is a path of this machine, which is not published; sweep relative paths"
                )
    runs = [run.folder for run in sweep.runs]
    arms = sorted({sweep.folder / str(run.planned["tuning"]) for run in sweep.runs if "tuning" in run.planned})
    trials = [config.parent for arm in arms for config in sorted(arm.glob(f"*/{CONFIG}"))]
    every = [folder for folder in (*runs, *trials) if folder.is_dir()]
    settings = {folder: read_settings(folder / CONFIG) for folder in every if (folder / CONFIG).is_file()}
    clean = PathRemover([*settings.values(), str(Path.home()), str(Path.cwd()), str(sweep.folder.resolve())])
    files: dict[str, bytes | None] = {REQUEST: _json(dict(request))}
    if sweep.index:
        cells = [cell for cell in sweep.index["cells"] if sweep.folder / cell["folder"] in runs]
        files[SWEEP] = _json(clean(sweep.index | {"cells": cells}))
    for folder in every:
        name = folder.relative_to(sweep.folder).as_posix()
        files |= {name: None} | {
            f"{name}/{file}": content for file, content in _run_files(folder, settings, clean, folder in runs)
        }
    for choice in (arm / CHOSEN for arm in arms):
        if choice.is_file():
            files[choice.relative_to(sweep.folder).as_posix()] = _json(clean(read_json(choice)))
    with atomic_path(path) as part:
        part.write_bytes(lzma.compress(_tar(files), preset=6 | lzma.PRESET_EXTREME))


def _run_files(
    folder: Path, settings: Mapping[Path, object], clean: PathRemover, is_run: bool
) -> Iterator[tuple[str, bytes]]:
    """The files of a run, or of a trial, as they are published."""
    if folder in settings:
        yield CONFIG, yaml.safe_dump(clean(settings[folder]), sort_keys=False, allow_unicode=True).encode()
    for name in (SUMMARY, FAILURE):
        if (folder / name).is_file():
            content = read_json(folder / name)
            yield name, _json(clean({key: value for key, value in content.items() if key not in DROPPED}))
    for which in ("last", "best") if is_run else ("last",):
        if (path := folder / f"windows_{which}.npz").is_file():
            yield path.name, path.read_bytes()
    for log in folder.glob("csv/version_*/metrics.csv") if is_run else ():
        yield log.relative_to(folder).as_posix(), _shorter_log(log.read_text(encoding="utf-8"))


def _shorter_log(text: str) -> bytes:
    """A log without the columns that no report reads, and without an incomplete last line."""
    rows = list(csv.reader(io.StringIO(text.rpartition("\n")[0])))
    kept = [i for i, name in enumerate(rows[0]) if name.partition("/")[0] in LOG_GROUPS] if rows else []
    output = io.StringIO(newline="")
    csv.writer(output, lineterminator="\n").writerows([[row[i] for i in kept] for row in rows])
    return output.getvalue().encode()


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _tar(files: Mapping[str, bytes | None]) -> bytes:
    """A tar archive of names and contents (None: a folder), in the order of the names, without times and owners."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            content, entry = files[name], tarfile.TarInfo(name)  # its time, owner and group are 0
            entry.type, entry.mode = (tarfile.DIRTYPE, 0o755) if content is None else (tarfile.REGTYPE, 0o644)
            entry.size = len(content or b"")
            archive.addfile(entry, io.BytesIO(content or b""))
    return output.getvalue()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Path, dict]]:
    """The folder of a sweep and {}; of a published one, an unpacked copy and the settings of its report.

    Args:
        path: the folder of a sweep, the folder of a published report, or its archive. The copy lasts as long as the
            block.

    Raises:
        ValueError: the archive is damaged, or is not that of a published sweep.
    """
    archive = path / ARCHIVE if path.is_dir() and not (path / SWEEP).is_file() else path
    if not archive.is_file():
        yield path, {}
        return
    with tempfile.TemporaryDirectory(prefix="tril-report-") as folder:
        _unpack(archive, Path(folder))
        yield Path(folder), read_json(Path(folder) / REQUEST)


def _unpack(path: Path, folder: Path) -> None:
    """Unpacks files and folders, all of them below `folder`, and refuses anything else."""
    try:
        with lzma.open(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise tarfile.TarError(f"its content exceeds {MAX_BYTES:,} bytes")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            if unknown := [each.name for each in archive if not (each.isreg() or each.isdir()) or each.issparse()]:
                raise tarfile.TarError(f"{unknown[0]} is neither a file nor a folder")
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is not a readable {ARCHIVE} of a published report ({error}); restore it") from error
    if not (folder / REQUEST).is_file():
        raise ValueError(f"{path} contains no {REQUEST}; name the {ARCHIVE} of a published report")
