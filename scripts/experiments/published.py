"""A published sweep: one small archive with everything from which its report can be computed again.

The archive holds sweep.json, the settings of the report, and of each run config.yaml, summary.json, the losses of the
validation windows and documents, the scores of its heads, and the log without the columns that no report reads.
Checkpoints, pictures and absolute paths of the machine are left out.
"""

import contextlib
import csv
import io
import json
import lzma
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml

from tril.model.atomic_files import atomic_path
from tril.model.heads.records import HEAD_SCORES
from tril.model.runs import FAILURE, METRICS, SETTINGS, SUMMARY, SWEEP, read_settings
from tril.scripts.cli.errors import writable
from tril.scripts.experiments.sweep import WINDOWS, Sweep, read_json

ARCHIVE = "runs.tar.xz"
REQUEST = "report.json"  # in the archive: the settings of the published report
LOG_GROUPS = ("step", "train", "val", "lr")  # columns of a log that are kept
DROPPED = ("folder", "sample_with")  # entries of summary.json that are paths
MAX_BYTES = 2**30  # of the unpacked files: an archive can be a thousand times smaller than its content
NAME = r"[\w.@](?:[\w.@+~=%#-]|,(?=\w))*"
# a path within a text; not val/loss, ../x, ~/x, https://host/x or </b>
PATH = re.compile(rf"(?<![\w.:/\\<~-])(?:[A-Za-z]:[/\\]|\\\\|/)({NAME}(?:[/\\]{NAME})*)[/\\]?")


def pack(sweep: Sweep, path: Path, request: Mapping[str, object]) -> None:
    """Writes the archive. Equal files give equal bytes.

    Args:
        request: the settings of the report that are to hold when it is computed again.

    Raises:
        ValueError: a swept value is a path of this machine, or a damaged file.
    """
    for key, value in (item for variant in sweep.variants for item in variant.values.items()):
        if is_path(value):
            raise ValueError(f"{key}={value} is a path of this machine, which is not published; sweep relative paths")
    folders = [run.folder for run in sweep.runs]
    files: dict[str, bytes] = {REQUEST: _json(dict(request))}
    if sweep.index:
        runs = [entry for entry in sweep.index["runs"] if sweep.folder / entry["folder"] in folders]
        files[SWEEP] = _json(without_paths(sweep.index | {"runs": runs}))
    folders += [sweep.folder / trial["folder"] for trial in sweep.index.get("trials", [])]
    for folder in folders:
        for name, content in _run_files(folder):
            files[f"{folder.relative_to(sweep.folder).as_posix()}/{name}"] = content
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)  # its time, owner and group are 0
            entry.size = len(files[name])
            archive.addfile(entry, io.BytesIO(files[name]))
    with atomic_path(path) as part:
        part.write_bytes(lzma.compress(output.getvalue(), preset=6 | lzma.PRESET_EXTREME))


def _run_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a run as they are published."""
    if (folder / SETTINGS).is_file():
        settings = without_paths(read_settings(folder / SETTINGS))
        yield SETTINGS, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode()
    for name in (SUMMARY, FAILURE):
        if (folder / name).is_file():
            content = {key: value for key, value in read_json(folder / name).items() if key not in DROPPED}
            yield name, _json(without_paths(content))
    for name in (*WINDOWS.values(), HEAD_SCORES):
        if (folder / name).is_file():
            yield name, (folder / name).read_bytes()
    if (folder / METRICS).is_file():
        text = (folder / METRICS).read_text(encoding="utf-8").rpartition("\n")[0]  # the last line may be incomplete
        rows, output = list(csv.reader(io.StringIO(text))), io.StringIO(newline="")
        kept = [i for i, name in enumerate(rows[0]) if name.partition("/")[0] in LOG_GROUPS] if rows else []
        csv.writer(output, lineterminator="\n").writerows([[row[i] for i in kept] for row in rows])
        yield METRICS, output.getvalue().encode()


def without_paths(value: Any) -> Any:
    """A copy of plain containers in which only the last component of each absolute path is left."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    if is_path(value):  # also one with spaces, which no pattern finds in a text
        return (PurePosixPath(value) if value.startswith("/") else PureWindowsPath(value)).name or value
    return PATH.sub(lambda match: re.split(r"[/\\]", match[1])[-1], value) if isinstance(value, str) else value


def is_path(value: object) -> bool:
    """Whether the value is an absolute path of any system."""
    return isinstance(value, str) and (PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute())


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


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
        try:
            with lzma.open(archive) as file:
                content = file.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise tarfile.TarError(f"its content exceeds {MAX_BYTES:,} bytes")
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
                for each in tar:  # not extractall: its filter came with Python 3.11.4
                    target = Path(folder, each.name)
                    if not (each.isreg() or each.isdir()) or each.issparse():
                        raise tarfile.TarError(f"{each.name} is neither a file nor a folder")
                    if not target.resolve().is_relative_to(Path(folder).resolve()):
                        raise tarfile.TarError(f"{each.name} is outside the destination")
                    if (source := tar.extractfile(each)) is not None:
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(source.read())
        except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
            problem = f"is not a readable {ARCHIVE} of a published report ({error})"
            raise ValueError(f"{archive} {problem}; restore it") from error
        if not (Path(folder) / REQUEST).is_file():
            raise ValueError(f"{archive} contains no {REQUEST}; name the {ARCHIVE} of a published report")
        yield Path(folder), read_json(Path(folder) / REQUEST)


def write_report(source: Path, typed: Mapping[str, Any], out: str | None, publish: str | None) -> str:
    """Writes the report of a sweep, a run or a published report; returns what to print.

    Args:
        typed: values of `Request`; None: that of the published report, or the default.
        out: the folder to write to; None: that of the source.
        publish: instead, the folder of a report to publish, which is computed from its archive, so that both are the
            same by construction.

    Raises:
        ValueError: as `opened` and `read_report`.
    """
    from tril.scripts.experiments.report import Request, read_report

    chosen = {name: typed[name] for name in vars(Request()) if typed[name] is not None}
    with contextlib.ExitStack() as unpacked:
        folder, published = unpacked.enter_context(opened(source))
        request = Request(**published | chosen)
        report = read_report(folder, request)
        place = publish or out or (source.parent if source.is_file() else source)
        to = writable(place, "out" if publish is None else "publish")
        if publish is not None:
            pack(report.sweep, to / ARCHIVE, vars(request))
            report = read_report(unpacked.enter_context(opened(to / ARCHIVE))[0], request)
        files = report.write(to, published=publish is not None or bool(published))
        return f"{report.shown()}\n\n{to}: {', '.join(files)}"
