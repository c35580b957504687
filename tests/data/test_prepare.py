"""Prepared texts: bytes of the targets, the size of the vocabulary, damage, and processes that prepare at once."""

import math
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tril.data.config import parse
from tril.data.prepared import val_bytes_per_token

TEXT = "".join(random.Random(0).choices("abcde fgh\u00e9\u6f22\U0001f469\n", k=6000))


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    return {"source": "files", "path": str(tmp_path / "text.txt"), "cache_dir": str(tmp_path / "cache")}


def prepared(settings, **changed):
    return parse(settings | changed).prepare().texts[""]


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
@pytest.mark.parametrize("first", ["a", "\u00e9", "\u6f22"])
def test_the_bytes_of_all_targets_are_those_of_their_tokens(settings, tmp_path, kind, first):
    """The first token of the validation part is no target; of kind "byte" it ends within a character."""
    (tmp_path / "val.txt").write_text(first + TEXT, "utf-8")
    text = prepared(settings, val_path=str(tmp_path / "val.txt"), tokenizer={"kind": kind})
    ids = text.tokens("val").tolist()
    names = [text.tokenizer.id_to_token(i) for i in ids[1:-1]]  # without end-of-text
    expected = sum(len(name.encode()) for name in names) if kind == "char" else sum(map(len, names))
    assert text.val_bytes(len(ids) - 1) == expected
    assert val_bytes_per_token(text.meta) == expected / (len(ids) - 1)


@pytest.mark.parametrize(("n_bytes", "size"), [(0, 257), (5_120, 266), (46_000, 345), (1 << 20, 2304), (3 << 20, 4096)])
def test_the_vocabulary_follows_the_size_of_the_text(n_bytes, size):
    from tril.data.tokenizer import _auto_vocab_size

    texts = [char * math.ceil(n_bytes / 8) for char in "abcd\u00e9\u00e9"][: n_bytes and 6]  # \u00e9 has two bytes
    found, same = _auto_vocab_size(iter(texts))
    assert found == size and list(same) == texts


def test_a_changed_byte_anywhere_in_the_cache_is_noticed(settings, caplog):
    text = prepared(settings, tokenizer={"kind": "byte"})
    before = {path.name: path.read_bytes() for path in text.folder.iterdir()}
    chance = random.Random(0)
    for name, content in before.items():
        for position in [0, len(content) - 2, *chance.choices(range(len(content)), k=6)]:
            changed = bytearray(content)
            changed[position] ^= 1 << chance.randrange(5)
            (text.folder / name).write_bytes(changed)
            caplog.clear()
            again = prepared(settings, tokenizer={"kind": "byte"})
            assert "is damaged (" in caplog.text, (name, position)
            assert (again.tokens("train") == text.tokens("train")).all()
    (text.folder / "tokens.bin").unlink()
    assert prepared(settings, tokenizer={"kind": "byte"}).tokens("val").tolist()[-1] == 0


def test_processes_that_start_at_once_prepare_once(settings):
    code = f"from tril.data.config import parse; print(parse({settings}).prepare().texts[''].meta['created'])"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {process.communicate(timeout=120)[0] for process in processes}
    assert len(outputs) == 1 and all(process.returncode == 0 for process in processes)
    assert [path.name[:6] for path in Path(settings["cache_dir"]).iterdir()] == ["files-"]  # no lock is left


def test_a_budget_ends_a_part_with_the_piece_that_reaches_it(settings, tmp_path):
    lines = "".join(f"{i:015}\n" for i in range(100_000))  # 16 bytes each; a piece has 2^18 characters
    (tmp_path / "text.txt").write_text(lines)
    budgets = {"token_budget": 300_000, "val_token_budget": 5}
    text = prepared(settings, tokenizer={"kind": "byte"}, **budgets)
    n_train = 2 * ((1 << 18) + 16)  # to the end of a line
    assert [len(text.tokens(split)) for split in ("train", "val")] == [n_train, len(lines) // 20 + 1]
    assert text.tokenizer.decode(text.tokens("train").tolist()) == lines[:n_train]


def test_what_changes_the_tokens_changes_the_fingerprint(settings, tmp_path):
    (tmp_path / "other.txt").write_text(TEXT + "b")
    changes = [{}, {"val_fraction": 0.1}, {"tokenizer": {"kind": "char"}}, {"tokenizer": {"vocab_size": 300}}]
    changes += [{"token_budget": 1000}, {"path": str(tmp_path / "other.txt")}]
    found = {prepared(settings, **change).meta["fingerprint"] for change in changes}
    assert len(found) == len(changes)
    same = [{"batch_size": 3}, {"document_mask": True}, {"tokenizer": {"vocab_size": None}}]
    assert {prepared(settings, **change).meta["fingerprint"] for change in same} < found


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_one_line_states_the_split_and_the_overlap_once(settings, tmp_path, capsys, share):
    words = [f"{i} {i * i % 997}\n" for i in range(3000)]
    (tmp_path / "text.txt").write_text("".join(words))
    val = [f"new {i} {i * i % 991}\n" for i in range(1000)]
    (tmp_path / "val.txt").write_text("".join([*words[: int(1000 * share)], *val]))
    for _ in range(2):
        text = prepared(settings, val_path=str(tmp_path / "val.txt"), tokenizer={"kind": "byte"})
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1 and "(data.val_path)" in lines[0]
    assert ("% of its tokens" in lines[0]) == (share > 0) == (text.meta["overlap"]["share"] > 0)


def test_documents_are_separated_by_their_first_tokens(tmp_path, settings):
    for name in "abc":
        (tmp_path / f"{name}.md").write_text(name * 50)
    text = prepared(settings, path=f"{tmp_path}/[ab].md", val_path=f"{tmp_path}/c.md", tokenizer={"kind": "byte"})
    ids, documents = text.tokens("train").tolist(), text.documents("train").tolist()
    assert documents == [0] * 50 + [1] * 51 + [2]
    assert [i for i, (a, b) in enumerate(pairwise(documents)) if a != b] == [i - 1 for i in (50, 101)]
    assert ids == [*text.tokenizer.encode("a" * 50).ids, 0, *text.tokenizer.encode("b" * 50).ids, 0]
