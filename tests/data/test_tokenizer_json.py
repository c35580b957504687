"""Tokenizer files that would lose text, take all memory or end the process are refused in one line."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tril.data.tokenizer import MAX_IDS, TokenizerConfig, build, load_tokenizer

EOT = {"id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False}
EOT |= {"normalized": False, "special": True}
VOCAB = {"<|endoftext|>": 0, "?": 1, "a": 2, "b": 3, "ab": 4}
BPE = {"type": "BPE", "vocab": VOCAB, "merges": [["a", "b"]], "unk_token": "?"}
WORDS = {"type": "WordLevel", "vocab": VOCAB, "unk_token": "?"}
PIECES = {**WORDS, "type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
UNIGRAM = {"type": "Unigram", "vocab": [[token, -float(i)] for token, i in VOCAB.items()], "unk_id": 1}
LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 90}
BYTES = json.loads(build(TokenizerConfig(kind="byte"), []).to_str())
FALLBACK = {**BPE, "vocab": VOCAB | {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}, "byte_fallback": True}


def state(model, **parts):
    missing = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    return {"version": "1.0", "added_tokens": [EOT], **missing, **parts, "model": model}


def without(model, *names):
    return {name: value for name, value in model.items() if name not in names}


def built(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return build(TokenizerConfig(kind="file", path=str(path)), [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("[]", "it has no model with a vocabulary"),
        ("[" * 100_000, "nested too deeply"),
        (state({}), "it has no model with a vocabulary"),
        (without(state(BPE), "added_tokens"), "or no added_tokens"),
        (state({**BPE, "vocab": 5}), "it has no model with a vocabulary"),
        (state({**PIECES, "vocab": VOCAB | {"zz": 4_000_000_000}}), "the id 4000000000 must be an integer from 0 to"),
        (state({**BPE, "vocab": VOCAB | {"zz": MAX_IDS}}), f"the id {MAX_IDS} must be an integer"),
        (state({**BPE, "vocab": VOCAB | {"zz": -1}}), "the id -1 must be an integer"),
        (state({**BPE, "vocab": VOCAB | {"zz": 4e9}}), "the id 4000000000.0 must be an integer"),
        (state({**BPE, "vocab": VOCAB | {"zz": None}}), "the id None must be an integer"),
        (state(BPE, added_tokens=[EOT, {**EOT, "id": 4_000_000_000, "content": "z"}]), "the id 4000000000 must be"),
        (state({**BPE, "vocab": VOCAB | {"zz": 2}}), "several tokens of its vocabulary have the same id"),
        (state({**BPE, "merges": [["a", "z"]]}), "out of vocabulary"),
        (state({**BPE, "type": "Other"}), "cannot read"),
        (state(BPE, pre_tokenizer={"type": "Other"}), "cannot read"),
        (state(BPE, normalizer={"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAA"}), "charsmap"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, content, message):
    with pytest.raises(
        OSError, match="cannot read a tokenizer from data.tokenizer.path=.*; give a tokenizer.json"
    ) as e:
        built(tmp_path, content)
    assert message in str(e.value) and "\n" not in str(e.value)


NO_UNKNOWN = "it has no unknown token, so characters that it lacks would vanish"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (state({**BPE, "dropout": 0.1}), "model.dropout=0.1 makes its ids random; set it to null in the file"),
        (state(without(BPE, "unk_token")), NO_UNKNOWN),
        (state({**BPE, "unk_token": "absent"}), NO_UNKNOWN),
        (state({**WORDS, "unk_token": "absent"}), NO_UNKNOWN),
        (state({**PIECES, "unk_token": "absent"}), NO_UNKNOWN),
        (state({**UNIGRAM, "unk_id": None}), NO_UNKNOWN),
        ({**BYTES, "model": {**BYTES["model"], "vocab": without(BYTES["model"]["vocab"], "\u0120")}}, NO_UNKNOWN),
        ({**BYTES, "pre_tokenizer": None}, NO_UNKNOWN),
        (state(without(FALLBACK, "unk_token") | {"vocab": without(FALLBACK["vocab"], "<0xE2>")}), NO_UNKNOWN),
        (state(BPE, pre_tokenizer={"type": "FixedLength", "length": 0}), "it cannot encode 'The caf"),
        (state(BPE, normalizer={"type": "Sequence", "normalizers": [LONGER] * 4}), "more than 64 characters of one"),
        (state(PIECES | {"merges": [["a", "b"]]}), "merges without the continuing_subword_prefix='##'"),
    ],
)
def test_files_that_lose_text_are_refused(tmp_path, content, message):
    with pytest.raises(OSError, match="data.tokenizer.path=") as error:
        built(tmp_path, content)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [state(BPE), state(WORDS), state(PIECES), state(UNIGRAM), state({**BPE, "dropout": 0.0}), BYTES]
    + [state(without(FALLBACK, "unk_token")), state(without(BPE, "type")), state({**BPE, "vocab": VOCAB | {"z": 900}})],
)
def test_files_that_keep_all_text_are_accepted(tmp_path, content):
    assert built(tmp_path, content).encode("a\u6f22", add_special_tokens=False).ids != []


def test_byte_level_in_a_sequence_or_as_a_normalizer_needs_no_unknown_token(tmp_path):
    """Bytes that UTF-8 does not use may be missing."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    sequence = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    vocab = without(BYTES["model"]["vocab"], "\xff", "\xc0")
    model = {**BYTES["model"], "vocab": vocab}
    for parts in ({"pre_tokenizer": sequence}, {"normalizer": {"type": "ByteLevel"}}):
        tokenizer = built(tmp_path, state(model, **parts, decoder=byte_level))
        assert tokenizer.decode(tokenizer.encode("caf\u00e9 7\u6f22").ids) == "caf\u00e9 7\u6f22"


def test_a_prepared_tokenizer_is_checked_too():
    with pytest.raises(ValueError, match="the id 4000000000 must be"):
        load_tokenizer(json.dumps(state({**PIECES, "vocab": VOCAB | {"zz": 4_000_000_000}})))


def test_a_file_larger_than_any_tokenizer_is_not_read(tmp_path):
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    config = TokenizerConfig(kind="file", path=str(path))
    with pytest.raises(OSError, match="it has 1099511627776 bytes, more than 134217728"):
        config.fingerprint()


def test_characters_would_vanish_without_an_unknown_token():
    """Why such a file is refused: what the library does."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    assert tokenizer.encode("a\u6f22a").ids == [0, 0]
