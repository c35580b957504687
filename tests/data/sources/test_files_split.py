"""The split of a user's own files: near the fraction, copies on one side, and a rule that is told."""

import gzip
import json
import os
import random
import shutil
import sys

import pytest

from tests.data.sources.reading import documents, text_of
from tril.data.sources import file_plan as module
from tril.data.sources.files import Files

WORDS = [f"{a}{b}{c}" for a in ("ka", "lo", "mi", "su") for b in ("ren", "tal", "vo", "x") for c in ("da", "é", "um")]


def line(randomness, n_words=9):
    return " ".join(randomness.choices(WORDS, k=n_words)) + "\n"


def note(i, n_lines=None):
    randomness = random.Random(i)
    n_lines = n_lines or randomness.randint(4, 15)
    return "".join(line(randomness) for _ in range(n_lines))


def write(folder, texts):
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", newline="")
    return str(folder)


def val_share(source):
    train, val = (len(text_of(source, split).encode()) for split in ("train", "val"))
    return val / (train + val)


def assert_complete(source, texts):
    """Every text is in one part, whole."""
    assert sorted(documents(source, "train") + documents(source, "val")) == sorted(texts)


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.2])
def test_300_notes_are_split_by_file(tmp_path, fraction):
    notes = {f"{i % 7}/{i:03d}.md": note(i) for i in range(300)}
    source = Files(path=write(tmp_path, notes), val_fraction=fraction)
    assert_complete(source, notes.values())
    assert fraction / 1.5 <= val_share(source) <= fraction * 1.5
    n_val = len(documents(source, "val"))
    assert source.split_rule == f"{n_val} of 300 documents, copies and near-copies on one side"
    (tmp_path / "0").rename(tmp_path / "0 ")  # other names, other hashes
    assert documents(Files(path=str(tmp_path), val_fraction=fraction), "val") != documents(source, "val")


def test_notes_that_grow_keep_their_fraction_and_most_of_them_their_side(tmp_path):
    notes = {f"{i:03d}.md": note(i) for i in range(300)}
    before = set(documents(Files(path=write(tmp_path, notes)), "val"))
    names = {name for name, text in notes.items() if text in before}
    for i in range(0, 300, 10):
        notes[f"{i:03d}.md"] += note(1000 + i, 20)
    source = Files(path=write(tmp_path, notes))
    assert_complete(source, notes.values())
    assert 0.05 / 1.5 <= val_share(source) <= 0.05 * 1.5
    val = set(documents(source, "val"))
    kept = {name for name, text in notes.items() if text in val}
    assert len(kept & names) >= 0.7 * len(names)


def test_versions_of_a_note_are_on_one_side(tmp_path):
    versions = {f"{i:03d} v{j}.md": note(i, 6 * (j + 1)) for i in range(100) for j in range(3)}
    source = Files(path=write(tmp_path, versions), val_fraction=0.1)
    val = set(documents(source, "val"))
    sides = [{versions[f"{i:03d} v{j}.md"] in val for j in range(3)} for i in range(100)]
    assert all(len(side) == 1 for side in sides) and 5 <= len(val) / 3 <= 15


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_copied_rows_are_on_one_side(tmp_path, suffix):
    rows = [note(i, 1).strip() for i in range(1000)]
    rows += rows[:500]
    random.Random(0).shuffle(rows)
    write_rows(tmp_path / f"a.{suffix}", rows)
    source = Files(path=str(tmp_path), val_fraction=0.1)
    train, val = documents(source, "train"), documents(source, "val")
    assert sorted(train + val) == sorted(rows) and not set(train) & set(val)
    assert 0.1 / 1.5 <= val_share(source) <= 0.15


