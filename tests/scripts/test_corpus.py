"""scripts/corpus.py: its tables, its file, and what it refuses."""

import re

import pytest

from tests.calls import call
from tests.conftest import assert_refused
from tril.model.causality import corpus
from tril.model.causality.corpus.scoring import Finding
from tril.scripts.cli.checkers import CHECKERS
from tril.scripts.corpus import main, wrong_verdicts

ENTRIES = {entry.name: entry for entry in corpus.entries()}
FOUR = "only=[no_mask,mask_open_at_one_boundary,lstm,encoder]"
REPORT = """\
| checker      | leaks caught | place right | false alarms | no verdict | seconds |
|--------------|-------------:|------------:|-------------:|-----------:|--------:|
| last_token   |       1 of 2 |      0 of 1 |       1 of 2 |          0 |     0.0 |
| one_gradient |       1 of 2 |      0 of 1 |       1 of 2 |          0 |     0.0 |

| family                        | kind    | entries | last_token | one_gradient |
|-------------------------------|---------|--------:|-----------:|-------------:|
| masks                         | leaks   |       2 |          1 |            1 |
| look-alike: recurrent         | correct |       1 |          0 |            0 |
| look-alike: attention pattern | correct |       1 |          1 |            1 |

- last_token, missed: mask_open_at_one_boundary
- last_token, false alarms: encoder
- one_gradient, missed: mask_open_at_one_boundary
- one_gradient, false alarms: encoder
"""


def test_report(tmp_path):
    done = call(main, FOUR, "checkers=[last_token,one_gradient]", "out=scores", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "scores" / "corpus.md").read_text(encoding="utf-8")
    assert re.sub(r"\d+\.\d \|$", "0.0 |", text, flags=re.MULTILINE) == REPORT
    assert "last_token 1 of 2 0 of 1 1 of 2 0 " in re.sub(" +", " ", done.stdout)
    assert "last_token, missed: mask_open_at_one_boundary\n" in done.stdout


def test_wrong_verdicts_name_what_the_checker_said():
    findings = {
        "a": [
            (ENTRIES["no_mask"], Finding(True, "blocks.1")),
            (ENTRIES["mask_inverted"], Finding(True)),
            (ENTRIES["mask_transposed"], Finding(None, error="ValueError: no")),
            (ENTRIES["mask_off_by_one"], Finding(False)),
            (ENTRIES["mask_of_blocks"], Finding(False)),
        ]
    }
    assert wrong_verdicts(findings, 1) == [
        "a, missed: mask_off_by_one and 1 more",
        "a, wrong place: no_mask (blocks.1)",
        "a, no verdict: mask_transposed (ValueError: no)",
    ]
    assert wrong_verdicts(findings, None)[0] == "a, missed: mask_off_by_one, mask_of_blocks"


def test_any_checker_can_be_scored(tmp_path, monkeypatch):
    monkeypatch.setitem(CHECKERS, "oracle", lambda entry: Finding(entry.leaks, entry.place))
    done = call(main, "checkers=[oracle]", "families=[windows]", cwd=tmp_path)
    assert done.stdout.splitlines()[1].split()[:10] == ["oracle", *"5 of 5 5 of 5 0 of 0".split()]
    assert len(done.stdout.splitlines()) == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkers=[last_tokens]"], "there is no checker last_tokens; did you mean last_token?"),
        (["checkers=[]"], "checkers"),
        (["families=[lenght]"], "families='lenght' is not in the corpus; use any of cache, "),
        (["only=[nomask]"], "only='nomask' is not in the corpus; use any of "),
        (["families=[length]", "only=[lstm]"], "no entry has one of these families and one of these names"),
        (["out=file/below"], "cannot write to file/below"),
    ],
)
def test_wrong_settings(overrides, message, tmp_path):
    (tmp_path / "file").touch()
    assert_refused(call(main, *overrides, cwd=tmp_path), message)
