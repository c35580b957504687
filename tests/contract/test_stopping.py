"""A run that is killed or stopped, or meets damaged files or a full disk, ends as docs/reliability.md says."""

import csv
import gc
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.contract.harness import TINY, Done, assert_refused, merged, metrics, newest_run, run, summary

FORKS = multiprocessing.get_context("forkserver")  # a fork of a process with threads may wait for ever
FORKS.set_forkserver_preload(["lightning.pytorch", "matplotlib.pyplot", "pandas", "pyarrow", "tril.train"])
FILL_DISK = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))  # no file grows
STEPS = "trainer.max_steps=9 trainer.accumulate_grad_batches=3 trainer.val_check_interval=3 checkpoint.every_n_steps=2"
OTHERS = "data.batch_size=8 model.resid_dropout=0.1 ~callbacks.causality"  # 24 windows per step, 80 per epoch
KILLS = "saved:2 backward:23 last.ckpt:3 samples.txt:2 metrics.csv:15 tokens.bin:1 summary.json:1".split()
STOPS = [*((event, -9) for event in KILLS), ("backward:14", 128 + 15), ("backward:14", 128 + 2)]
OF_A_CLOCK = re.compile("second|mfu|memory|folder|sample_with")  # or of the machine
slow = partial(pytest.param, marks=pytest.mark.slow)


def train(cwd, *settings, at="", act=None):
    """Trains in a new process, which calls `act` at an event. The status of a killed process is negative."""
    results = FORKS.SimpleQueue()
    process = FORKS.Process(target=train_here, args=(cwd, settings, at, act, results))
    process.start()
    process.join(240)
    assert process.exitcode is not None or process.kill(), "it does not end"
    return Done(process.exitcode, "", "") if process.exitcode else results.get()


def train_here(cwd, settings, at, act, results):
    from matplotlib.figure import Figure

    save, backward, counts = torch.save, torch.Tensor.backward, Counter()

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
    torch.save = lambda *args, **options: (save(*args, **options), count("saved"))  # the end of it is in a buffer
    torch.Tensor.backward = lambda *args, **options: (backward(*args, **options), count("backward"))
    Figure.draw = lambda *args: None  # of the loss plot, a third of the time
    gc.freeze()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    results.put(run("train", *settings, cwd=cwd))


def outcome(folder):
    """What a run left, without times and paths: file -> content; of checkpoints, weights and optimizer."""
    found = {path.name: path.read_bytes() for path in (folder / "samples.txt", *folder.glob("windows_*.npz"))}
    for name in ("last.ckpt", "best.ckpt"):
        content = torch.load(folder / "checkpoints" / name, weights_only=True)
        states = [content["state_dict"], content["optimizer_states"]]
        found[name] = json.dumps(states, default=torch.Tensor.tolist)
    (log,) = folder.rglob("metrics.csv")
    for name, rows in (("metrics.csv", csv.DictReader(log.open())), ("summary.json", [summary(folder)])):
        found[name] = [{key: x for key, x in row.items() if not OF_A_CLOCK.search(key)} for row in rows]
    return found


def differences(cwd, other):
    found, expected = outcome(newest_run(cwd)), outcome(newest_run(other))
    return sorted(name for name in found | expected if found.get(name) != expected.get(name))


def assert_continues(cwd, whole, *settings):
    """The run ends like one that was never stopped."""
    done = train(cwd, *settings)
    assert done.status == 0 and differences(cwd, whole) == [], done
    return done


@pytest.fixture(scope="session")
def settings(texts):
    paths = f"data.path={texts.parent}/0*.txt", f"data.val_path={texts.parent}/39.txt"
    return merged(TINY, *STEPS.split(), *OTHERS.split(), *paths)


@pytest.fixture(scope="session")
def whole(once, settings):
    """A folder with a whole run."""
    return once("whole", lambda cwd: train(cwd, *settings))


@pytest.fixture
def stopped(once, settings, tmp_path):
    """A folder with a run that SIGTERM ended within step 5; it wrote checkpoints of steps 2, 3, 4 and 5."""
    terminate = partial(signal.raise_signal, signal.SIGTERM)
    original = once("stopped", lambda cwd: train(cwd, *settings, at="backward:14", act=terminate))
    return shutil.copytree(original, tmp_path / "stopped")


