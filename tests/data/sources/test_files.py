"""The user's files: what is read, how it is split, and what is refused."""

import gzip
import json
import random
import time
from itertools import combinations

import pytest

from tests.data.sources.reading import documents
from tril.data.config import parse
from tril.data.sources.files import Files
from tril.data.sources.split import Content, choose_val, split_text

WORDS = ["".join(random.Random(i).choices("bdfghklmnprstvz", k=9)) for i in range(400)]


def texts(n, seed=0, k=60):
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(k, 2 * k))) + "\n" for _ in range(n)]


@pytest.mark.parametrize("name", ["a.py", "notes", "b.txt.gz", ".hidden.cfg"])
def test_utf8_text_of_any_name_is_read(tmp_path, name):
    content = "\ufeffdef f():\r\n    return 'é'\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    source = Files(path=str(tmp_path / name))
    joined = "".join(piece.text for split in ("train", "val") for piece in source.pieces(split))
    assert joined == content.decode("utf-8-sig")


@pytest.mark.parametrize(
    "content", ["é".encode("latin-1"), b"a\0b", b"\x89PNG\r\n" + bytes(range(256)), b"\xff\xfea\0"]
)
def test_other_encodings_and_binary_files_are_refused(tmp_path, content):
    (tmp_path / "good.txt").write_text("good text\n" * 9)
    (tmp_path / "bad.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad.bin is not UTF-8 text .*choose the files with a glob") as error:
        list(Files(path=str(tmp_path)).pieces("train"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", range(4))
def test_a_split_has_the_wanted_size_and_no_document_that_shares_text_with_another(seed):
    chance = random.Random(seed)
    contents = texts(60, seed)
    copied = chance.sample(range(60), 20)
    for i, j in zip(copied[::2], copied[1::2], strict=True):  # a passage, or all
        contents[i] = contents[j] if chance.random() < 0.3 else contents[i] + contents[j][:300]
    named = {f"{i}": Content(text) for i, text in enumerate(contents)}
    val = choose_val(named, 0.15)
    assert val
    share = sum(named[name].size for name in val) / sum(document.size for document in named.values())
    assert 0.1 < share < 0.225 and not val & {str(i) for i in copied}
    passages = [{text[i : i + 150] for i in range(len(text) - 149)} for text in contents]
    for i, j in combinations(range(60), 2):
        if str(i) in val or str(j) in val:
            assert not passages[i] & passages[j]
    more = choose_val(named | {"z" * 9: Content(texts(1, 99)[0])}, 0.15)  # most of it stays
    assert len(val & more) >= 0.7 * len(val)


def test_where_all_share_text_the_end_of_each_document_is_for_validation(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text("".join(f"line {i}\n" for i in range(100)))
    source = Files(path=str(tmp_path), val_fraction=0.1)
    train, val = ("".join(piece.text for piece in source.pieces(split)) for split in ("train", "val"))
    whole = "".join(f"line {i}\n" for i in range(100))
    assert (train, val) == (whole[: len(train) // 4] * 4, whole[len(train) // 4 :] * 4)
    assert 0.08 < len(val) / 3160 < 0.12
    assert source.split_rule.startswith("the end of each of 4 documents")


@pytest.mark.parametrize("text", ["a\n" * 500, "word " * 200, "x" * 1000, "é" * 500, "日" * 334])
def test_a_text_is_cut_at_a_line_a_word_or_a_character(text):
    before, after = split_text(text, 0.05)
    assert before + after == text and abs(len(after.encode()) - 50) <= 17
    assert not ("\n" in text and before[-1] != "\n") and not (" " in text and after[0] != " ")


def test_more_rows_than_are_compared_are_split_by_their_content(tmp_path, monkeypatch):
    monkeypatch.setattr("tril.data.sources.split.MAX_DOCUMENTS", 50)
    rows = [f"row {i % 300}" for i in range(600)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    source = Files(path=str(tmp_path / "rows.jsonl"), val_fraction=0.2)
    train, val = (documents(source, split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(rows) and not set(train) & set(val) and 60 < len(val) < 180
    assert source.split_rule == "rows by a hash of their content"


def test_the_files_of_a_pattern(tmp_path):
    for name in ("a.txt", "b.md", "n/c.txt", "n/m/d.txt", ".git/e.txt", "n/.f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "n" / "loop").symlink_to(tmp_path)

    def names(pattern):
        return [path.relative_to(tmp_path).as_posix() for _, path in Files(path=pattern).files["train"]]

    assert names(f"{tmp_path}/**/*.txt") == ["a.txt", "n/c.txt", "n/m/d.txt"]
    assert names(str(tmp_path)) == names(f"{tmp_path}/**") == ["a.txt", "b.md", "n/c.txt", "n/m/d.txt"]
    assert names([f"{tmp_path}/n/*.txt", f"{tmp_path}/b.md"]) == ["b.md", "n/c.txt"]
    with pytest.raises(OSError, match="matches no file"):
        names(f"{tmp_path}/*.rst")


HANG = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROW = "{% set n = namespace(x='abcdefgh') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"


@pytest.mark.parametrize("template", [HANG, GROW, "{{ 'a' * 99999999999 }}"])
def test_a_chat_template_without_end_is_refused(tmp_path, template):
    (tmp_path / "template.jinja").write_text(template)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"template.jinja takes more than 5 s or 1 GB"):
        Files(path=str(tmp_path / "chat.jsonl"), format="chat", chat_template=str(tmp_path / "template.jinja"))
    assert time.monotonic() - began < 30


def test_a_chat_template_without_answers_is_refused(tmp_path):
    (tmp_path / "template.jinja").write_text("{{ messages[0].content }}")
    rows = [json.dumps({"prompt": text, "response": "b"}) for text in texts(9)]
    (tmp_path / "chat.jsonl").write_text("\n".join(rows))
    files = {"path": str(tmp_path / "chat.jsonl"), "format": "chat", "chat_template": str(tmp_path / "template.jinja")}
    config = parse({"source": "files", "val_fraction": 0.3, "cache_dir": str(tmp_path / "cache"), **files})
    with pytest.raises(ValueError, match="has no answer to train on; choose another data.chat_template"):
        config.prepare()


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        ("a.json", "[", {}, "a.json, row 1 cannot be read"),
        ("a.jsonl", '{"text": "a"}\n\n{', {}, "a.jsonl, line 3 cannot be read"),
        ("a.csv", 'text\n"x', {}, "a.csv, row 1 cannot be read"),
        ("a.jsonl", '{"other": 1}', {}, "a.jsonl, line 1 has no field 'text'; .* other"),
        ("a.jsonl", '{"text": 1}', {}, "field 'text' holds int, not text"),
        ("a.jsonl", "1", {}, "line 1 is 1; a row is a JSON object"),
        ("a.parquet", "PAR1", {}, "a.parquet is damaged"),
        ("a.txt.gz", "no gzip", {}, "a.txt.gz is damaged"),
        ("a.txt", "a" * 99, {}, "a.txt has more than 64 bytes, and is read as a whole; split it"),
        ("a.json", '{"text": "' + "a" * 99 + '"}', {}, "a.json has more than 64 bytes, and is read as a whole"),
        ("a.txt", "a", {"text_field": "body"}, "text_field=body has no effect on text files, which have no rows"),
        ("a.txt", "a", {"format": "chat"}, "format=chat needs files of rows, such as .jsonl"),
        ("a.txt", "a", {"val_path": "{}/a.txt"}, "matches every file of data.path"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(tmp_path, monkeypatch, name, content, settings, message):
    monkeypatch.setattr("tril.data.sources.formats.LIMIT", 64)
    (tmp_path / name).write_text(content)
    settings = {key: value.replace("{}", str(tmp_path)) for key, value in settings.items()}
    with pytest.raises(ValueError, match=message) as error:
        list(Files(path=str(tmp_path / name), **settings).pieces("train"))
    assert settings or "\n" not in str(error.value)  # pydantic's own text of an error has several lines
