"""`train.py -m` around its runs, which do nothing here: what it rejects, lists and writes; and the process of a run."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
from filelock import FileLock

from tests.contract.harness import BARE, TINY, Process, merged, run, summary, unchanged
from tests.scripts.experiments.synthetic import command, launches_of
from tril.scripts.experiments.grid import folder_name
from tril.scripts.experiments.launch import train

OUTCOMES = {  # multiplier of the rate -> how the run ends
    "3": (128 + signal.SIGTERM, "stopped by SIGTERM at step 3"),
    "1e+30": (2, "error: the loss is nan\n \n"),
    "9": {"loss": 1.5, "final_val_loss": None, "final_val_bpb": None},  # JSON has no NaN
}


@pytest.fixture
def here(here, processes):
    """A folder with text.txt. Each run finishes with the loss of its heads, unless its rate has another outcome."""

    def outcome(settings):
        finished = {"loss": float(settings.get("model.n_heads", 2)), "seconds": 61.0}
        return OUTCOMES.get(settings.get("optim.lr_scale"), finished)

    processes(outcome)
    return here


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["model.n_heads=2,2"], ["model.n_heads=2,2", "twice"]),
        (["seed=0,0"], ["seed=0,0", "twice"]),
        (["model.n_heads=2,3"], ["1 of 2", "model.n_heads=3", "model.dim=32"]),
        (["model.n_heads=3,5"], ["2 of 2", "model.n_heads=3", "model.n_heads=5"]),
        (["model.n_kv_heads=null,2"], ["model.n_kv_heads=2", "model.n_kv_heads=null", "no effect"]),
        (["model.context_length=32,100000"], ["model.context_length=100000", "tokens"]),
        (["resume=latest", "seed=0,1"], ["resume=latest", "single run"]),
    ],
)
def test_a_wrong_grid_trains_nothing(settings, parts, here):
    done = command(here, *settings)
    assert done.returncode == 2 and not (here / "multirun").exists()
    assert all(part in done.stderr for part in parts) and done.stderr.count("error:") == 1, done.stderr


def test_a_grid_plans_the_models_of_init_from(here):
    for name in ("1", "4,seed=1"):
        own = ["data.path=text.txt", f"hydra.run.dir={name}", *f"model.n_heads={name}".split(",")]
        run("train", *merged(BARE, *own), cwd=here).succeeded()
    own = ["data.path=text.txt", "trainer.max_steps=2", "trainer.accelerator=cpu", "optim.schedule.warmup_steps=1"]
    run("train", "-m", *own, "init_from=1,'4,seed=1'", cwd=here).succeeded()
    planned = {each["values"]["init_from"]: each["parameters"] for each in launches_of(here)[0]["runs"]}
    assert planned == {name: summary(here / name)["parameters"] for name in ("1", "4,seed=1")}


def test_a_grid_lists_its_runs_and_compares(here):
    done = command(here, "model.n_heads=1,2", "seed=0,1").succeeded()
    assert "4 of 4 runs to train\n" in done.stdout
    rows = [re.split(r" *\| *", line) for line in done.stdout.splitlines()[2:4]]
    assert [row[1:3] for row in rows] == [["n_heads=1", "0,1"], ["n_heads=2", "0,1"]]
    assert re.search(r"\| n_heads=1 \| better +\| +-1.0000 ± 0.0000 \|", done.stdout)
    [launch] = launches_of(here)
    assert launch["swept"] == ["model.n_heads"] and launch["baseline"] == {"model.n_heads": 2}
    names = [f"model.n_heads={heads},seed={seed}" for heads in (1, 2) for seed in (0, 1)]
    assert [entry["folder"] for entry in launch["runs"]] == names and launch["runs"][0]["values"] == {
        "model.n_heads": 1
    }


def test_more_seeds_and_values_are_launches_of_the_same_folder(here):
    for values, seeds, new in (("1,2", "0", 2), ("1,2", "0,1", 2), ("2,4", "1", 1), ("1,2", "1", 0)):
        done = command(here, f"model.n_heads={values}", f"seed={seeds}").succeeded()
        assert len(re.findall("(?m)^start ", done.stdout)) == new
    assert [each["seeds"] for each in launches_of(here)] == [[0], [1], []]
    done = command(here, "model.n_heads=1,2", "model.dim=64", f"hydra.sweep.dir={next(here.glob('multirun/*'))}")
    assert done.returncode == 2 and "multirun/" in done.stderr  # other settings


def test_a_full_disk_leaves_no_part_of_a_launch(here):
    command(here, "seed=0").succeeded()
    [path] = here.glob("multirun/*/launches.jsonl")
    limit = (path.stat().st_size + 100, resource.RLIM_INFINITY)  # bytes of a file
    words = "-m", *TINY, "data.path=text.txt", "seed=0,1"
    full = Process("train", *words, cwd=here, before=partial(resource.setrlimit, resource.RLIMIT_FSIZE, limit)).done()
    assert full.returncode == 2 and len(launches_of(here)) == 1, full
    command(here, "seed=0,1").succeeded()
    assert [each["seeds"] for each in launches_of(here)] == [[0], [1]]


def test_a_grid_that_is_repeated_is_the_latest_again(here):
    for words in ("model.n_heads=1,2", "model.n_layers=1,2", "model.n_heads=1,2"):
        command(here, words).succeeded()
    newest = max(here.glob("multirun/*/launches.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    assert newest.parent.name.startswith("n_heads")


def test_runs_are_named_by_options_of_groups_in_unique_names_that_file_systems_accept(here):
    experiments = ["shakespeare", "shakespeare_nanogpt_cpu"]
    command(here, f"experiment={','.join(experiments)}", "data=files", "model.n_heads=2", "model.dim=16").succeeded()
    [launch] = launches_of(here)
    assert [entry["folder"] for entry in launch["runs"]] == [f"experiment={x},seed=0" for x in experiments]
    long = [folder_name({"a": "x" * 300 + end}) for end in "yz"]
    assert len(set(long)) == 2 and all(len(name) < 130 for name in long)
    assert folder_name({"a": "x/y"}).startswith("a=x_y-")


def test_failed_and_stopped_runs_do_not_end_a_grid_and_are_trained_again(here):
    rates = "optim.lr_scale=1,1e30,3,9"
    done, names = command(here, rates), [f"optim.lr_scale={rate},seed=0" for rate in ("1e+30", "3")]
    assert done.returncode == 1 and "2 of 4 runs are finished" in done.stdout
    assert f"FAILED  {names[0]}: error: the loss is nan (status 2, " in done.stdout
    assert f"FAILED  {names[1]}: stopped by SIGTERM" in done.stdout
    assert "lr_scale=9,seed=0 finished: nan bits per byte" in done.stdout
    left = "; ".join(f"{name} (failed)" for name in names)
    assert f"NOT finished: {left}; start the same command again" in done.stdout
    assert re.findall("(?m)^start +(.*)", command(here, rates).stdout) == names


def test_ctrl_c_ends_a_grid_and_says_how_to_continue(here, processes):
    def interrupt(settings):
        raise KeyboardInterrupt

    processes(interrupt)
    done = command(here, "seed=0,1")
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert "start the same command again to continue" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", ["launches.jsonl", "seed=0", "seed=0/log.txt"])
def test_a_grid_follows_no_link_in_its_folder(name, here, tmp_path_factory):
    command(here, "seed=0").succeeded()
    [folder], elsewhere = here.glob("multirun/*"), tmp_path_factory.mktemp("elsewhere")
    (folder / "seed=0/summary.json").unlink()
    (folder / "seed=0/log.txt").touch()
    link = (folder / name).rename(elsewhere / "target")
    (folder / name).symlink_to(link)
    with unchanged(elsewhere):
        command(here, "seed=0,1").refused(name, "link")


def test_a_grid_starts_its_runs_with_the_arguments_of_the_command_line(here, processes):
    command(here, "seed=0").succeeded()
    [path] = here.glob("multirun/*/launches.jsonl")
    path.write_text(path.read_text().replace('"seed=0"]', '"seed=0", "+callbacks.mine._target_=os.abort"]'))
    (path.parent / "seed=0/summary.json").unlink()
    started = processes(lambda settings: {"loss": 1.0, "seconds": 1.0}).started
    command(here, "seed=0").succeeded()
    assert "os.abort" in path.read_text() and [each for each in started if "os.abort" in each.values()] == []


# --- the process of a run

PARENT = """
import sys
from pathlib import Path
from tril.scripts.experiments.launch import spawn
code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
spawn([sys.executable, "-c", code], Path("log.txt"))
"""


def test_sigterm_ends_a_run_with_its_sweep(tmp_path):
    log = tmp_path / "log.txt"
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        while not log.is_file() or not log.read_text().endswith("\n"):
            assert parent.poll() is None
            time.sleep(0.01)
        parent.send_signal(signal.SIGTERM)
        assert "start the same command again to continue" in parent.communicate(timeout=30)[0]
    assert parent.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_a_run_of_another_process_is_waited_for_and_not_trained_again(tmp_path, processes, capsys):
    started, folder = processes(lambda _: {"loss": 9.0}).started, tmp_path / "run"
    folder.mkdir()
    waiting = threading.Thread(target=train, args=(folder, []))
    with FileLock(tmp_path / ".run.lock"):
        waiting.start()
        waiting.join(timeout=0.3)
        assert waiting.is_alive() and started == []
        (folder / "summary.json").write_text('{"final_val_loss": 1.5, "final_val_bpb": 0.5, "seconds": 61.0}')
    waiting.join()
    assert started == []
    assert re.match("done .*1.5000", capsys.readouterr().out)


def test_a_run_is_started_as_a_module_and_resumed_from_its_checkpoint(tmp_path, processes):
    commands, folder, last = processes(lambda _: (143, "")).commands, tmp_path / "a,b=1", "checkpoints/last.ckpt"
    words = ["model.dim=8", "logger=wandb"]
    train(folder, words)
    assert commands == [[sys.executable, "-P", "-m", "tril.train", *words, f"hydra.run.dir={folder}"]]
    (folder / last).parent.mkdir()
    (folder / last).touch()
    train(folder, words)
    assert commands[1][3:] == ["tril.train", f"resume={folder}", "logger=wandb"]
    (folder / last).unlink()
    train(folder, words)  # without a checkpoint, nothing of it is of use
    assert commands[2] == commands[0] and not (folder / last).parent.exists()


def test_the_module_is_started_and_its_last_line_says_why_a_run_failed(tmp_path):
    train(tmp_path / "a", ["model.n_layers=0"])
    failure = json.loads((tmp_path / "a" / "failed.json").read_text())
    assert failure["status"] == 2 and "model.n_layers=0" in failure["message"]
