"""Runs with wandb and TensorBoard, read back from what these wrote, and compared with metrics.csv."""

import json
import math

import pytest
import yaml

from tests.runs import interrupted, rows, train_typed, typed
from tests.wandb_file import read_wandb
from tril.model.runs import SWEEP
from tril.model.training.summary import code_version

CLOCKS = {"train/seconds", "train/tokens_per_second"}
NOT_IN_CSV = ("trainer", "samples")  # what only wandb gets
TRACKERS = ("logger=[wandb,tensorboard]", "logger.wandb.log_model=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`csv`, and `sweep/a=1` with both trackers, which was interrupted after step 4 and resumed."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400)))
    (folder / "2026" / "sweep").mkdir(parents=True)
    (folder / "2026" / "sweep" / SWEEP).write_text("{}")

    def train(*overrides, name):
        base = (f"data.path={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}")
        return train_typed(typed(*base, f"hydra.run.dir={folder / name}", *overrides))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        train(name="csv")
        with interrupted():
            train(*TRACKERS, name="2026/sweep/a=1")
        with SummaryWriter(str(folder / "2026/sweep/a=1/tensorboard")) as killed:
            killed.add_scalar("train/loss", 9.0, 6)  # the process was killed after step 6
        train_typed(typed(f"resume={folder / '2026/sweep/a=1'}", f"data.cache_dir={folder / 'cache'}", base=[]))
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return folder / "2026" / "sweep" / "a=1"


def logged(run):
    """{(column, step): value} of metrics.csv."""
    return {
        (name, int(row["step"])): float(value)
        for row in rows(run)
        for name, value in row.items()
        if value and name != "step"
    }


def test_metrics_csv_is_the_same_under_each_logger(folder, run):
    expected, found = (
        {key: value for key, value in logged(path).items() if key[0] not in CLOCKS} for path in (folder / "csv", run)
    )
    assert found == expected and len(found) == 56
    assert {key[1] for key in found} == {2, 4, 6, 8}


def test_wandb_has_the_curves_of_metrics_csv(run):
    history = read_wandb(run, number=0).history + read_wandb(run).history
    found = {
        (name, row["trainer/global_step"]): value
        for row in history
        for name, value in row.items()
        if "/" in name and isinstance(value, float | int) and name.split("/")[0] not in NOT_IN_CSV
    }
    assert found == logged(run)


def test_wandb_has_settings_commit_and_results(run):
    first, last = read_wandb(run, number=0), read_wandb(run)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert {key: last.config[key] for key in settings} == settings
    assert last.config["code"] == code_version() and settings["model"]["dim"] == 32
    names = (last.run.run_id, last.run.display_name, last.run.run_group, last.run.project)
    assert names[1:] == ("a=1", "2026/sweep", "tril")
    assert first.run.run_id == last.run.run_id  # a resumed run keeps it
    summary = json.loads((run / "summary.json").read_text())
    assert {key: last.summary[key] for key in summary if key != "sources"} == {
        key: value for key, value in summary.items() if key != "sources"
    }
    assert (first.exit_code, last.exit_code) == (1, 0)


def test_wandb_has_samples_and_checkpoint(run):
    last, media = read_wandb(run), read_wandb(run).folder / "files" / "media"
    [table] = [json.loads(path.read_text()) for path in media.glob("table/samples_*.json")]
    [(step, prompt, text)] = table["data"]
    assert step == 8
    assert f"--- sample at step 8 ---\n{prompt}{text}\n" in (run / "samples.txt").read_text()
    sizes = {a.type: [(entry.path, entry.size) for entry in a.manifest.contents] for a in last.artifacts}
    assert sizes["model"] == [("best.ckpt", (run / "checkpoints" / "best.ckpt").stat().st_size)]


def test_tensorboard_has_the_curves_of_metrics_csv_and_the_samples(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    scalars = [(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    found = {(tag, step): value for tag, step, value in scalars}
    assert [step for tag, step, _ in scalars if tag == "train/loss"] == [
        2,
        4,
        6,
        8,
    ]  # without that of the killed process
    expected = logged(run)
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[key], expected[key], rel_tol=1e-6) for key in expected)  # float32
    texts = events.Tensors("sample/text_summary")
    assert [event.step for event in texts] == [4, 8]
    last = texts[-1].tensor_proto.string_val[0].decode()
    assert last.strip("`").strip("\n") in (run / "samples.txt").read_text()
