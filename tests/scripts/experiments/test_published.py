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
from tril.scripts.experiments import published
from tril.scripts.experiments.published import ARCHIVE, pack
from tril.scripts.experiments.sweep import read_sweep
from tril.scripts.report import main

COMMAND = "python train.py -m 'data.path=/home/jane/mytext.txt' seed=0,1,2"
FILES = ("config.yaml", "csv/version_0/metrics.csv", "summary.json", "windows_best.npz", "windows_last.npz")
DOCS = sorted((Path(__file__).resolve().parents[3] / "docs").glob(f"*/{ARCHIVE}"))
EVERYDAY = ("ablation_heads", "emergence")
OF_DOCS = [pytest.param(x.parent, marks=[pytest.mark.slow] * (x.parent.name not in EVERYDAY)) for x in DOCS]


def assert_same_report(again: Path, folder: Path):
    assert (again / "report.md").read_text() == (folder / "report.md").read_text()
    tables = [list(csv.DictReader((each / "results.csv").open())) for each in (again, folder)]
    for one, other in zip(*tables, strict=True):
        for name, x in one.items():  # the last digits depend on the processor
            assert x == other[name] or float(x) == pytest.approx(float(other[name]), rel=1e-9), name


@pytest.mark.parametrize("folder", OF_DOCS, ids=lambda path: path.name)
def test_the_reports_of_docs_can_be_computed_again(folder, tmp_path, drawn):
    """If the text of reports changes, `python scripts/report.py dir=FOLDER publish=FOLDER` publishes it again."""
    done = call(main, f"dir={folder / ARCHIVE}", "out=again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same_report(tmp_path / "again", folder)


def test_a_sweep_is_published_without_paths_of_this_machine_and_the_same_for_the_same_files(tmp_path, drawn):
    """Also with a failed, an unfinished and a missing run."""
    runs = HEADS | {(1,): HEADS[1,] | {3: "failed", 4: "not started"}, (4,): HEADS[4,] | {3: "unfinished"}}
    folder, out, first = write_sweep(tmp_path / "machine/sweep", runs), tmp_path / "out", "model.n_heads=1,seed=0"
    for path in folder.rglob("config.yaml"):
        config = yaml.safe_load(path.read_text()) | {"data": {"path": "/home/jane/my text.txt", "cache_dir": "~/cache"}}
        path.write_text(yaml.safe_dump(config | {"logger": {"save_dir": str(path.parent)}}, sort_keys=False))
    for path in folder.rglob("summary.json"):
        change(path, sample_with=f"sample.py ckpt={path.parent}", folder=str(path.parent))
    for path in folder.glob("model.n_heads=4*/windows_best.npz"):
        np.savez(path, **dict(np.load(path)) | {"nll": np.full(8, 2.0 * 32)})
    message = f"FileNotFoundError: {tmp_path}/text.txt and /home/jane/mytext.txt"
    change(folder / "model.n_heads=1,seed=3/failed.json", message=message)
    (folder / "model.n_heads=1,seed=3/heads.csv").write_text("step,head\n")
    (folder / first / "checkpoints").mkdir()
    (folder / first / "checkpoints/last.ckpt").write_bytes(b"weights")
    log = folder / first / "csv/version_0/metrics.csv"
    log.write_text("heads/entropy/L0H0,step,val/loss,lr/muon\n1.5,10,3.25,\n,20,,0.1\n1.4,30,3.")
    change(folder / "sweep.json", launches=[{"seeds": [0, 1, 2, 3, 4], "date": "2026-11-22", "command": COMMAND}])

    asked = ("which=best", "baseline=n_heads=1")
    assert call(main, f"dir={folder}", *asked, "publish=out", cwd=tmp_path).returncode == 0
    assert call(main, "dir=out", "out=again", cwd=tmp_path).returncode == 0
    assert_same_report(tmp_path / "again", out)
    _, four = csv.DictReader((out / "results.csv").open())  # the best losses, and one head is the baseline
    assert float(four["difference"]) == pytest.approx(2 - (3.10 + 3.16 + 3.12) / 3 + 0.01)
    assert "\n## Compared with n_heads=1: best validation loss\n" in (out / "report.md").read_text()

    copy = shutil.copytree(folder, tmp_path / "another/machine")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    assert call(main, f"dir={copy}", *asked, "publish=two", cwd=tmp_path).returncode == 0
    assert (tmp_path / "two" / ARCHIVE).read_bytes() == (out / ARCHIVE).read_bytes()
    with tarfile.open(out / ARCHIVE, "r:xz") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    finished = [f"model.n_heads={heads},seed={seed}" for heads in (1, 4) for seed in (0, 1, 2)]
    expected = {f"{name}/{file}" for name in finished for file in FILES} | {"report.json", "sweep.json"}
    failed, unfinished = "model.n_heads=1,seed=3", "model.n_heads=4,seed=3"
    expected |= {f"{failed}/failed.json", f"{failed}/heads.csv"}
    expected |= {*(f"{run}/{file}" for run in (failed, unfinished) for file in FILES[:2])}
    assert list(files) == sorted(expected)
    every = b"".join(files.values())
    for machine in (tmp_path, Path.home(), "/home", "sample_with"):
        assert str(machine).encode() not in every, machine
    assert json.loads(files["sweep.json"])["launches"][0]["command"] == COMMAND.replace("/home/jane/", "")
    columns = files[f"{first}/csv/version_0/metrics.csv"]  # without those of single heads
    assert columns == b"step,val/loss,lr/muon\n10,3.25,\n20,,0.1\n"


def add(archive, **attributes):
    """Writes an archive with one more member."""
    entry = tarfile.TarInfo(attributes.pop("name"))
    for key, value in attributes.items():
        setattr(entry, key, value)
    with tarfile.open(archive, "w:xz") as tar:
        tar.addfile(tarfile.TarInfo("report.json"))
        tar.addfile(entry, io.BytesIO(b"\0" * entry.size))


def test_damaged_and_dangerous_archives_and_swept_paths_of_this_machine_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "MAX_BYTES", 200_000)
    pack(read_sweep(write_sweep(tmp_path / "sweep", {(4,): {0: 3.0}})), path := tmp_path / ARCHIVE, {})
    for change_archive, message in (
        (lambda: path.write_bytes(path.read_bytes()[:-40]), "is not a readable runs.tar.xz of a published report"),
        (lambda: tarfile.open(path, "w:xz").close(), "contains no report.json"),
        (lambda: add(path, name="x", size=10**6), "its content exceeds 200,000 bytes"),
        (lambda: add(path, name="../evil", size=3), "outside the destination"),
        (lambda: add(path, name="x", type=tarfile.SYMTYPE, linkname="/etc"), "(x is neither a file nor a folder)"),
    ):
        change_archive()
        before = set(tmp_path.rglob("*"))
        assert_refused(call(main, f"dir={path}", cwd=tmp_path), message)
        assert set(tmp_path.rglob("*")) == before and not (tmp_path.parent / "evil").exists()
    losses = {("/home/jane/a",): {0: 3.0}, ("/home/jane/b",): {0: 3.0}}
    folder = write_sweep(tmp_path / "paths", losses, ["data.path"], baseline=("",))
    done = call(main, f"dir={folder}", "publish=out", cwd=tmp_path)
    assert_refused(done, "data.path=/home/jane/a is a path of this machine, which is not published; sweep relative")
    assert list((tmp_path / "out").iterdir()) == []
