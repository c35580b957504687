"""Sources: which text, in which part, in what pieces, and when they are the same."""

import gzip
import hashlib
import http.server
import json
import sysconfig
import threading
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest

from data import files, sources
from data.files import Files
from data.sources import Piece, Shakespeare, StandardLibrary, cut, digest_files, in_split


def text_of(source, split):
    return "".join(piece.text for piece in source.pieces(split))


def documents(source, split):
    found = [""]
    for piece in source.pieces(split):
        found[-1] += piece.text
        if piece.ends_document:
            found.append("")
    assert found.pop() == ""
    return found


def test_cut_keeps_every_character_and_ends_at_lines(monkeypatch):
    monkeypatch.setattr(sources, "PIECE_SIZE", 5)
    assert list(cut("ab\ncd\nefghijkl\n")) == [
        Piece("ab\n", False), Piece("cd\n", False), Piece("efghi", False), Piece("jkl\n", True)
    ]  # fmt: skip
    assert list(cut("", True)) == []
    assert list(cut("abcde", False)) == [Piece("abcde", False)]


def test_hash_split_is_fixed_and_has_the_right_share():
    # the definition, spelled out once more
    share = int.from_bytes(hashlib.sha256(b"abc.py").digest()[:8], "big") / 2**64
    assert in_split("abc.py", "val", share + 1e-9) and not in_split("abc.py", "val", share - 1e-9)
    val = [str(i) for i in range(20_000) if in_split(str(i), "val", 0.05)]
    assert abs(len(val) - 1000) < 5 * 31  # five standard deviations of a binomial
    assert not any(in_split(key, "train", 0.05) for key in val)


