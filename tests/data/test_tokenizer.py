"""Tokenizers: exact round trips, files of other libraries, and files of the hub."""

import json
import time

import pytest
from tokenizers import Tokenizer, models

from tests.data.test_text import error_of
from tril.data.tokenizer import UNKNOWN, TokenizerConfig, build, for_documents, load_tokenizer

CORPUS = ["def f(x):\n    return x + 1\n", "the cat sat on the mat, the cat sat\n" * 20, "naïve café\r\n\ttabs\n"]
HARD = [
    "", " ", "\n", "\r\n", "a\tb\n\n  c ", "\x00\x01\x7f", "👩‍👩‍👧 and 🇩🇪", "e\u0301 é", "\u2028\u200b\ufeff",
    "漢字かな", "\U0010ffff", "<|endoftext|>", "x<|endoftext|>y <|unknown|>", "Ġ Ċ â", "\ufffd", " " * 300, "a" * 5000,
]  # fmt: skip


@pytest.fixture(params=["bpe", "byte", "char", "file"])
def tokenizer(request, tmp_path):
    path, config = tmp_path / "tokenizer.json", {"vocab_size": 300} if request.param == "bpe" else {}
    if request.param == "file":
        saved = build(TokenizerConfig(vocab_size=300), CORPUS)
        saved.enable_truncation(3)  # as a foreign file may have
        saved.enable_padding(length=9)
        saved.save(str(path))
        config = {"path": str(path)}
    return build(TokenizerConfig(kind=request.param, **config), CORPUS + HARD)


@pytest.mark.parametrize("reloaded", [False, True])
def test_round_trip_is_exact(tokenizer, reloaded):
    tokenizer = for_documents(load_tokenizer(tokenizer.to_str())) if reloaded else tokenizer
    for text in HARD + CORPUS:
        for ids in (tokenizer.encode(text).ids, tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids):
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            assert tokenizer.token_to_id("<|endoftext|>") not in ids


def test_ids_of_characters_and_bytes():
    char = build(TokenizerConfig(kind="char"), ["cab", "\n"])
    assert char.encode("a\nbc").ids == [3, 2, 4, 5]  # after end-of-text and unknown, in code point order
    assert char.encode("aéb").ids == [3, char.token_to_id(UNKNOWN), 4]
    assert char.get_vocab_size() == 6
    byte = build(TokenizerConfig(kind="byte"), [])
    assert byte.get_vocab_size() == 257
    assert len(byte.encode("é漢").ids) == 5
    assert byte.token_to_id("<|endoftext|>") == 0


def test_file_without_end_of_text_is_refused_with_its_special_tokens(tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer(models.BPE(vocab={"?": 0}, merges=[], unk_token="?"))
    tokenizer.add_special_tokens(["</s>", "<pad>"])
    tokenizer.save(str(path))
    with pytest.raises(ValueError, match="</s> <pad>"):
        build(TokenizerConfig(kind="file", path=str(path)), [])
    assert build(TokenizerConfig(kind="file", path=str(path), eot="</s>"), []).token_to_id("</s>") == 1


EOT = {"id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False}
EOT |= {"normalized": False, "special": True}
VOCAB = {"<|endoftext|>": 0, "?": 1, "a": 2, "b": 3, "ab": 4}
BPE = {"type": "BPE", "vocab": VOCAB, "merges": [["a", "b"]], "unk_token": "?"}


def state(model):
    missing = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    return json.dumps({"version": "1.0", "added_tokens": [EOT], **missing, "model": model})


@pytest.mark.parametrize("content", ["", "[" * 100_000, state({}), state({**BPE, "merges": [["a", "z"]]})])
def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    message = error_of(lambda: build(TokenizerConfig(kind="file", path=str(path))))
    assert "data.tokenizer.path=" in message and len(message) < 600


COMMITS = {"main": "ab" * 20, "v1": "cd" * 20}  # of a repository of the hub


@pytest.fixture
def published(server, hub):
    """The tokenizers of the revisions, each with its commit."""
    tokenizers = {"main": build(TokenizerConfig(kind="byte")), "v1": build(TokenizerConfig(vocab_size=260), CORPUS)}
    for revision, tokenizer in tokenizers.items():
        content, commit = tokenizer.to_str().encode(), COMMITS[revision]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{revision}"'}
        for name in (revision, commit):
            server.files[f"/owner/name/resolve/{name}/tokenizer.json"] = content, headers
    return tokenizers


def of_hub(revision="main", path="owner/name"):
    return TokenizerConfig(kind="hub", path=path, revision=revision)


def test_a_revision_of_the_hub_is_resolved_to_its_commit_and_downloaded_once(published, server, hub):
    for revision, tokenizer in published.items():
        expected = {"kind": "hub", "eot": "<|endoftext|>", "path": "owner/name", "revision": COMMITS[revision]}
        server.requests.clear()
        config = of_hub(revision)
        assert config.fingerprint() == expected and build(config).to_str() == tokenizer.to_str()
        assert [path for method, path in server.requests if method == "GET" and path.endswith(".json")] == [
            f"/owner/name/resolve/{revision}/tokenizer.json"
        ]
    hub("http://127.0.0.1:1")
    assert build(of_hub()).to_str() == published["main"].to_str()  # a later start needs no network


@pytest.mark.parametrize("trouble", ["no network", "no such repository", "no such revision", "no tokenizer"])
def test_a_download_that_fails_is_one_line(published, server, hub, trouble, monkeypatch):
    if trouble == "no network":
        hub("http://127.0.0.1:1")
        monkeypatch.setattr(time, "sleep", lambda _: None)  # between retries
    elif trouble == "no tokenizer":
        server.files["/owner/name/resolve/main/tokenizer.json"] = b"{}", {"X-Repo-Commit": "ab" * 20, "ETag": '"x"'}
    path = "owner/other" if trouble == "no such repository" else "owner/name"
    config = of_hub("v9" if trouble == "no such revision" else "main", path)
    assert f"data.tokenizer.path={path}" in error_of(lambda: build(config))
