"""A run that is killed or stopped, or meets damaged files or a full disk, ends as docs/training.md says."""

import csv
import itertools
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from tests.contract.harness import BARE, TINY, Process, merged, metrics, newest_run, run, summary

FILL_DISK = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))  # bytes of a file
# One run meets these in turn: the event, its status, and what damages it. It has 9 steps of 3 backward passes.
KILLS = [
    ("tokens.bin:1", -9),  # a text that is half prepared
    ("last.ckpt:2", -9),  # after the first validation with its best.ckpt, sample and rows; the last.ckpt is of step 2
    ("metrics.csv:3", -9),  # in a row, of which half is written
    ("backward:8", -9),
    ("backward:7", 128 + 15),  # SIGTERM ends the step
    ("summary.json:1", -9),  # no step is left
]
STOPPED = tuple(
    """
    trainer.max_steps=9 trainer.accumulate_grad_batches=3 trainer.val_check_interval=3 checkpoint.every_n_steps=2
    data.batch_size=8 model.resid_dropout=0.1 ~callbacks.causality model.context_length=256
    data.double_length_at=[0.5]
    """.split()
)
OF_A_CLOCK = re.compile("second|mfu|memory|folder|sample_with")  # or of the machine


def train_until(at, act, cwd, *settings):
    """Trains in a copy of this process, and calls `act` at an event."""
    return Process("train", *settings, cwd=cwd, before=partial(prepare, at, act)).done()


def prepare(at, act):
    """Counts events: the end of a backward pass, and files that are opened to write or replaced."""
    backward, counts = torch.Tensor.backward, Counter()

    def count(event, replaced=None):
        counts[event] += 1
        if at == f"{event}:{counts[event]}":
            replaced and open(replaced, "wb").close()  # what open(replaced, "w") does next
            act()

    def count_writing(event, args):
        if event == "os.rename":
            count(Path(str(args[1])).name)
        elif event == "open" and isinstance(args[1], str) and args[1][0] in "wax":
            count(Path(str(args[0])).name, replaced=args[0] if args[1][0] == "w" else None)

    sys.addaudithook(count_writing)
    torch.Tensor.backward = lambda *args, **options: (backward(*args, **options), count("backward"))


def outcome(folder):
    """What a run left, without times and paths: file -> content; of checkpoints, weights and optimizer."""
    found = {path.name: path.read_bytes() for path in (folder / "samples.txt", *folder.glob("*.npz"))}
    found["heads.csv"] = (folder / "heads.csv").read_text()
    for name in ("last.ckpt", "best.ckpt"):
        content = torch.load(folder / "checkpoints" / name, weights_only=True)
        states = [content["state_dict"], content["optimizer_states"]]
        found[name] = json.dumps(states, default=torch.Tensor.tolist)
    (log,) = folder.rglob("metrics.csv")
    for name, rows in (("metrics.csv", csv.DictReader(log.open())), ("summary.json", [summary(folder)])):
        found[name] = [{key: x for key, x in row.items() if not OF_A_CLOCK.search(key)} for row in rows]
    return found


def assert_continues(cwd, whole, *settings):
    """The run ends like one that was never stopped."""
    run("train", *settings, cwd=cwd).succeeded()
    found, expected = outcome(newest_run(cwd)), outcome(newest_run(whole))
    assert found.keys() == expected.keys() and [name for name in found if found[name] != expected[name]] == []


@pytest.fixture(scope="session")
def settings(texts):
    paths = f"data.path={texts.parent}/0*.txt", f"data.val_path={texts.parent}/39.txt"
    return merged(TINY, *STOPPED, *paths)  # 24 windows per step, 80 per epoch


@pytest.fixture(scope="session")
def whole(once, settings):
    """A folder with a whole run."""
    return once("whole", lambda cwd: run("train", *settings, cwd=cwd).succeeded())


@pytest.fixture
def stopped(once, settings, tmp_path):
    """A folder with a run that SIGTERM ended within step 5; it wrote checkpoints of steps 2, 3, 4 and 5."""
    terminate = partial(signal.raise_signal, signal.SIGTERM)
    original = once("stopped", lambda cwd: train_until("backward:14", terminate, cwd, *settings))
    return shutil.copytree(original, tmp_path / "stopped")