def test_standard_library_reads_every_module_once_and_no_tests(tmp_path, monkeypatch):
    kept = {"a.py": "a", "pkg/b.py": "b\r\n", "pkg/latin.py": "caf\ufffd"}
    for name, text in kept.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode() if "latin" not in name else b"caf\xe9")
    for name in ("test/t.py", "pkg/tests/t.py", "idle_test/t.py", "site-packages/s.py", "config-3.11/c.py", "lib-dynload/l.py", "n.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("never")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    source = StandardLibrary(val_fraction=0.5)
    assert [name for name, _ in source.files()] == sorted(kept)
    assert sorted(documents(source, "train") + documents(source, "val")) == sorted(kept.values())
    before = source.fingerprint()
    assert before == StandardLibrary(val_fraction=0.5).fingerprint() != StandardLibrary(val_fraction=0.4).fingerprint()
    (tmp_path / "a.py").write_text("A")
    assert source.fingerprint() != before


def test_this_standard_library_is_about_what_the_readme_says():
    source = StandardLibrary()
    train, val = (sum(len(piece.text) for piece in source.pieces(split)) for split in ("train", "val"))
    assert 8e6 < train + val < 30e6
    assert 0.02 < val / (train + val) < 0.10


def test_shakespeare_splits_by_position(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(999)) + "é\n"
    (tmp_path / "t.txt").write_text(text, encoding="utf-8", newline="")
    source = Shakespeare(path=str(tmp_path / "t.txt"))
    assert text_of(source, "train") == text[: int(1001 * 0.9)]
    assert text_of(source, "val") == text[int(1001 * 0.9) :]
    assert not any(piece.ends_document for split in ("train", "val") for piece in source.pieces(split))


@pytest.fixture
def server():
    """A web server on this machine that answers every request with its `content`, or 404 when that is None."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.requests += 1
            self.send_response(200 if self.server.content is not None else 404)
            self.end_headers()
            self.wfile.write(self.server.content or b"")

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.content, server.requests = b"To be, or not\n", 0
        server.url = f"http://127.0.0.1:{server.server_port}/input.txt"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_shakespeare_is_downloaded_once_and_checked(server, tmp_path):
    right = hashlib.sha256(server.content).hexdigest()
    source = Shakespeare(url=server.url, sha256=right, cache_dir=str(tmp_path))
    assert text_of(source, "train") + text_of(source, "val") == "To be, or not\n"
    assert source.fingerprint()["sha256"] == right
    assert server.requests == 1
    with pytest.raises(OSError, match="has changed.*data.path=FILE"):
        Shakespeare(url=server.url + "?other", sha256="0" * 64, cache_dir=str(tmp_path)).fingerprint()
    assert len(list(tmp_path.iterdir())) == 1  # nothing is left of the wrong one


@pytest.mark.parametrize("trouble", ["404", "nobody there", "no address"])
def test_failed_download_is_one_clear_line(server, tmp_path, trouble):
    server.content = None
    url = {"404": server.url, "nobody there": "http://127.0.0.1:1/x", "no address": "input.txt"}[trouble]
    with pytest.raises(OSError, match="cannot download.*data.path=FILE") as error:
        Shakespeare(url=url, cache_dir=str(tmp_path)).fingerprint()
    assert "\n" not in str(error.value) and url in str(error.value)


@pytest.mark.parametrize("ending", [".txt", ".md", ".txt.gz"])
@pytest.mark.parametrize("piece_size", [4, 1 << 18])
def test_text_files_are_split_at_a_line_start(tmp_path, monkeypatch, ending, piece_size):
    monkeypatch.setattr(files, "PIECE_SIZE", piece_size)
    lines = [f"{i:03d} é\r\n" for i in range(100)]  # 8 bytes each
    opener = gzip.open if ending.endswith(".gz") else open
    with opener(tmp_path / f"a{ending}", "wb") as file:
        file.write("".join(lines).encode())
    source = Files(path=str(tmp_path), val_fraction=0.1)
    assert documents(source, "train") == ["".join(lines[:90])]
    assert documents(source, "val") == ["".join(lines[90:])]
    assert documents(Files(path=str(tmp_path), val_fraction=0.101), "val") == ["".join(lines[90:])]  # inside line 89: the next start


def test_rows_of_json_lines_and_parquet_are_documents(tmp_path):
    texts = [f"row {i}\nwith two lines" for i in range(200)]
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "id": list(range(200))}), tmp_path / "b.parquet")
    for name in ("a.jsonl.gz", "b.parquet"):
        source = Files(path=str(tmp_path / name), val_fraction=0.2)
        train, val = documents(source, "train"), documents(source, "val")
        assert sorted(train + val) == sorted(texts)
        assert 10 < len(val) < 80
        assert train == [text for text in texts if text in set(train)]  # in their order


def test_pieces_of_a_text_file_end_at_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_SIZE", 6)
    (tmp_path / "a.txt").write_text("abc\ndefg\nhijklmnopqrstuvwxyz\nend\n")
    pieces = [piece.text for piece in Files(path=str(tmp_path), val_fraction=0.1).pieces("train")]
    assert pieces == ["abc\ndefg\n", "hijklmnopqrs", "tuvwxyz\n"]


def test_own_validation_files(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/a.txt").write_text("one\ntwo\n")
    (tmp_path / "val.txt").write_text("three\n")
    source = Files(path=str(tmp_path / "train/*.txt"), val_path=str(tmp_path / "val.txt"))
    assert (documents(source, "train"), documents(source, "val")) == (["one\ntwo\n"], ["three\n"])
    assert source.fingerprint() != Files(path=str(tmp_path / "train/*.txt")).fingerprint()
    (tmp_path / "val.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(50)))
    source = Files(path=str(tmp_path / "train/*.txt"), val_path=str(tmp_path / "val.jsonl"), val_fraction=0.5)
    assert documents(source, "val") == [str(i) for i in range(50)]


def test_fingerprint_follows_content_and_not_place(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("same\n")
    x, y = (Files(path=str(tmp_path / folder)) for folder in "xy")
    assert x.fingerprint() == y.fingerprint()
    (tmp_path / "y/a.txt").write_text("sane\n")
    assert x.fingerprint() != y.fingerprint()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", b"x", r"cannot read .*a\.pdf; legal endings are \.txt"),
        ("a.txt", b"caf\xe9\n" * 9, "a.txt is not UTF-8.*iconv"),
        ("a.jsonl", b'{"text": "x"}\n{"tex\n', "line 2: not json"),
        ("a.jsonl", b"[1]\n", "line 1: a json object is needed"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "no field 'text'; there are body, id: choose one with data.text_field"),
        ("a.jsonl", b'{"text": 5}\n', "'text' holds int, not text"),
        ("a.parquet", b"PAR?", "no parquet file"),
    ],
)
def test_unreadable_files_are_refused_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(Files(path=str(tmp_path / name), val_fraction=0.5).pieces("train"))
        list(Files(path=str(tmp_path / name), val_fraction=0.5).pieces("val"))


def test_parquet_without_the_field_names_the_columns(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="no field 'text'; there are body, id"):
        list(Files(path=str(tmp_path)).pieces("train"))
    assert documents(Files(path=str(tmp_path), text_field="body", val_fraction=1e-9), "train") == ["x"]


def test_half_a_surrogate_pair_becomes_a_replacement(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    assert documents(Files(path=str(tmp_path), val_fraction=1e-9), "train") == ["a?b"]


def test_nothing_matches_and_wrong_values(tmp_path):
    with pytest.raises(OSError, match="no file matches"):
        Files(path=str(tmp_path / "*.txt"))
    with pytest.raises(OSError, match="no file matches"):
        Files(path=str(tmp_path))
    with pytest.raises(ValueError, match="data.path=None: give a file"):
        Files(path=None)
    with pytest.raises(OSError, match="no such file"):
        Shakespeare(path=str(tmp_path / "none.txt"))
    for fraction in (0, 1, -0.1, "x", True):
        with pytest.raises(ValueError, match="data.val_fraction"):
            StandardLibrary(val_fraction=fraction)


def test_a_file_is_hashed_piece_by_piece(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(20_000_000))
    tracemalloc.start()
    try:
        digest = digest_files([("text.txt", file)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    assert digest == hashlib.sha256(b"text.txt\0" + hashlib.sha256(bytes(20_000_000)).hexdigest().encode() + b"\0").hexdigest()
