"""What sweep.json records of each launch: the seeds that it adds, when, and by which command."""

import shlex
import sys
from datetime import datetime

import pytest

from tril.scripts.experiments.launch import launches_of, typed


@pytest.fixture(autouse=True)
def command(monkeypatch):
    arguments = ["train.py", "-m", "a.b=1,2", "data.path=my text.txt", "c='x'"]
    monkeypatch.setattr(sys, "argv", arguments)
    return arguments


def runs(*seeds, value=1):
    return [(seed, {"a.b": value}) for seed in seeds]


def test_command_is_quoted_for_a_shell(command):
    assert shlex.split(typed()) == ["python", *command]


def test_first_launch_is_the_first_stage():
    [stage] = launches_of({}, runs(2, 0, 2))
    assert stage["seeds"] == [0, 2] and stage["command"] == typed()
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(stage["date"])).total_seconds()) < 60


def test_only_added_seeds_make_a_stage():
    first = launches_of({}, runs(0, 1))
    index = {"runs": [{"seed": seed, "values": {"a.b": 1}} for seed in (0, 1)], "launches": first}
    assert launches_of(index, runs(0, 1)) == launches_of(index, runs(1)) == first
    second = launches_of(index, runs(1, 5, 3))
    assert second[0] == first[0] and [stage["seeds"] for stage in second] == [[0, 1], [3, 5]]


def test_more_variants_are_another_look():
    """Three comparisons that become five, each time at 4 %, would be wrong in more than 4 %."""
    first = launches_of({}, runs(0, 1))
    index = {"runs": [{"seed": seed, "values": {"a.b": 1}} for seed in (0, 1)], "launches": first}
    assert [stage["seeds"] for stage in launches_of(index, runs(0, 1) + runs(0, 1, value=2))] == [[0, 1], []]
