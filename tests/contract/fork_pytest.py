"""Runs pytest in forks of a process that has imported the named libraries: `python -P fork_pytest.py LIBRARY ...`.

Reads a JSON list from each line of stdin: the folder of a copy of the project, the file for the output, and arguments
of pytest. Writes a line with its exit status. Nothing of the project is imported before the fork.
"""

import gc
import importlib
import json
import os
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import hypothesis


def start_by_fork(path: str, arguments: list[str], inherited: list[int]) -> int:
    """Replaces multiprocessing.util.spawnv_passfds, which starts `python -c CODE` with some open files."""
    if process := os.fork():
        return process
    for number in {int(name) for name in os.listdir("/dev/fd")} - {0, 1, 2, *inherited}:
        try:
            os.close(number)
        except OSError:  # the one that listed the folder
            pass
    sys.modules.pop("multiprocessing.forkserver")  # whose lock is held
    try:
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def run_pytest(root: str, output: str, *arguments: str) -> int:
    """What the fork does."""
    gc.freeze()  # a collection would look at everything that was imported before the fork
    signal.alarm(900)  # ends it
    for stream, path in enumerate((os.devnull, output, output)):
        os.dup2(os.open(path, os.O_RDWR), stream)
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(Path(root).parent)
    sys.path[:0] = [root, os.environ["PYTHONPATH"]]
    importlib.import_module("tests.contract.harness")
    # The forkserver of the commands, whose imports `harness` names. There are no threads yet.
    with mock.patch("multiprocessing.util.spawnv_passfds", start_by_fork):
        forkserver.ensure_running()
    import pytest

    return pytest.main(list(arguments))


if __name__ == "__main__":
    for library in sys.argv[1:]:
        importlib.import_module(library)
    assert not {"tril", "tests"} & sys.modules.keys()
    hypothesis.settings.register_profile("first", phases=[hypothesis.Phase.generate])  # no search for a smaller example
    hypothesis.settings.load_profile("first")
    for line in sys.stdin:
        if process := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
        else:
            sys.exit(run_pytest(*json.loads(line)))
