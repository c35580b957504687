"""Tokenizers that the library would fail on, or use in another way than in training, are refused in one line."""

import copy
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.model.generation.test_language_model import byte_level, characters, sentencepiece_like, with_gaps
from tril.model import stored_tokenizer
from tril.model.stored_tokenizer import check_tokenizer

BYTES = json.loads(byte_level(300).to_str())
CHARACTERS = json.loads(characters().to_str())
LEAVES_OUT = sentencepiece_like().to_str()  # every character but those of four words
ROWS = 301


def changed(tokenizer=BYTES, **values):
    """A tokenizer with other values in its model."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer["model"] |= values
    return json.dumps(tokenizer)


def with_top(tokenizer=BYTES, **values):
    return json.dumps(tokenizer | values)


def byte_fallback(n=256):
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(n)}
    return Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True)).to_str()


def in_sequence():
    tokenizer = byte_level(300)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), tokenizer.pre_tokenizer])
    return tokenizer.to_str()


def unigram(unk_id):
    return Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id)).to_str()


def prefixed(second):
    model = {"type": "BPE", "vocab": {"a": 0, second: 1, "ab": 2}, "merges": [["a", second]], "unk_token": "a"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model | {"continuing_subword_prefix": "#"}})


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(BYTES),
        json.dumps(CHARACTERS),
        with_gaps().to_str(),
        in_sequence(),
        byte_fallback(),
        unigram(0),
        prefixed("#b"),
        changed(dropout=0.0),
        Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")).to_str(),
        Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")).to_str(),
    ],
)
def test_tokenizers_that_know_every_character(text):
    check_tokenizer(text, ROWS)
    assert Tokenizer.from_str(text).encode("東").ids


def test_without_an_unknown_token_characters_disappear():
    assert Tokenizer.from_str(LEAVES_OUT).encode("東").ids == []


def huge(tokenizer, i):
    return changed(tokenizer, vocab=tokenizer["model"]["vocab"] | {"z": i})


@pytest.mark.parametrize(
    "text, message",
    [
        (huge(BYTES, 4_000_000_000), "the tokenizer's 4000000001 tokens exceed the model's vocab_size=301"),
        (huge(CHARACTERS, 10**30), "exceed the model's vocab_size=301"),
        (
            huge(BYTES, 301),
            "the tokenizer's 302 tokens exceed the model's vocab_size=301; use the tokenizer of the mod",
        ),
        (with_top(added_tokens=[{"id": 4_294_967_295, "content": "x"}]), "the tokenizer's 4294967296 tokens exceed"),
        (huge(BYTES, -1), "its tokenizer has the id -1; use another file"),
        (huge(BYTES, 1.5), "its tokenizer has the id 1.5"),
        (huge(BYTES, True), "its tokenizer has the id True"),
        (huge(BYTES, 5), "its tokenizer has several tokens with the same id"),
        (changed(dropout=0.1), r"its tokenizer has BPE dropout \(0.1\), so the same text has other tokens each time"),
        (changed(CHARACTERS, unk_token=None), "its tokenizer has no unknown token, and leaves out characters"),
        (changed(CHARACTERS, unk_token="absent"), "its tokenizer has no unknown token"),
        (LEAVES_OUT, "its tokenizer has no unknown token"),
        (with_top(pre_tokenizer=None), "its tokenizer has no unknown token"),  # bytes are not split off
        (changed(vocab={"a": 0}, merges=[]), "its tokenizer has no unknown token"),  # 255 bytes are missing
        (byte_fallback(255), "its tokenizer has no unknown token"),
        (unigram(None), "its tokenizer has no unknown token"),
        (prefixed("é"), "its tokenizer has merges without the continuing_subword_prefix='#'"),
        (changed(vocab={}, merges=[]), "its tokenizer has no tokens|no unknown"),
        (with_top(added_tokens=[], model={"vocab": {}}), "its tokenizer has no tokens"),
        (with_top(model=3), "its tokenizer cannot be read"),
        (with_top(model=None), "its tokenizer cannot be read"),
        (with_top(model={}), "its tokenizer cannot be read"),
        (changed(vocab=3), "its tokenizer cannot be read"),
        (changed(vocab=[[]]), "its tokenizer cannot be read"),
        (changed(vocab=[[[1], 2]]), "its tokenizer cannot be read"),
        (changed(unk_token=[1]), "its tokenizer cannot be read"),
        (changed(continuing_subword_prefix="#", merges=[["a"]]), "its tokenizer cannot be read"),
        (changed(continuing_subword_prefix=3), "its tokenizer cannot be read"),
        (with_top(added_tokens=3), "its tokenizer cannot be read"),
        (with_top(added_tokens=[3]), "its tokenizer cannot be read"),
        ("[" * 10**6, "its tokenizer is nested too deeply"),
        ('{"a":' * 10**6, "its tokenizer is nested too deeply"),
        ("[]", "its tokenizer cannot be read"),
        ("", "its tokenizer cannot be read"),
        ("{", "its tokenizer cannot be read"),
        ("\0\ud800", "its tokenizer cannot be read"),
        ("1" * 10_000, "its tokenizer cannot be read"),  # more digits than Python converts
    ],
    ids=lambda value: value[:40] if len(value) < 200 else "",
)
def test_the_others_are_refused(text, message):
    with pytest.raises(ValueError, match=message) as error:
        check_tokenizer(text, ROWS)
    assert len(str(error.value)) < 400


def test_a_large_one_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(stored_tokenizer, "MAX_CHARACTERS", 100)
    monkeypatch.setattr(stored_tokenizer.json, "loads", lambda text: pytest.fail("it was read"))
    with pytest.raises(ValueError, match="its tokenizer has 101 characters, and the limit is 100"):
        check_tokenizer("[" * 101, ROWS)
