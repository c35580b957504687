"""Tokenizers: exact round trips, files of other libraries, and files of the hub."""

import random
import time

import pytest
from tokenizers import Tokenizer, models, normalizers

from tests.data.test_text import error_of
from tril.data import tokenizer as module
from tril.data.tokenizer import UNKNOWN, TokenizerConfig, build, encode_prompt

CORPUS = ["def f(x):\n    return x + 1\n", "the cat sat on the mat, the cat sat\n" * 20, "naïve café\r\n\ttabs\n"]
HARD = [
    "", " ", "\n", "\r\n", "a\tb\n\n  c ", "\x00\x01\x7f", "👩‍👩‍👧 and 🇩🇪", "e\u0301 é", "\u2028\u200b\ufeff",
    "漢字かな", "\U0010ffff", "<|endoftext|>", "x<|endoftext|>y <|unknown|>", "Ġ Ċ â", "\ufffd", " " * 300, "a" * 5000,
]  # fmt: skip


@pytest.fixture
def loaded(tmp_path):
    """A function: the settings of a tokenizer.json of a byte-level tokenizer that `change` changes."""

    def loaded(change=lambda tokenizer: None, **settings):
        tokenizer = build(TokenizerConfig(vocab_size=300), CORPUS)
        change(tokenizer)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return TokenizerConfig(kind="file", path=str(tmp_path / "tokenizer.json"), **settings)

    return loaded


@pytest.mark.parametrize("kind", ["bpe", "byte", "char", "file"])
def test_round_trip_is_exact(kind, loaded):
    truncate = lambda tokenizer: (tokenizer.enable_truncation(3), tokenizer.enable_padding(length=9))  # noqa: E731
    tokenizer = build(loaded(truncate) if kind == "file" else TokenizerConfig(kind=kind), CORPUS + HARD)
    for text in HARD + CORPUS:
        for ids in (tokenizer.encode(text).ids, tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids):
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            assert tokenizer.token_to_id("<|endoftext|>") not in ids


def test_ids_of_characters_and_bytes():
    char = build(TokenizerConfig(kind="char"), ["cab", "\n"])
    assert char.encode("a\nbc").ids == [3, 2, 4, 5]  # after end-of-text and unknown, in code point order
    assert char.encode("aéb").ids == [3, char.token_to_id(UNKNOWN), 4]
    byte = build(TokenizerConfig(kind="byte"), [])
    assert (char.get_vocab_size(), byte.get_vocab_size(), byte.token_to_id("<|endoftext|>")) == (6, 257, 0)
    assert len(byte.encode("é漢").ids) == 5


@pytest.mark.parametrize(("n_bytes", "size"), [(0, 257), (46_000, 345), (100_000, 400)])
def test_the_vocabulary_follows_the_size_of_the_text_up_to_a_limit(n_bytes, size, monkeypatch):
    monkeypatch.setattr(module, "AUTO_VOCAB_SIZE", 400)
    text = "".join(random.Random(0).choices("abcdefgh é", k=n_bytes)).encode()[:n_bytes].decode(errors="replace")
    assert build(TokenizerConfig(), [text[: n_bytes // 2], text[n_bytes // 2 :]]).get_vocab_size() == size


@pytest.mark.parametrize("normalizer", [normalizers.Lowercase(), normalizers.Strip(), normalizers.NFC()])
def test_a_tokenizer_that_changes_the_text_is_an_error(loaded, normalizer):
    config = loaded(lambda tokenizer: setattr(tokenizer, "normalizer", normalizer))
    message = error_of(lambda: build(config, ["  A, e\u0301 and no more of it\n"]))
    assert f"data.tokenizer.path={config.path}" in message


def test_a_tokenizer_that_fails_on_the_text_is_an_error(loaded, tmp_path):
    config = loaded()
    model = '{"type": "WordLevel", "vocab": {"<|endoftext|>": 0}, "unk_token": "none"}'
    (tmp_path / "tokenizer.json").write_text(f'{{"version": "1.0", "added_tokens": [], "model": {model}}}')
    assert f"data.tokenizer.path={config.path}" in error_of(lambda: build(config, ["b"]))


def test_a_tokenizer_without_the_end_of_text_is_an_error_with_its_special_tokens(loaded):
    add = lambda tokenizer: tokenizer.add_special_tokens(["</s>", "<pad>", "\x1b[2J"])  # noqa: E731
    message = error_of(lambda: build(loaded(add, eot="<eos>")))
    assert "data.tokenizer.eot=<eos>" in message and "</s> <pad> \\x1b[2J" in message
    assert build(loaded(add, eot="</s>")).token_to_id("</s>") is not None


@pytest.mark.parametrize("content", ["", "[" * 100_000, '{"model": {}}', '{"model": {"vocab": {}, "merges": ["z"]}}'])
def test_a_file_that_is_no_tokenizer_is_an_error_of_one_line(loaded, tmp_path, content):
    config = loaded()
    (tmp_path / "tokenizer.json").write_text(content)
    assert f"data.tokenizer.path={config.path}" in error_of(lambda: build(config))


COMMIT = "ab" * 20


@pytest.fixture
def published(server, hub):
    """The tokenizer of a revision v1 of owner/name on the hub."""
    tokenizer = build(TokenizerConfig(kind="byte"))
    for name in ("v1", COMMIT):
        headers = {"X-Repo-Commit": COMMIT, "ETag": '"1"'}
        server.files[f"/owner/name/resolve/{name}/tokenizer.json"] = tokenizer.to_str().encode(), headers
    return tokenizer


def of_hub(path="owner/name", revision="v1"):
    return TokenizerConfig(kind="hub", path=path, revision=revision)


def test_a_revision_of_the_hub_is_resolved_to_its_commit_and_downloaded_once(published, server, hub):
    config = of_hub()
    assert config.fingerprint()["revision"] == COMMIT and build(config).to_str() == published.to_str()
    assert [method for method, path in server.requests if path.endswith("tokenizer.json")].count("GET") == 1
    hub("http://127.0.0.1:1")
    assert build(of_hub()).to_str() == published.to_str()  # a later start needs no network


def test_a_tokenizer_that_cannot_encode_a_prompt_is_an_error_of_one_line():
    without_unknown = Tokenizer(models.Unigram([("a", 0.0)]))
    assert "the tokenizer cannot be used" in error_of(lambda: encode_prompt(without_unknown, "b"))


@pytest.mark.parametrize("config", [of_hub(), of_hub("owner/other"), of_hub(revision="v9")])
def test_a_download_that_fails_is_an_error_of_one_line(published, hub, config, monkeypatch):
    if config == of_hub():
        hub("http://127.0.0.1:1")
        monkeypatch.setattr(time, "sleep", lambda _: None)  # between retries
    assert f"data.tokenizer.path={config.path}" in error_of(lambda: build(config))
