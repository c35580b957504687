"""The archive of a published sweep: the report that is computed from it again, what it holds, what is refused."""

import contextlib
import csv
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.calls import call
from tests.conftest import assert_refused
from tests.scripts.ablation.synthetic import HEADS, write_sweep
from tests.scripts.ablation.tuned import tune
from tril.scripts.ablation import published_sweep
from tril.scripts.ablation.published_sweep import ARCHIVE, opened, pack
from tril.scripts.ablation.results import read_sweep
from tril.scripts.report import Request, Settings, main

COMMAND = "python train.py -m 'data.path=/home/jane/my text.txt' seed=0,1,2"
RUN_FILES = ("/config.yaml", "/csv/version_0/metrics.csv", "/summary.json", "/windows_best.npz", "/windows_last.npz")
TRIAL = "tune/model.n_heads=4/lr_scale="


@pytest.fixture
def sweep(tmp_path):
    return write_tuned_sweep(tmp_path)


def write_tuned_sweep(tmp_path):
    """A tuned sweep with a failed and an unfinished run, in whose files are paths of this machine."""
    runs = HEADS | {(1,): HEADS[1,] | {3: "failed", 4: "not started"}, (4,): HEADS[4,] | {3: "unfinished"}}
    folder = tune(write_sweep(tmp_path / "machine" / "sweep", ["model.n_heads"], runs, baseline=(4,)))
    for path in folder.rglob("config.yaml"):
        config = yaml.safe_load(path.read_text()) | {"data": {"path": "/home/jane/my text.txt", "cache_dir": "~/cache"}}
        path.write_text(yaml.safe_dump(config | {"logger": {"save_dir": str(path.parent)}}, sort_keys=False))
    for path in folder.rglob("summary.json"):
        edit(path, sample_with=f"sample.py ckpt={path.parent}")
    message = f"FileNotFoundError: {tmp_path}/text.txt and /home/jane/my text.txt"
    edit(folder / "model.n_heads=1,seed=3" / "failed.json", message=message)
    (folder / "model.n_heads=1,seed=0" / "checkpoints").mkdir()
    (folder / "model.n_heads=1,seed=0" / "checkpoints" / "last.ckpt").write_bytes(b"weights")
    stages = [{"seeds": [0, 1, 2, 3, 4], "date": "2026-11-22T10:00:00+00:00", "command": COMMAND}]
    edit(folder / "sweep.json", command=COMMAND, stages=stages)
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folders of a sweep and of its published report."""
    tmp_path = tmp_path_factory.mktemp("published")
    sweep = write_tuned_sweep(tmp_path)
    with blank_pictures():
        done = call(main, f"dir={sweep}", "which=best", "baseline=n_heads=1", "publish=published", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return sweep, tmp_path / "published"


@contextlib.contextmanager
def blank_pictures():
    """Saving a picture takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **_: path.write_bytes(b""))
        yield


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def contents(archive: Path) -> dict[str, bytes | None]:
    """Name -> bytes of the files in an archive, None for folders."""
    with tarfile.open(archive, "r:xz") as tar:
        return {member.name: file.read() if (file := tar.extractfile(member)) else None for member in tar}


DOCS = sorted((Path(__file__).resolve().parents[3] / "docs").glob(f"ablation*/{ARCHIVE}"))


