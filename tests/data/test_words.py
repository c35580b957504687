"""Ids of words against ids of whole texts, and every cut against GPT-2's pattern."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from tril.data import words
from tril.data.tokenizer import TokenizerConfig, build, load
from tril.data.words import SEPARATOR, WordEncoder, splits_like_gpt2, word_starts

CORPUS = [
    "it's the cat's mat, they'll say\n\n    def f(x1):\n\treturn x1 + 22\n" * 20,
    "naïve café  'tis\u00a0 été\r\n  " * 20,
]
ODD = "ab's5.,_' \n\t\r\x0b\x1c\x1f\x00\x7f\x85\u00a0\u180e\u2003\u2028\u3000éß²½Ⅷ漢\u0301👩\U0010ffff"
KINDS = "as5.' \n\x1cé\u00a0²"  # each kind of byte, and a letter, a blank and a number of two bytes
TOKENIZER = build(TokenizerConfig(vocab_size=400), CORPUS)


def joined(*texts):
    return np.frombuffer(b"".join(text.encode() + bytes([SEPARATOR]) for text in texts), np.uint8)


def pieces(text):
    content = text.encode()
    starts = [*word_starts(joined(text)).tolist(), len(content)]
    return [content[start:end].decode() for start, end in zip(starts, starts[1:], strict=False)]


def test_words_are_the_literal_ones():
    assert pieces("it's  5x\n\n  b_c, d") == ["it", "'s", " ", " 5", "x", "\n\n ", " b", "_", "c", ",", " d"]
    assert pieces("an été, \u00a0\n the.") == [
        "an",
        " été,",
        " \u00a0\n",
        " the",
        ".",
    ]  # no cut next to é and the blank


def test_every_cut_is_one_of_the_pattern():
    """In all texts of up to three of KINDS and up to five of some, the pattern gives the same words with the cuts."""
    split = TOKENIZER.pre_tokenizer.pre_tokenize_str
    for length in range(1, 6):
        for text in map("".join, product(KINDS if length < 4 else "s5' \n\u00a0", repeat=length)):
            from_pieces = [word for piece in pieces(text) for word, _ in split(piece)]
            assert from_pieces == [word for word, _ in split(text)], text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.sampled_from(ODD) | st.characters(exclude_categories=["Cs"]), max_size=40), max_size=4))
def test_ids_are_those_of_the_whole_text(texts):
    assert [ids.tolist() for ids in WordEncoder(TOKENIZER)(texts)] == [TOKENIZER.encode(text).ids for text in texts]


@pytest.mark.parametrize("size", [0, 5, 1 << 18])
def test_a_full_cache_does_not_change_the_ids(size, monkeypatch):
    monkeypatch.setattr(words, "MAX_CACHED_WORDS", size)
    monkeypatch.setattr(words, "MAX_CACHED_BYTES", 4)
    encode, texts = WordEncoder(TOKENIZER), [CORPUS[0], "", "a" * 1000, CORPUS[1], "<|endoftext|>"]
    for batch in (texts, texts[::-1], texts):
        assert [ids.tolist() for ids in encode(batch)] == [TOKENIZER.encode(text).ids for text in batch]
        assert all(len(word) <= 4 for word in encode.cache)
        assert len(encode.cache) <= size + 40


def changed(**parts):
    tokenizer = load(TOKENIZER.to_str())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def test_other_tokenizers_are_recognized():
    assert splits_like_gpt2(TOKENIZER) and splits_like_gpt2(changed())
    assert not splits_like_gpt2(build(TokenizerConfig(kind="byte"), []))
    assert not splits_like_gpt2(build(TokenizerConfig(kind="char"), CORPUS))
    assert not splits_like_gpt2(changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)))
    assert not splits_like_gpt2(changed(pre_tokenizer=pre_tokenizers.Split(Regex(r"\w+"), "isolated")))
    assert not splits_like_gpt2(changed(normalizer=normalizers.NFC()))
    assert not splits_like_gpt2(changed(encode_special_tokens=False))
    assert not splits_like_gpt2(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    added = changed()
    added.add_tokens([AddedToken("the cat", normalized=False)])
    assert not splits_like_gpt2(added)
    model = models.BPE(vocab={"a": 0}, merges=[], dropout=0.5)
    assert not splits_like_gpt2(changed(model=model))
