"""Tokenizers: exact round trips, literal special tokens, determinism, refusals."""

import pytest
from tokenizers import Tokenizer, models

from tril.data.tokenizer import UNKNOWN, TokenizerConfig, build, for_documents, load_tokenizer

CORPUS = ["def f(x):\n    return x + 1\n", "the cat sat on the mat, the cat sat\n" * 20, "naïve café\r\n\ttabs\n"]
HARD = [
    "", " ", "\n", "\r\n", "a\tb\n\n  c ", "\x00\x01\x7f", "👩‍👩‍👧 and 🇩🇪", "e\u0301 é", "\u2028\u200b\ufeff",
    "漢字かな", "\U0010ffff", "<|endoftext|>", "x<|endoftext|>y <|unknown|>", "Ġ Ċ â", "\ufffd", " " * 300, "a" * 5000,
]  # fmt: skip


@pytest.fixture(scope="module", params=["bpe", "byte", "char", "file"])
def tokenizer(request, tmp_path_factory):
    config = TokenizerConfig(kind="bpe", vocab_size=300)
    if request.param == "file":
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        saved = build(config, [CORPUS])
        saved.enable_truncation(3)  # as a foreign file may have
        saved.enable_padding(length=9)
        saved.save(str(path))
        config = TokenizerConfig(kind="file", path=str(path))
    elif request.param != "bpe":
        config = TokenizerConfig(kind=request.param)
    return build(config, [CORPUS + HARD])


@pytest.mark.parametrize("reloaded", [False, True])
def test_round_trip_is_exact(tokenizer, reloaded):
    tokenizer = for_documents(load_tokenizer(tokenizer.to_str())) if reloaded else tokenizer
    for text in HARD + CORPUS:
        for ids in (tokenizer.encode(text).ids, tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids):
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            assert tokenizer.token_to_id("<|endoftext|>") not in ids


def test_ids_of_characters_and_bytes():
    char = build(TokenizerConfig(kind="char"), [["cab", "\n"]])
    assert char.encode("a\nbc").ids == [3, 2, 4, 5]  # after end-of-text and unknown, in code point order
    assert char.encode("aéb").ids == [3, char.token_to_id(UNKNOWN), 4]
    assert char.get_vocab_size() == 6
    byte = build(TokenizerConfig(kind="byte"), [])
    assert byte.get_vocab_size() == 257
    assert len(byte.encode("é漢").ids) == 5
    assert byte.token_to_id("<|endoftext|>") == 0


def test_bpe_training_is_deterministic_and_reaches_the_given_size():
    config = TokenizerConfig(kind="bpe", vocab_size=290)
    first, second = (build(config, [iter(CORPUS)]) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 290
    assert len(first.encode("the cat sat").ids) == 3  # "the", " cat", " sat" are the commonest words


def test_file_without_end_of_text_is_refused_with_its_special_tokens(tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer(models.BPE(vocab={"?": 0}, merges=[], unk_token="?"))
    tokenizer.add_special_tokens(["</s>", "<pad>"])
    tokenizer.save(str(path))
    with pytest.raises(ValueError, match="its special tokens are </s> <pad>"):
        build(TokenizerConfig(kind="file", path=str(path)), [])
    assert build(TokenizerConfig(kind="file", path=str(path), eot="</s>"), []).token_to_id("</s>") == 1
    path.write_text("{}")
    with pytest.raises(OSError, match="cannot read a tokenizer .*; give a tokenizer.json"):
        build(TokenizerConfig(kind="file", path=str(path)), [])
