"""Tokenizer files that would lose text, take all memory or end the process are refused in one line."""

import json

import pytest

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


def with_id(i, model=BPE):
    return state({**model, "vocab": VOCAB | {"zz": i}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the tokenizer cannot be read (JSONDecodeError"),
        ("[" * 100_000, "the tokenizer cannot be read (RecursionError"),
        ("1" * 10_000, "Exceeds the limit"),  # more digits than Python converts
        (state({}), "the tokenizer cannot be read (KeyError: 'vocab')"),
        (state({**BPE, "merges": [["a", "z"]]}), "out of vocabulary"),
        (state(BPE, normalizer={"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAA"}), "charsmap"),
        (with_id(4_000_000_000), f"4000000001 tokens exceed the model's vocab_size={MAX_IDS}; use the tokenizer"),
        (with_id(-1), "the tokenizer has the id -1, which must be an integer from 0 on"),
        (state(BPE, added_tokens=[{**EOT, "id": 4_000_000_000}]), "4000000001 tokens exceed"),
        (state({**BPE, "vocab": {}, "merges": []}, added_tokens=[]), "cannot encode a letter"),
        (state({**BPE, "dropout": 0.1}), "has model.dropout=0.1, so its ids are random; set it to null"),
        (state(BPE, normalizer={"type": "Sequence", "normalizers": [LONGER] * 4}), "more than 64 characters of one"),
        (state(without(BPE, "unk_token")), "has no token for '0', which would vanish; set its model.unk_token"),
        (state({**WORDS, "unk_token": "absent"}), "the tokenizer cannot encode a letter (WordLevel error"),
        (state({**UNIGRAM, "unk_id": None}), "the tokenizer cannot encode a letter (Encountered an unknown token"),
        ({**BYTES, "model": {**BYTES["model"], "vocab": without(BYTES["model"]["vocab"], "\u00e9")}}, "has no token"),
        ({**BYTES, "pre_tokenizer": None}, "has no token for"),  # characters are not split into bytes
        (state(without(FALLBACK, "unk_token") | {"vocab": without(FALLBACK["vocab"], "<0xE2>")}), "has no token for"),
        (state(BPE, pre_tokenizer={"type": "FixedLength", "length": 0}), "the tokenizer cannot encode"),
    ],
)
def test_files_that_fail_or_lose_text_are_refused(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(OSError, match="cannot read a tokenizer from data.tokenizer.path=") as error:
        build(TokenizerConfig(kind="file", path=str(path)), [])
    assert message in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
IN_SEQUENCE = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
BERT |= {"lowercase": True}
UNUSED = {**BYTES["model"], "vocab": without(BYTES["model"]["vocab"], "\xff", "\xc0")}  # bytes that UTF-8 does not use


@pytest.mark.parametrize(
    "content",
    [state(BPE), state(WORDS), state(PIECES), state(UNIGRAM), state({**BPE, "dropout": 0.0}), BYTES]
    + [state(without(FALLBACK, "unk_token")), state(without(BPE, "type")), with_id(900)]
    + [state(UNUSED, pre_tokenizer=IN_SEQUENCE), state(UNUSED, normalizer={"type": "ByteLevel"})]
    + [state(PIECES, normalizer=BERT, pre_tokenizer={"type": "Whitespace"})],
)
def test_files_that_keep_all_text_are_accepted(content):
    content.setdefault("decoder", None)
    assert load_tokenizer(json.dumps(content)).encode("a\u6f22", add_special_tokens=False).ids != []


def test_ids_must_be_rows_of_the_model():
    with pytest.raises(ValueError, match="the tokenizer's 5 tokens exceed the model's vocab_size=4; use the tokenizer"):
        load_tokenizer(json.dumps(state(BPE)), 4)
