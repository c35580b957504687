"""What sweep.json records of each launch: the seeds that it adds, when, and by which command."""

import shlex
import sys
from datetime import datetime

import pytest

from tril.scripts.experiments.launch import read_index, stages_of, typed


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
    [stage] = stages_of({}, runs(2, 0, 2))
    assert stage["seeds"] == [0, 2] and stage["command"] == typed()
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(stage["date"])).total_seconds()) < 60


def test_only_added_seeds_make_a_stage():
    first = stages_of({}, runs(0, 1))
    index = {"cells": [{"seed": seed, "values": {"a.b": 1}} for seed in (0, 1)], "stages": first}
    assert stages_of(index, runs(0, 1)) == stages_of(index, runs(1)) == first
    second = stages_of(index, runs(1, 5, 3))
    assert second[0] == first[0] and [stage["seeds"] for stage in second] == [[0, 1], [3, 5]]


def test_more_variants_are_another_look():
    """Three comparisons that become five, each time at 4 %, would be wrong in more than 4 %."""
    first = stages_of({}, runs(0, 1))
    index = {"cells": [{"seed": seed, "values": {"a.b": 1}} for seed in (0, 1)], "stages": first}
    assert [stage["seeds"] for stage in stages_of(index, runs(0, 1) + runs(0, 1, value=2))] == [[0, 1], []]


def test_seeds_of_an_older_version_are_the_first_stage(tmp_path):
    """Its sweep.json has neither stages nor a command."""
    old = {"seeds": [0, 1], "date": None, "command": None}
    (tmp_path / "sweep.json").write_text(
        '{"family": "f", "cells": [{"seed": 1, "values": {"a.b": 1}}, {"seed": 0, "values": {"a.b": 1}}]}'
    )
    index = read_index(tmp_path / "sweep.json")
    assert stages_of(index, runs(0)) == [old]
    assert [stage["seeds"] for stage in stages_of(index, runs(0, 4))] == [[0, 1], [4]]
