"""evaluate.py pairs=FILE: the accuracy of a model with known losses, and lines that are refused."""

import json
import math

import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.checkpoint import load, save
from tril.model.generation.language_model import LanguageModel
from tril.scripts.evaluate import main

T = 12  # context length of tiny_gpt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model of bytes, and a uniform one, which prefers the shorter text."""
    folder = tmp_path_factory.mktemp("pairs")
    model = tiny_gpt(vocab_size=320)
    save(folder / "random.ckpt", LanguageModel(model, build(TokenizerConfig(kind="byte"), ())))
    torch.nn.init.zeros_(model.head.weight)
    save(folder / "uniform.ckpt", LanguageModel(model, build(TokenizerConfig(kind="byte"), ())))
    return folder


def write(folder, lines, name="pairs.jsonl"):
    (folder / name).write_text("\n".join(lines), encoding="utf-8")


def pair(good, bad, **others):
    return json.dumps({"good": good, "bad": bad} | others)


def test_a_uniform_model_prefers_the_shorter_text_and_ties_are_wrong(folder, tmp_path):
    lines = [pair("ab", "abc", field="syntax"), "", pair("abc", "ab"), pair("ab", "ba"), pair("x", "\u00e9")]
    write(folder, [*lines, ""])
    done = call(main, "ckpt=uniform.ckpt", "pairs=pairs.jsonl", f"out={tmp_path}", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "pairs.json").read_text())
    assert (found["pairs"], found["right"], found["ties"], found["accuracy"]["mean"]) == (4, 2, 1, 0.5)
    assert [row["line"] for row in found["nats"]] == [1, 3, 4, 5]
    lengths = [[2, 3], [3, 2], [2, 2], [1, 2]]
    nats = [n * math.log(320) for row in lengths for n in row]
    assert [x for row in found["nats"] for x in (row["good"], row["bad"])] == pytest.approx(nats, abs=1e-5)
    assert "accuracy 0.5000 [0.1500, 0.8500] (95 %, Wilson)" in done.stdout  # by the formula for 2 of 4
    assert "1 tie, counted as wrong" in done.stdout and list(tmp_path.iterdir()) == [tmp_path / "pairs.json"]


def test_each_text_is_scored_after_end_of_text(folder, tmp_path):
    texts = [("one", "two"), ("a" * T, "b" * T), ("x<", "\u6f22")]
    write(folder, [pair(*texts[i % 3]) for i in range(70)])  # several batches
    done = call(main, "ckpt=random.ckpt", "pairs=pairs.jsonl", f"out={tmp_path}", cwd=folder)
    assert done.returncode == 0, done.stderr
    lm, rows = load(folder / "random.ckpt"), json.loads((tmp_path / "pairs.json").read_text())["nats"]
    assert len(rows) == 70
    for row, names in zip(rows, (texts[i % 3] for i in range(70)), strict=True):
        for key, text in zip(("good", "bad"), names, strict=True):
            ids = torch.tensor([lm.eot_id, *lm.tokenizer.encode(text).ids])
            with torch.no_grad():
                log_p = lm.model(ids[None, :-1])[0].double().log_softmax(-1)
            assert row[key] == pytest.approx(-log_p[range(len(ids) - 1), ids[1:]].sum().item(), abs=1e-3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([pair("a", "b"), "{"], "pairs=bad.jsonl: line 2 must be {"),
        ([pair("a", "b"), "", '{"good": "a"}'], "line 3 must be {"),
        ([pair("a", 3)], "line 1 must be {"),
        ([pair("", "b")], "line 1 must be {"),
        ([pair("a", "a")], "line 1 must be {"),
        (["[" * 100_000], "line 1 must be {"),
        (["", " "], "pairs=bad.jsonl holds no pair; each line must be {"),
        ([pair("a", "b"), pair("a" * (T + 1), "b")], "line 2: a text of 13 tokens exceeds the context length, 12"),
    ],
)
def test_wrong_lines_are_named(folder, lines, message):
    write(folder, lines, "bad.jsonl")
    before = set(folder.iterdir())
    assert_refused(call(main, "ckpt=random.ckpt", "pairs=bad.jsonl", cwd=folder), message)
    assert set(folder.iterdir()) == before


def test_unknown_characters_are_named(folder, tmp_path):
    save(tmp_path / "x.ckpt", LanguageModel(tiny_gpt(), build(TokenizerConfig(kind="char"), [["abc"]])))
    write(tmp_path, [pair("ab", "bc"), pair("ab", "az")])
    done = call(main, "ckpt=x.ckpt", "pairs=pairs.jsonl", cwd=tmp_path)
    assert_refused(done, "pairs=pairs.jsonl: line 2: the prompt has 'z', which the tokenizer does not know")