@pytest.mark.slow
def test_a_killed_and_stopped_run_ends_as_if_it_had_never_been_stopped(settings, whole, tmp_path):
    command = settings
    for at, status in KILLS:
        done = train_until(at, partial(signal.raise_signal, abs(status) % 128), tmp_path, *command)
        assert done.returncode == status, (at, done)
        if at.startswith("metrics.csv"):
            with next(newest_run(tmp_path).rglob("metrics.csv")).open("a") as file:
                file.write("1.25,half of a row")
        command = ["resume=latest"] if at != "tokens.bin:1" else settings
        if status > 0:
            command = re.findall(r"resume=\S+", done.stderr)
            content = torch.load(newest_run(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)
            assert content["global_step"] == 7, "the step of the signal ends"
    assert_continues(tmp_path, whole, *command)


def test_a_damaged_checkpoint_is_refused_and_the_run_goes_on_from_the_best_one(stopped, whole):
    last = newest_run(stopped) / "checkpoints" / "last.ckpt"
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 1
    last.write_bytes(data)
    run("train", "resume=latest", cwd=stopped).refused("last.ckpt")
    run("sample", f"ckpt={last}", "device=cpu", cwd=stopped).refused("last.ckpt")
    assert_continues(stopped, whole, f"resume={last.with_name('best.ckpt')}")


def test_no_code_in_a_checkpoint_runs(trained, tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    content = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True) | {"more": Hostile()}
    for name, zipped in (("new.ckpt", True), ("old.ckpt", False)):  # both formats of torch
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=zipped)
    for command, *keys in (("sample", "ckpt"), ("train", "resume", "init_from")):
        for key, name in itertools.product(keys, ("new.ckpt", "old.ckpt")):
            run(command, f"{key}={tmp_path / name}", cwd=tmp_path).refused(name)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "new.ckpt", weights_only=False)
    assert (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_full_disk_is_one_line_before_training_and_harms_no_checkpoint_later(settings, whole, tmp_path):
    train_until("tokens.bin:1", FILL_DISK, tmp_path, *settings).refused(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    done = train_until("backward:14", FILL_DISK, tmp_path, *settings)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and line.startswith("error: ") and f"resume={newest_run(tmp_path)}" in line, done
    assert_continues(tmp_path, whole, "resume=latest")


def test_a_resumed_run_has_its_settings_but_for_those_given_that_may_change(stopped, whole):
    (newest_run(stopped) / "config.yaml").write_text("seed: 1\n")  # its settings are those of the checkpoint
    for setting in ("seed=1", "model.dim=64", "data.double_length_at=[0.5]", "optim.kind=adamw"):
        run("train", "resume=latest", setting, cwd=stopped).refused(setting)
    run("train", "resume=latest", "optim.lr_scale=0.5", cwd=stopped).succeeded()
    rates, before = (metrics(newest_run(cwd), "lr/muon") for cwd in (stopped, whole))
    assert rates == pytest.approx({step: rate * (1 if step <= 5 else 0.5) for step, rate in before.items()})


def test_a_finished_run_goes_on_for_more_steps_as_if_they_had_been_planned(settings, tmp_path):
    schedule = "optim.schedule.kind=constant", "optim.schedule.warmup_steps=0", "data.double_length_at=[]"
    constant = merged(settings, *schedule, "trainer.val_check_interval=4", *BARE[-3:])
    first, whole = ([*constant, f"trainer.max_steps={steps}"] for steps in (6, 9))  # each ends with a pass of the text
    for words in ([*first, "hydra.run.dir=first"], [*whole, "hydra.run.dir=whole"], ["resume=first", whole[-1]]):
        run("train", *words, cwd=tmp_path).succeeded()
    losses, expected = (metrics(tmp_path / name, "train/loss") for name in ("first", "whole"))
    assert losses == expected and len(losses) == 9


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_no_process_is_left(texts, tmp_path):
    ranks = ("trainer=ddp", "trainer.devices=2", "trainer.max_steps=100000", "trainer.val_check_interval=10")
    process = Process("train", *merged(BARE, f"data.path={texts}", *ranks), cwd=tmp_path)
    while process.is_alive() and not list(tmp_path.rglob("last.ckpt")):
        time.sleep(0.2)
    family = psutil.Process(process.pid).children(recursive=True)
    next(child for child in family if "train.py" in " ".join(child.cmdline())).kill()
    assert process.done(120).returncode != 0
    assert not psutil.wait_procs(family, timeout=30)[1]


@pytest.mark.slow
def test_a_rank_ends_if_rank_0_is_killed_before_they_meet(texts, tmp_path):
    process = Process("train", *merged(BARE, f"data.path={texts}", "trainer=ddp", "trainer.devices=2"), cwd=tmp_path)
    family = []
    while process.is_alive() and not family:
        time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        family = [child for child in children if "train.py" in " ".join(child.cmdline())]
    psutil.Process(process.pid).kill()
    assert family and not psutil.wait_procs(family, timeout=60)[1]


@pytest.mark.parametrize("command", ["evaluate", "heads windows=2"])
def test_a_result_that_cannot_be_written_is_printed(command, trained, tmp_path):
    words = [*command.split(), f"ckpt={trained}", "device=cpu", f"out={tmp_path / 'out'}"]
    expected = run(*words, cwd=tmp_path).succeeded().stdout
    before = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    full = Process(*words, cwd=tmp_path, before=before).done()
    assert (full.returncode, full.stdout) == (2, expected) and "out=" in full.stderr.splitlines()[-1], full
