"""The archive of a published sweep: the report that is computed from it again, what it holds, what is refused."""

import csv
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.calls import call
from tests.conftest import assert_refused
from tests.scripts.experiments.synthetic import HEADS, change, write_sweep
from tests.scripts.experiments.test_emergence import write_records
from tril.scripts.experiments import published
from tril.scripts.experiments.published import ARCHIVE, pack
from tril.scripts.experiments.sweep import read_sweep
from tril.scripts.report import main

COMMAND = "python train.py -m 'data.path=/home/jane/mytext.txt' seed=0,1,2"
FILES = ("config.yaml", "csv/version_0/metrics.csv", "summary.json", "windows_best.npz", "windows_last.npz")
DOCS = sorted((Path(__file__).resolve().parents[3] / "docs").glob(f"*/{ARCHIVE}"))
MANY = [pytest.param(path, marks=[pytest.mark.slow] * (i > 0), id=path.parent.name) for i, path in enumerate(DOCS)]


@pytest.fixture
def sweep(tmp_path):
    """A sweep with a failed and an unfinished run, in whose files are paths of this machine."""
    runs = HEADS | {(1,): HEADS[1,] | {3: "failed", 4: "not started"}, (4,): HEADS[4,] | {3: "unfinished"}}
    folder = write_sweep(tmp_path / "machine/sweep", runs)
    for path in folder.rglob("config.yaml"):
        config = yaml.safe_load(path.read_text()) | {"data": {"path": "/home/jane/my text.txt", "cache_dir": "~/cache"}}
        path.write_text(yaml.safe_dump(config | {"logger": {"save_dir": str(path.parent)}}, sort_keys=False))
    for path in folder.rglob("summary.json"):
        change(path, sample_with=f"sample.py ckpt={path.parent}", folder=str(path.parent))
    message = f"FileNotFoundError: {tmp_path}/text.txt and /home/jane/mytext.txt"
    change(folder / "model.n_heads=1,seed=3/failed.json", message=message)
    (folder / "model.n_heads=1,seed=0/checkpoints").mkdir()
    (folder / "model.n_heads=1,seed=0/checkpoints/last.ckpt").write_bytes(b"weights")
    write_records(folder / "model.n_heads=1,seed=0")
    log = folder / "model.n_heads=1,seed=0/csv/version_0/metrics.csv"
    log.write_text("heads/entropy/L0H0,step,val/loss,lr/muon\n1.5,10,3.25,\n,20,,0.1\n1.4,30,3.")
    change(folder / "sweep.json", launches=[{"seeds": [0, 1, 2, 3, 4], "date": "2026-11-22", "command": COMMAND}])
    return folder


def contents(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive, "r:xz") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


@pytest.mark.parametrize("archive", [None, *MANY])
def test_a_published_report_can_be_computed_again(archive, sweep, tmp_path, drawn):
    """If the text of reports changes, `python scripts/report.py dir=FOLDER publish=FOLDER` publishes it again."""
    folder = tmp_path / "published" if archive is None else archive.parent
    if archive is None:
        for path in sweep.glob("model.n_heads=4*/windows_best.npz"):
            np.savez(path, **dict(np.load(path)) | {"nll": np.full(8, 2.0 * 32)})
        done = call(main, f"dir={sweep}", "which=best", "baseline=n_heads=1", f"publish={folder}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = call(main, f"dir={archive or folder}", "out=again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again/report.md").read_text() == (folder / "report.md").read_text()
    tables = [list(csv.DictReader((each / "results.csv").open())) for each in (tmp_path / "again", folder)]
    for one, other in zip(*tables, strict=True):
        for name, x in one.items():  # the last digits depend on the processor
            assert x == other[name] or float(x) == pytest.approx(float(other[name]), rel=1e-9), name
    if archive is None:  # the best losses, and one heads is the baseline
        assert float(tables[0][1]["difference"]) == pytest.approx(2 - (3.10 + 3.16 + 3.12) / 3 + 0.01)
        text = (folder / "report.md").read_text()
        assert "\n## Compared with n_heads=1: best validation loss\n" in text and "\n## When heads appear\n" in text


def test_an_archive_holds_what_reports_read_and_is_the_same_for_the_same_files(sweep, tmp_path):
    pack(read_sweep(sweep), tmp_path / "one.tar.xz", {"which": "final"})
    copy = shutil.copytree(sweep, tmp_path / "another/machine")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    pack(read_sweep(copy), tmp_path / "two.tar.xz", {"which": "final"})
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "two.tar.xz").read_bytes()
    files = contents(tmp_path / "two.tar.xz")
    finished = [f"model.n_heads={heads},seed={seed}" for heads in (1, 4) for seed in (0, 1, 2)]
    expected = {f"{name}/{file}" for name in finished for file in FILES} | {"report.json", "sweep.json"}
    expected |= {"model.n_heads=1,seed=0/heads.csv"}
    failed, unfinished = "model.n_heads=1,seed=3", "model.n_heads=4,seed=3"
    expected |= {f"{failed}/failed.json", *(f"{run}/{file}" for run in (failed, unfinished) for file in FILES[:2])}
    assert list(files) == sorted(expected)
    every = b"".join(files.values())
    for machine in (tmp_path, Path.home(), "/home", "sample_with"):
        assert str(machine).encode() not in every, machine
    assert json.loads(files["sweep.json"])["launches"][0]["command"] == COMMAND.replace("/home/jane/", "")
    log = files["model.n_heads=1,seed=0/csv/version_0/metrics.csv"]
    assert log == b"step,val/loss,lr/muon\n10,3.25,\n20,,0.1\n"  # without the columns of single heads


def add(archive, **attributes):
    """Writes an archive with one more member."""
    entry = tarfile.TarInfo(attributes.pop("name"))
    for key, value in attributes.items():
        setattr(entry, key, value)
    with tarfile.open(archive, "w:xz") as tar:
        tar.addfile(tarfile.TarInfo("report.json"))
        tar.addfile(entry, io.BytesIO(b"\0" * entry.size))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "is not a readable runs.tar.xz of a published report"),
        (lambda path: tarfile.open(path, "w:xz").close(), "contains no report.json"),
        (lambda path: add(path, name="x", size=10**6), "its content exceeds 200,000 bytes"),
        (lambda path: add(path, name="../evil", size=3), "outside the destination"),
        (lambda path: add(path, name="x", type=tarfile.SYMTYPE, linkname="/etc"), "(x is neither a file nor a folder)"),
    ],
    ids=["truncated", "other", "large", "outside", "link"],
)
def test_damaged_and_dangerous_archives_are_refused(change, message, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "MAX_BYTES", 200_000)
    pack(read_sweep(write_sweep(tmp_path / "sweep", {(4,): {0: 3.0}})), tmp_path / ARCHIVE, {})
    change(tmp_path / ARCHIVE)
    before = set(tmp_path.rglob("*"))
    assert_refused(call(main, f"dir={tmp_path / ARCHIVE}", cwd=tmp_path), message)
    assert set(tmp_path.rglob("*")) == before and not (tmp_path.parent / "evil").exists()


def test_a_swept_path_of_this_machine_is_not_published(tmp_path):
    losses = {("/home/jane/a",): {0: 3.0}, ("/home/jane/b",): {0: 3.0}}
    folder = write_sweep(tmp_path / "sweep", losses, ["data.path"], baseline=("",))
    done = call(main, f"dir={folder}", "publish=out", cwd=tmp_path)
    assert_refused(done, "data.path=/home/jane/a is a path of this machine, which is not published; sweep relative")
    assert list((tmp_path / "out").iterdir()) == []