@pytest.mark.parametrize("archive", [*DOCS, None], ids=lambda path: "synthetic" if path is None else path.parent.name)
def test_published_report_can_be_computed_again(archive, request, tmp_path):
    """If the text of reports changes, `python scripts/report.py dir=FOLDER publish=FOLDER` publishes it again."""
    folder = request.getfixturevalue("published")[1] if archive is None else archive.parent
    with blank_pictures():
        done = call(main, f"dir={archive or folder}", "out=again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("report.md", "results.csv"):
        again, before = ((each / name).read_text(encoding="utf-8") for each in (tmp_path / "again", folder))
        assert again == before if name == "report.md" else assert_same_numbers(again, before) is None


def assert_same_numbers(again: str, published: str):
    """The last digits of a mean depend on the processor."""
    for one, other in zip(*(csv.reader(io.StringIO(text)) for text in (again, published)), strict=True):
        for a, b in zip(one, other, strict=True):
            assert a == b or float(a) == pytest.approx(float(b), rel=1e-9), (a, b)


def test_report_of_the_archive_is_that_of_the_sweep(published, tmp_path):
    """Its numbers and words are those of the files as training left them, apart from paths and its note."""
    sweep, folder = published
    with blank_pictures():
        done = call(main, f"dir={sweep}", "which=best", "baseline=n_heads=1", "out=plain", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (folder / "results.csv").read_text() == (tmp_path / "plain" / "results.csv").read_text()
    text, plain = ((each / "report.md").read_text() for each in (folder, tmp_path / "plain"))
    start = text.index("The archive runs.tar.xz next to this file")
    text = text[: start - 1] + text[text.index("\n## ", start) :]
    plain = plain.replace("/home/jane/my text.txt", "my text.txt").replace(f"{sweep.parents[1]}/text.txt", "text.txt")
    widths = re.compile(r" {2,}|-{3,}")  # shorter texts make narrower tables
    assert widths.sub(" ", text) == widths.sub(" ", plain)
    assert {path.name for path in (tmp_path / "plain").iterdir()} - {path.name for path in folder.iterdir()} == {
        "report.html"
    }


def test_published_texts_have_no_paths_of_the_machine(published):
    _, folder = published
    for path in (*folder.glob("*.md"), *folder.glob("*.csv")):
        text = path.read_text()
        assert not [machine for machine in (tempfile.gettempdir(), str(Path.home()), "/home") if machine in text], path
    assert "FileNotFoundError: text.txt and my text.txt" in (folder / "runs.csv").read_text()


def test_archive_is_the_same_for_the_same_files(sweep, tmp_path):
    request = {"baseline": None, "which": "final", "margin": None}
    pack(read_sweep(sweep), tmp_path / "one.tar.xz", request)
    (tmp_path / "another").mkdir()
    copy = shutil.copytree(sweep, tmp_path / "another" / "machine")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    pack(read_sweep(copy), tmp_path / "two.tar.xz", request)
    files = contents(tmp_path / "two.tar.xz")
    assert contents(tmp_path / "one.tar.xz") == files and list(files) == sorted(files)
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "two.tar.xz").read_bytes()
    with opened(tmp_path / "one.tar.xz") as (folder, found):  # as by dir=published publish=published
        assert found == request
        pack(read_sweep(folder), tmp_path / "three.tar.xz", found)
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "three.tar.xz").read_bytes()


def test_archive_holds_what_reports_read(sweep, tmp_path):
    pack(read_sweep(sweep), tmp_path / ARCHIVE, {"which": "final"})
    files = contents(tmp_path / ARCHIVE)
    finished = [f"model.n_heads={heads},seed={seed}" for heads in (1, 4) for seed in (0, 1, 2)]
    expected = {name + file for name in finished for file in ("", *RUN_FILES)} | {"report.json", "sweep.json"}
    failed, unfinished = "model.n_heads=1,seed=3", "model.n_heads=4,seed=3"
    expected |= {failed, f"{failed}/failed.json", unfinished}
    expected |= {run + file for run in (failed, unfinished) for file in RUN_FILES[:2]}
    assert {name for name in files if not name.startswith("tune/")} == expected
    assert {name for name in files if name.startswith("tune/model.n_heads=4")} == {
        *(f"{TRIAL}{scale},seed=1000{file}" for scale in ("0.5", "1") for file in ("", *RUN_FILES[::2], RUN_FILES[-1])),
        *(f"{TRIAL}2,seed=1000{file}" for file in ("", "/config.yaml", "/failed.json")),
        "tune/model.n_heads=4/chosen.json",
    }
    every = b"".join(content for content in files.values() if content)
    for machine in (tmp_path, Path.home(), "/home", "sample_with"):
        assert str(machine).encode() not in every, machine
    assert json.loads(files["sweep.json"])["command"] == COMMAND.replace("/home/jane/", "")


def test_runs_of_the_archive_have_the_same_content(sweep, tmp_path):
    before = read_sweep(sweep)
    pack(before, tmp_path / ARCHIVE, {"which": "final"})
    with opened(tmp_path) as (folder, request):
        after = read_sweep(folder)
        assert request == {"which": "final"} and [variant.label for variant in after.variants] == [
            "n_heads=1",
            "n_heads=4",
        ]
        for one, other in zip(before.runs, after.runs, strict=True):
            assert (one.seed, one.state, one.planned) == (other.seed, other.state, other.planned)
            for name in one.curve:
                np.testing.assert_array_equal(one.curve[name], other.curve[name])
            for name in ("last", "best"):
                pair = [getattr(run, name) for run in (one, other)]
                assert pair == [None, None] or all(
                    np.array_equal(vars(pair[0])[key], vars(pair[1])[key]) for key in ("nll", "targets")
                )
            kept = {key: value for key, value in (one.summary or {}).items() if key not in ("folder", "sample_with")}
            assert (other.summary or {}) == kept
    assert not folder.exists()


def test_columns_of_single_heads_are_left_out(sweep, tmp_path):
    log = sweep / "model.n_heads=1,seed=0" / "csv" / "version_0" / "metrics.csv"
    log.write_text("heads/entropy/L0H0,step,val/loss,lr/muon\n1.5,10,3.25,\n,20,,0.1\n1.4,30,3.")
    pack(read_sweep(sweep), tmp_path / ARCHIVE, {})
    name = log.relative_to(sweep).as_posix()
    assert contents(tmp_path / ARCHIVE)[name] == b"step,val/loss,lr/muon\n10,3.25,\n20,,0.1\n"


