"""`python train.py trainer=ddp trainer.devices=2`: one folder, one log, and one line when a process dies."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.calls import call
from tests.conftest import assert_refused
from tests.runs import TINY, rows
from tril.model.checkpoint import read_state
from tril.scripts.cli.config import CONFIGS

TRAIN = CONFIGS.parent / "train.py"
DDP = ["trainer=ddp", "trainer.devices=2"]


def start(*overrides: str, cwd: Path, program: tuple = (sys.executable, TRAIN), **environment: str) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRIL_CACHE": str(cwd / "cache")} | environment
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen([*program, *TINY, *overrides], cwd=cwd, env=env, start_new_session=True, **streams)


def finish(process: subprocess.Popen, timeout: float = 120) -> tuple[int, str, str]:
    """Status, stdout and stderr; ends what is left of its processes."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        for each in session(process.pid):
            os.kill(each, signal.SIGKILL)
    return process.returncode, stdout, stderr


def session(leader: int) -> list[int]:
    """The processes of a session that still run, on Linux."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(of) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, finish(process, 5)
        time.sleep(0.1)


def check_one_run(folder: Path, stdout: str, stderr: str) -> None:
    [run] = [path.parent for path in folder.glob("outputs/*/*/summary.json")]
    assert [path.name for path in folder.glob("outputs/*/*")] == [run.name]
    for line in (
        r"^model   ",
        r"^folder  ",
        r"^causal: certified in ",
        r"^step +8  validation",
        r"^--- sample at step 8",
        r"^  validation  ",
    ):
        assert len(re.findall(line, stdout, re.MULTILINE)) == 1, (line, stdout)
    assert "Warning" not in stderr and "INFO" not in stdout + stderr
    assert [row["step"] for row in rows(run) if row["val/loss"]] == ["4", "8"]


def test_two_processes_share_one_folder_and_one_log(tmp_path, text):
    status, stdout, stderr = finish(start(*DDP, f"data.path={text}", cwd=tmp_path))
    assert status == 0, stderr
    check_one_run(tmp_path, stdout, stderr)


@pytest.mark.slow
def test_torchrun_and_its_processes_share_one_folder_and_one_log(tmp_path, text):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", TRAIN)
    status, stdout, stderr = finish(
        start(*DDP, f"data.path={text}", "hydra.run.dir=outputs/one/folder", cwd=tmp_path, program=torchrun)
    )
    assert status == 0, stderr
    check_one_run(tmp_path, stdout, stderr)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_dies_ends_the_run_with_one_line_and_the_run_continues(tmp_path, text, rank):
    options = [f"data.path={text}", f"hydra.run.dir={tmp_path / 'run'}"]
    process = start(*DDP, *options, "trainer.max_steps=100000", "trainer.val_check_interval=50", cwd=tmp_path)
    wait_for(tmp_path / "run" / "checkpoints" / "last.ckpt", process)
    [child] = [each for each in session(process.pid) if each != process.pid]
    os.kill((process.pid, child)[rank], signal.SIGKILL)
    killed = time.monotonic()
    while session(process.pid) and time.monotonic() < killed + 60:
        time.sleep(0.1)
    assert session(process.pid) == []
    status, _, stderr = finish(process)
    assert "Traceback" not in stderr
    if rank == 1:
        line = f"error: rank 1 was ended by SIGKILL; continue with python train.py resume={tmp_path / 'run'}"
        assert stderr.splitlines()[-1] == line
    assert status == (-signal.SIGKILL, 1)[rank]
    step = read_state(tmp_path / "run" / "checkpoints" / "last.ckpt", training=False)["global_step"]
    status, stdout, stderr = finish(start_again(tmp_path / "run", f"trainer.max_steps={step + 10}", cwd=tmp_path))
    assert status == 0 and "  validation  " in stdout, stderr


def start_again(run: Path, *overrides: str, cwd: Path) -> subprocess.Popen:
    command = [sys.executable, TRAIN, f"resume={run}", *overrides]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRIL_CACHE": str(cwd / "cache")}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **streams)


REFUSED = {
    "trainer.strategy=ddp_spawn": "trainer.strategy=ddp_spawn must be 'auto', 'ddp' or 'model_parallel'",
    "trainer.strategy=ddp_notebook": "trainer.strategy=ddp_notebook must be 'auto', 'ddp' or 'model_parallel'",
    "trainer=ddp trainer.num_nodes=2": "trainer.num_nodes=2 needs processes that torchrun or srun starts on every "
    "node; start with torchrun --nnodes=2, or use trainer.num_nodes=1",
    "trainer=fsdp trainer.devices=2 compile=true": "compile=true does not go with trainer=fsdp; set compile=false",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_be_divided_is_refused_in_one_line(tmp_path, text, overrides):
    from tril import train

    done = call(
        train.main, *TINY, f"data.path={text}", *overrides.split(), cwd=tmp_path, TRIL_CACHE=str(tmp_path / "c")
    )
    assert_refused(done, REFUSED[overrides])
    assert not list(tmp_path.glob("outputs/*/*"))


def test_processes_of_torchrun_must_be_those_of_the_settings_and_need_one_folder(tmp_path, text):
    from tril import train

    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TRIL_CACHE": str(tmp_path / "c")}
    done = call(train.main, *TINY, f"data.path={text}", cwd=tmp_path, **environment)
    limit = "must be 2, the number of processes that were started; change one of them"
    assert_refused(done, f"trainer.devices=1 * trainer.num_nodes=1 {limit}")
    settings, environment = ("trainer=ddp", "trainer.devices=2"), environment | {"TORCHELASTIC_RUN_ID": "x"}
    done = call(train.main, *TINY, *settings, f"data.path={text}", cwd=tmp_path, **environment)
    assert_refused(done, "torchrun and srun start processes that need one folder; add hydra.run.dir=FOLDER")