@pytest.mark.slow
@pytest.mark.parametrize(("at", "status"), STOPS)
def test_a_killed_or_stopped_run_continues_as_if_it_had_never_been_stopped(at, status, settings, whole, tmp_path):
    done = train(tmp_path, *settings, at=at, act=partial(signal.raise_signal, abs(status) % 128))
    assert done.status == status
    command = ["resume=latest"] if at != "tokens.bin:1" else settings
    if at == "metrics.csv:15":
        with next(newest_run(tmp_path).rglob("metrics.csv")).open("a") as file:
            file.write("1.25,half of a row")
    if status > 0:
        command = re.findall(r"resume=\S+", done.err)
        content = torch.load(newest_run(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)
        assert content["global_step"] == 5, "the step of the signal ends"
    assert_continues(tmp_path, whole, *command)


def test_the_comparison_finds_every_single_change(whole, tmp_path):
    folder = newest_run(shutil.copytree(whole, tmp_path, dirs_exist_ok=True))
    assert differences(tmp_path, whole) == []
    for name in ("last.ckpt", "best.ckpt"):
        content = torch.load(folder / "checkpoints" / name, weights_only=True)
        state = content["state_dict"] if name == "best.ckpt" else content["optimizer_states"][0]["state"][0]
        next(iter(state.values())).view(-1)[0] += 1e-6
        torch.save(content, folder / "checkpoints" / name)
    edits = {"metrics.csv": "\n|1\n", "samples.txt": "s|", "summary.json": 'ps": 9|ps": 8', "windows_last.npz": "\0|1"}
    for name, edit in edits.items():
        (path,), (old, new) = folder.rglob(name), edit.encode().split(b"|")
        path.write_bytes(new.join(path.read_bytes().rsplit(old, 1)))
    assert differences(tmp_path, whole) == ["best.ckpt", "last.ckpt", *edits]


@pytest.mark.parametrize("place", ["weight", *map(slow, ("optimizer", "setting", "end"))])
def test_a_damaged_checkpoint_is_refused_and_latest_takes_the_one_before(place, stopped, whole):
    last = newest_run(stopped) / "checkpoints" / "last.ckpt"
    content, data = torch.load(last, weights_only=True), bytearray(last.read_bytes())
    tensors = {"weight": content["state_dict"], "optimizer": content["optimizer_states"][0]["state"][0]}
    damaged = next(iter(tensors[place].values())).numpy().tobytes() if place in tensors else b"n_heads"
    data[data.index(damaged) + 3] ^= 1
    last.write_bytes(data[: len(data) // 2] if place == "end" else data)
    assert_refused(train(stopped, f"resume={last}"), "last.ckpt")
    if place != "optimizer":
        assert_refused(run("sample", f"ckpt={last}", "device=cpu", cwd=stopped), "last.ckpt")
    done = assert_continues(stopped, whole, "resume=latest")
    assert "previous.ckpt" in done.out + done.err


def test_no_code_in_a_checkpoint_runs(stopped, tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    content = torch.load(newest_run(stopped) / "checkpoints" / "last.ckpt", weights_only=True) | {"more": Hostile()}
    for name, zipped in (("new.ckpt", True), ("old.ckpt", False)):  # both formats of torch
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=zipped)
        assert_refused(run("sample", f"ckpt={tmp_path / name}", cwd=tmp_path), name)
        for key in ("resume", "init_from"):
            assert_refused(train(tmp_path, f"{key}={tmp_path / name}"), name)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "new.ckpt", weights_only=False)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["tokens.bin", *map(slow, ("half of tokens.bin", "meta.json", "tokenizer.json"))])
def test_a_damaged_cache_is_prepared_again(name, settings, whole, tmp_path):
    (path,) = shutil.copytree(whole / "cache", tmp_path / "cache").rglob(name.split()[-1])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content[: len(content) // 2] if name.startswith("half") else content)
    assert_continues(tmp_path, whole, *settings)


@pytest.mark.slow
def test_a_full_disk_is_refused_in_one_line_before_training_and_harms_no_checkpoint_later(settings, whole, tmp_path):
    assert_refused(train(tmp_path, *settings, at="tokens.bin:1", act=FILL_DISK), f"{tmp_path}/cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert train(tmp_path, *settings, at="backward:14", act=FILL_DISK).status > 0
    assert_continues(tmp_path, whole, "resume=latest")


def test_a_setting_changes_in_a_resumed_run_only_if_it_is_typed(stopped, whole):
    config = newest_run(stopped) / "config.yaml"
    text = config.read_text()
    config.write_text(re.sub("^seed: 0", "seed: 1", text, flags=re.MULTILINE))
    assert_refused(train(stopped, "resume=latest"), "seed")
    config.write_text(text)
    assert_refused(train(stopped, "resume=latest", "model.dim=64"), "model.dim", "64", "32")
    done = train(stopped, "resume=latest", "optim.lr_scale=0.5")
    rates, before = (metrics(newest_run(cwd), "lr/muon") for cwd in (stopped, whole))
    expected = {step: rate * (1 if step <= 5 else 0.5) for step, rate in before.items()}
    assert done.status == 0 and rates == pytest.approx(expected), done.err
