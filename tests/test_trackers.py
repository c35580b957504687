"""A run with wandb, compared with metrics.csv. wandb writes offline; its calls are recorded."""

from types import SimpleNamespace

import pytest
import yaml

from tests.contract.harness import interrupted, summary, train
from tril.model.runs import SWEEP, Run
from tril.model.training.summary import code_version

TRACKERS = ("logger=wandb", "logger.wandb.log_model=true", "~callbacks.causality")


@pytest.fixture
def parts(monkeypatch):
    """What each start of a run gives to wandb.

    A part: `init`, the options of wandb.init; `rows`; `artifacts`; `status`, the exit code; `config` and `summary`.
    """
    import wandb

    parts, init = [], wandb.init

    def recording_init(**options):
        made = init(**options)
        part = SimpleNamespace(init=options, rows=[], artifacts=[])
        parts.append(part)
        log, finish = made.log, made.finish
        made.log = lambda row, *args, **more: (part.rows.append(row), log(row, *args, **more))
        made.log_artifact = lambda *arguments: part.artifacts.append(arguments)

        def finished(exit_code=None):
            part.status, part.config, part.summary = exit_code, dict(made.config), dict(made.summary)
            finish(exit_code)

        made.finish = finished
        return made

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(wandb, "init", recording_init)
    return parts


@pytest.mark.slow  # wandb starts a process
def test_wandb_has_the_curves_of_metrics_csv_and_the_samples(parts, text, tmp_path):
    """Of a run in a sweep, which is interrupted after step 4 and resumed; wandb has settings and results as well."""
    run, cache = tmp_path / "2026" / "sweep" / "a=1", f"data.cache_dir={tmp_path / 'cache'}"
    run.parent.mkdir(parents=True)
    (run.parent / SWEEP).write_text("{}")
    with interrupted():
        train(f"data.path={text}", cache, f"hydra.run.dir={run}", *TRACKERS)
    train(f"resume={run}", cache, *TRACKERS[:2], base=())  # a saved run names no logger
    logged = {(name, row["step"]): x for row in Run(run).metrics for name, x in row.items() if name != "step"}
    results = {key: value for key, value in summary(run).items() if isinstance(value, int | float | str)}
    settings, samples = yaml.safe_load((run / "config.yaml").read_text()), (run / "samples.txt").read_text()

    first, last = parts
    cells = [(row["trainer/global_step"], item) for row in first.rows + last.rows for item in row.items()]
    curves = {(name, step): x for step, (name, x) in cells if isinstance(x, float | int) and "global_step" not in name}
    assert curves == logged and {step for _, step in curves} == {*range(1, 9)}
    assert {key: last.config[key] for key in settings} == settings and last.config["code"] == code_version()
    names = {name: last.init[name] for name in ("id", "name", "group", "project")}
    assert names == {"id": first.init["id"], "name": "a=1", "group": "sweep", "project": "tril"}
    assert {key: last.summary[key] for key in results} == results and len(results) > 20
    assert (first.status, last.status) == (1, 0)
    [table] = [row["samples"] for row in last.rows if "samples" in row]
    [(step, prompt, sample)] = table.data
    assert step == 8 and f"--- sample at step 8 ---\n{prompt}{sample}\n" in samples
    assert last.artifacts[-1] == (str(run / "checkpoints" / "best.ckpt"), f"model-{last.init['id']}", "model")
