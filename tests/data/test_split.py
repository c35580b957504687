"""Which part of a text is for validation:  python -m pytest tests/data/test_split.py"""

import json
import random
from itertools import combinations

import pytest

from tests.data.test_text import documents, write
from tril.data.sources.files import Files
from tril.data.split import Content, choose_val, split_text

WORDS = ["".join(random.Random(i).choices("bdfghklmnprstvz", k=9)) for i in range(400)]


def sentences(n, seed=0, k=60):
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(k, 2 * k))) + "\n" for _ in range(n)]


def test_a_split_has_the_wanted_size_and_no_document_that_shares_text_with_another():
    chance = random.Random(0)
    contents = sentences(60) + sentences(4, 9, k=2) * 2  # the last ones are equal, and shorter than a passage
    copied = chance.sample(range(60), 20)
    for i, j in zip(copied[::2], copied[1::2], strict=True):  # a passage, or all
        contents[i] = contents[j] if chance.random() < 0.3 else contents[i] + contents[j][:300]
    named = {f"{i}": Content.of(text) for i, text in enumerate(contents)}
    val = choose_val(named, 0.15)
    assert val and not val & {str(i) for i in (*copied, *range(60, 68))}
    share = sum(named[name].size for name in val) / sum(document.size for document in named.values())
    assert 0.1 < share < 0.225
    passages = [{text[i : i + 150] for i in range(len(text) - 149)} for text in contents]
    for i, j in combinations(range(60), 2):
        if str(i) in val or str(j) in val:
            assert not passages[i] & passages[j]
    more = choose_val(named | {"z" * 9: Content.of(sentences(1, 99)[0])}, 0.15)  # most of it stays
    assert len(val & more) >= 0.7 * len(val)


def test_where_all_share_text_the_end_of_each_document_is_for_validation(tmp_path):
    whole = "".join(f"line {i}\n" for i in range(100))
    write(tmp_path, {f"{name}.txt": whole for name in "abcd"})
    source = Files(path=str(tmp_path), val_fraction=0.1)
    (train, *_), (val, *_) = parts = [documents(source, split) for split in ("train", "val")]
    assert parts == [[train] * 4, [val] * 4] and train + val == whole and 0.08 < len(val) / len(whole) < 0.12


@pytest.mark.parametrize("text", ["sentence\n" * 111, "word " * 200, "é" * 500, "日" * 334])
def test_a_text_is_cut_at_a_line_a_word_or_a_character(text):
    before, after = split_text(text, 0.05)
    assert before + after == text and abs(len(after.encode()) - 50) <= 17
    assert not ("\n" in text and before[-1] != "\n") and not (" " in text and after[0] != " ")


def test_more_rows_than_are_compared_are_split_by_their_content(tmp_path, monkeypatch):
    monkeypatch.setattr("tril.data.split.MAX_DOCUMENTS", 50)
    rows = [f"row {i % 300}" for i in range(600)]
    written = [*rows, "half a pair \ud83d"]  # which no tokenizer reads
    write(tmp_path, {"rows.jsonl": "".join(json.dumps({"text": row}) + "\n" for row in written)})
    source = Files(path=str(tmp_path / "rows.jsonl"), val_fraction=0.2)
    train, val = (documents(source, split) for split in ("train", "val"))
    assert sorted(train + val) == sorted([*rows, "half a pair ?"]) and not set(train) & set(val) and 60 < len(val) < 180