def test_folder_of_runs_without_sweep_json(tmp_path):
    before = read_sweep(write_sweep(tmp_path / "runs", ["model.n_heads"], HEADS, index=False))
    pack(before, tmp_path / ARCHIVE, {})
    with opened(tmp_path) as (folder, _):
        after = read_sweep(folder)
    assert "sweep.json" not in contents(tmp_path / ARCHIVE)
    assert [(variant.label, variant.figures("final_val_loss")) for variant in after.variants] == [
        (f"n_heads={heads}", list(losses.values())) for (heads,), losses in HEADS.items()
    ]


def test_published_settings_hold_unless_others_are_given():
    published = {"baseline": "n_heads=1", "which": "best", "margin": 0.01}
    nothing = Settings(dir="x", baseline=None, which=None, margin=None, out=None, publish=None)
    assert vars(Request.of(nothing, published)) == published
    assert vars(Request.of(nothing, {})) == {"baseline": None, "which": "final", "margin": None}
    other = Settings(dir="x", baseline="n_heads=4", which="final", margin=None, out=None, publish=None)
    assert vars(Request.of(other, published)) == {"baseline": "n_heads=4", "which": "final", "margin": 0.01}


def add(archive, **attributes):
    """Writes an archive with one more member."""
    entry = tarfile.TarInfo(attributes.pop("name"))
    for key, value in attributes.items():
        setattr(entry, key, value)
    with tarfile.open(archive, "w:xz") as tar:
        tar.addfile(tarfile.TarInfo("report.json"))
        tar.addfile(entry, io.BytesIO(b"\0" * entry.size))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "is not a readable runs.tar.xz of a published report"),
        (lambda path: path.write_text("no archive"), "is not a readable runs.tar.xz"),
        (lambda path: add(path, name="../evil", size=3), "outside the destination"),
        (lambda path: add(path, name="x", type=tarfile.SYMTYPE, linkname="/etc"), "(x is neither a file nor a folder)"),
        (lambda path: add(path, name="x", type=tarfile.FIFOTYPE), "(x is neither a file nor a folder)"),
    ],
    ids=["truncated", "text", "outside", "link", "pipe"],
)
def test_damaged_and_dangerous_archives_are_refused(change, message, tmp_path):
    pack(read_sweep(write_sweep(tmp_path / "sweep", ["model.n_heads"], {(4,): {0: 3.0}})), tmp_path / ARCHIVE, {})
    change(tmp_path / ARCHIVE)
    before = set(tmp_path.rglob("*"))
    assert_refused(call(main, f"dir={tmp_path / ARCHIVE}", cwd=tmp_path), message)
    assert set(tmp_path.rglob("*")) == before and not (tmp_path.parent / "evil").exists()


def test_archive_of_something_else_is_refused(tmp_path):
    with tarfile.open(tmp_path / ARCHIVE, "w:xz"):
        pass
    with pytest.raises(ValueError, match=r"runs.tar.xz contains no report.json"), opened(tmp_path / ARCHIVE):
        pass


def test_unpacked_size_is_limited(sweep, tmp_path, monkeypatch):
    pack(read_sweep(sweep), tmp_path / ARCHIVE, {})
    monkeypatch.setattr(published_sweep, "MAX_BYTES", 20_000)
    with pytest.raises(ValueError, match="its content exceeds 20,000 bytes"), opened(tmp_path / ARCHIVE):
        pass


def test_what_cannot_be_published_is_refused(tmp_path):
    runs = {("/home/jane/a.txt",): {0: 3.0}, ("/home/jane/b.txt",): {0: 3.0}}
    folder = write_sweep(tmp_path / "sweep", ["data.path"], {("a",): {0: 3.0}, ("b",): {0: 3.0}})
    index = json.loads((folder / "sweep.json").read_text())
    for cell, (path,) in zip(index["cells"], runs, strict=True):
        cell["values"] = {"data.path": path}
    edit(folder / "sweep.json", **index)
    done = call(main, f"dir={folder}", "publish=out", cwd=tmp_path)
    assert_refused(done, "data.path=/home/jane/a.txt is a path of this machine, which is not published; sweep relative")
    assert_refused(call(main, f"dir={folder}", "publish=a", "out=b", cwd=tmp_path), "out=b excludes publish=a")
    assert_refused(call(main, f"dir={folder}", "margin=0", cwd=tmp_path), "margin=0")
    assert list((tmp_path / "out").iterdir()) == [] and not (tmp_path / "a").exists()
