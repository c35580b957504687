"""Runs with wandb and TensorBoard, compared with metrics.csv. wandb writes offline; its calls are recorded."""

from types import SimpleNamespace

import pytest
import yaml

from tests.runs import interrupted, rows, train_typed, typed
from tril.model.runs import SWEEP
from tril.model.training.summary import code_version

pytestmark = pytest.mark.slow  # wandb starts a process
TRACKERS = ("logger=[wandb,tensorboard]", "logger.wandb.log_model=true", "callbacks.causality=null")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The folder of a run in a sweep, interrupted after step 4 and resumed, and what each of its parts gave to wandb.

    A part: `init`, the options of wandb.init; `rows`; `artifacts`; `status`, the exit code; `config` and `summary`.
    """
    pytest.importorskip("tensorboard")
    import wandb
    from torch.utils.tensorboard import SummaryWriter

    folder, parts, init = tmp_path_factory.mktemp("runs"), [], wandb.init
    (folder / "text.txt").write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400)))
    run = folder / "2026" / "sweep" / "a=1"
    run.parent.mkdir(parents=True)
    (run.parent / SWEEP).write_text("{}")

    def recording_init(**options):
        made = init(**options)
        part = SimpleNamespace(init=options, rows=[], artifacts=[], status=None)
        parts.append(part)
        log, finish = made.log, made.finish
        made.log = lambda row, *args, **more: (part.rows.append(row), log(row, *args, **more))
        made.log_artifact = lambda *arguments: part.artifacts.append(arguments)

        def finished(exit_code=None):
            part.status, part.config, part.summary = exit_code, dict(made.config), dict(made.summary)
            finish(exit_code)

        made.finish = finished
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setattr(wandb, "init", recording_init)
        cache = f"data.cache_dir={folder / 'cache'}"
        with interrupted():
            train_typed(typed(f"data.path={folder / 'text.txt'}", cache, f"hydra.run.dir={run}", *TRACKERS))
        with SummaryWriter(str(run / "tensorboard")) as killed:
            killed.add_scalar("train/loss", 9.0, 6)  # the process was killed after step 6
        train_typed(typed(f"resume={run}", cache, base=[]))
    cells = ((int(row["step"]), name, value) for row in rows(run) for name, value in row.items() if name != "step")
    return run, parts, {(name, step): float(value) for step, name, value in cells if value}  # the third of metrics.csv


def test_wandb_has_curves_settings_results_sample_and_checkpoint(found):
    run, (first, last), logged = found
    cells = [(row["trainer/global_step"], item) for row in first.rows + last.rows for item in row.items()]
    curves = {(name, step): x for step, (name, x) in cells if isinstance(x, float | int) and "global_step" not in name}
    assert curves == logged and {step for _, step in curves} == {*range(1, 9)}
    settings, summary = (yaml.safe_load((run / name).read_text()) for name in ("config.yaml", "summary.json"))
    assert {key: last.config[key] for key in settings} == settings and last.config["code"] == code_version()
    names = {name: last.init[name] for name in ("id", "name", "group", "project")}
    assert names == {"id": first.init["id"], "name": "a=1", "group": "2026/sweep", "project": "tril"}
    results = {key: value for key, value in summary.items() if isinstance(value, int | float | str)}
    assert {key: last.summary[key] for key in results} == results and len(results) > 20
    assert (first.status, last.status) == (1, 0)
    [table] = [row["samples"] for row in last.rows if "samples" in row]
    [(step, prompt, text)] = table.data
    assert step == 8 and f"--- sample at step 8 ---\n{prompt}{text}\n" in (run / "samples.txt").read_text()
    assert last.artifacts[-1] == (str(run / "checkpoints" / "best.ckpt"), f"model-{last.init['id']}", "model")


def test_tensorboard_has_the_curves_of_metrics_csv_and_the_samples(found):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _, logged = found
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    scalars = [(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    assert [step for tag, step, _ in scalars if tag == "train/loss"] == [*range(1, 9)]  # without the killed process's
    assert {(tag, step): value for tag, step, value in scalars} == pytest.approx(logged, rel=1e-6)  # float32
    texts = events.Tensors("sample/text_summary")
    assert [event.step for event in texts] == [4, 8]
    sample = texts[-1].tensor_proto.string_val[0].decode().strip("`").strip("\n")
    assert sample in (run / "samples.txt").read_text()
