"""--help of every program: its own keys with their comments, its own groups, and the settings that were typed."""

import importlib
import re

import pytest

from tests.calls import call
from tests.conftest import assert_refused
from tril.scripts.common.command import COMMANDS
from tril.scripts.common.help_text import help_text, key_comments

GROUPS = {  # those of the default list of each program
    "train": {"model", "data", "optim", "trainer", "callbacks", "logger", "experiment", "+ablation", "+tune"},
    "certify": {"model"},
    "evaluate": {"data"},
    "plan": {"model", "data", "optim", "trainer", "callbacks", "logger", "experiment"},
    "bench": {"model", "data", "optim", "trainer", "callbacks", "logger", "experiment"},
}


def help_of(name, *arguments, tmp_path):
    main = importlib.import_module("tril.train" if name == "train" else f"tril.scripts.{name}").main
    return call(main, *arguments, cwd=tmp_path)


def comment_of(entry):
    """It starts at column 47, and on the next line where the key and its value take that column."""
    first, *others = entry.split("\n")
    return others if first[46:47].strip() else first[46:].strip()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_key_has_a_comment_and_only_own_groups_are_listed(name, tmp_path):
    done = help_of(name, "--help", tmp_path=tmp_path)
    assert done.returncode == 0 and done.stderr == "" and not list(tmp_path.iterdir())
    description, rest = done.stdout.split("\nKeys (key=value)\n")
    assert re.search(rf"python (train|scripts/{name})\.py\b", description)
    keys, _, groups = rest.partition("\nGroups (group=choice); * is chosen\n")
    entries = re.split(r"\n(?=  \S)", keys.rstrip())[1:]
    assert entries and [entry for entry in entries if not comment_of(entry)] == []
    found = {line[4:].partition("=")[0] for line in groups.splitlines() if re.match(r"  [* ] \S", line)}
    assert found == GROUPS.get(name, set())
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_typed_settings_are_those_that_are_shown(tmp_path):
    text = help_of("train", "model=small", "model.n_heads=3", "--help", tmp_path=tmp_path).stdout
    assert "  model.dim=384 " in text and "  model.n_heads=3 " in text and "  * model=small " in text
    assert "    model=nano " in text


def test_wrong_settings_are_refused(tmp_path):
    assert_refused(
        help_of("train", "model=nanoo", "--help", tmp_path=tmp_path), "there is no model=nanoo; did you mean"
    )


YAML = """# @package _global_
# What the file is for: more.
#   an example
defaults:
  - other: x
first: 1            # a comment
                    # that goes on
# not a comment of a key
second: {a: 1}      # of a group
third:
  inner: "a: #b"    # below
  deep:
    down: 2         # further # down
  back: null
last: 3
"""


def test_comments_belong_to_the_keys_of_their_lines(tmp_path):
    (tmp_path / "file.yaml").write_text(YAML)
    assert key_comments(tmp_path / "file.yaml") == {
        "first": "a comment that goes on",
        "second": "of a group",
        "third.inner": "below",
        "third.deep.down": "further # down",
    }


def test_a_page_of_a_small_program(tmp_path):
    (tmp_path / "train.yaml").write_text("seed: 0  # of all\n")
    (tmp_path / "main.yaml").write_text(f"size: 3  # of it\nname: ''  # {20 * 'word '}\nseed: 1\nhydra: {{}}\n")
    (tmp_path / "kind").mkdir()
    (tmp_path / "kind" / "a.yaml").write_text("# The first (Somebody et al. 2020). More.\nx: [1]  # of a\n")
    (tmp_path / "kind" / "b.yaml").write_text("# The second: more\ndefaults: [a, _self_]\nx: [2]\n")
    kind = {"x": [2], "_target_": "c.D"}
    cfg = {"size": 3, "name": "", "seed": 1, "kind": kind, "to": "${size}", "hydra": {"z": 1}}
    assert help_text("Does it.", tmp_path, "main", cfg, {"kind": "b"}).splitlines() == [
        "Does it.",
        "",
        "Keys (key=value)",
        "",
        f"  {'size=3':<44} of it",
        f"""  {'name=""':<44}""" + 14 * " word",
        " " * 46 + 6 * " word",
        f"  {'seed=1':<44} of all",
        f"  {'kind.x=[2]':<44} of a",
        "",
        "Groups (group=choice); * is chosen",
        "",
        f"  {'  kind=a':<44} The first (Somebody et al. 2020)",
        f"  {'* kind=b':<44} The second",
    ]