def test_many_rows_are_split_by_their_content(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_DOCUMENTS", 999)
    rows = [note(i, 1).strip() for i in range(1000)]
    rows += [f" {row}\n" for row in rows[:500]]
    write_rows(tmp_path / "a.jsonl", rows)
    source = Files(path=str(tmp_path), val_fraction=0.1)
    train, val = documents(source, "train"), documents(source, "val")
    assert sorted(train + val) == sorted(rows) and not {row.strip() for row in train} & {row.strip() for row in val}
    assert 0.1 / 1.5 <= val_share(source) <= 0.15
    assert source.split_rule == "rows by a hash of their content"
    (tmp_path / "b.txt").write_text(note(0, 100))
    mixed = Files(path=str(tmp_path), val_fraction=0.1)
    assert note(0, 100).startswith(documents(mixed, "train")[-1]) and note(0, 100).endswith(documents(mixed, "val")[-1])
    assert mixed.split_rule == "rows by a hash of their content; the end of each text file"


def write_rows(path, rows):
    if path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path)
        return
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": row}) + "\n" for row in rows)


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need privileges")
def test_copied_and_linked_files_are_on_one_side(tmp_path):
    notes = {f"{i:03d}.txt": note(i) for i in range(100)}
    write(tmp_path, notes)
    for i in range(0, 100, 2):
        os.symlink(tmp_path / f"{i:03d}.txt", tmp_path / f"link {i:03d}.txt")
    for i in range(0, 100, 3):
        shutil.copy(tmp_path / f"{i:03d}.txt", tmp_path / f"copy {i:03d}.txt")
    for i in range(0, 100, 5):
        with gzip.open(tmp_path / f"packed {i:03d}.txt.gz", "wb") as file:
            file.write(notes[f"{i:03d}.txt"].encode())
    source = Files(path=str(tmp_path), val_fraction=0.1)
    train, val = documents(source, "train"), documents(source, "val")
    assert len(train) + len(val) == 100 + 50 + 34 + 20 and not set(train) & set(val)
    assert 0.1 / 1.5 <= val_share(source) <= 0.15


@pytest.mark.parametrize("ending", ["txt", "txt.gz", "jsonl"])
@pytest.mark.parametrize(
    "text", ["word " * 40_000, "漢字" * 20_000, "x" * 100_000], ids=["words", "no blanks", "no end"]
)
def test_a_text_of_one_line_is_cut_near_the_fraction(tmp_path, ending, text):
    opener = gzip.open if ending.endswith(".gz") else open
    with opener(tmp_path / f"a.{ending}", "wb") as file:
        file.write(json.dumps({"text": text}).encode() if ending == "jsonl" else text.encode())
    source = Files(path=str(tmp_path))
    train, val = text_of(source, "train"), text_of(source, "val")
    assert train + val == text
    assert abs(val_share(source) - 0.05) < 1e-4
    if "word" in text:
        assert train.endswith("word") and val.startswith(" word")
    assert source.split_rule == "the end of the text"


def test_few_files_are_split_by_position_in_each(tmp_path):
    texts = {f"{i}.txt": note(i, 200) for i in range(4)}
    source = Files(path=write(tmp_path, texts))
    train, val = documents(source, "train"), documents(source, "val")
    assert [a + b for a, b in zip(train, val, strict=True)] == list(texts.values())
    assert all(part.endswith("\n") for part in train)
    assert 0.05 / 1.5 <= val_share(source) <= 0.05 * 1.5
    assert source.split_rule == "the end of each of 4 documents (whole ones would miss it by a factor of 1.5)"


def test_one_large_file_among_notes_does_not_decide_alone(tmp_path):
    texts = {"large.txt": note(0, 5000)} | {f"{i}.txt": note(i, 10) for i in range(1, 100)}
    source = Files(path=write(tmp_path, texts))
    assert 0.05 / 1.5 <= val_share(source) <= 0.05 * 1.5
    assert documents(source, "train").count(texts["large.txt"]) == 1
    assert source.split_rule.endswith("on one side")


def test_a_mixed_folder(tmp_path):
    texts = {f"{i:03d}.txt": note(i) for i in range(100)}
    write(tmp_path, texts)
    rows = [note(1000 + i, 3) for i in range(200)] + [texts["007.txt"]]  # a note that is also a row
    write_rows(tmp_path / "rows.jsonl", rows)
    source = Files(path=str(tmp_path), val_fraction=0.1)
    assert_complete(source, [*texts.values(), *rows])
    assert 0.1 / 1.5 <= val_share(source) <= 0.15
    val = documents(source, "val")
    assert val.count(texts["007.txt"]) in (0, 2)
    assert {text in set(rows) for text in val} == {True, False}  # of both kinds


def test_the_split_rule_names_val_path(tmp_path):
    write(tmp_path, {"a.txt": "a", "b.txt": "b"})
    source = Files(path=str(tmp_path / "a.txt"), val_path=str(tmp_path / "b.txt"))
    assert source.split_rule == "data.val_path"
