"""The bytes of the validation text, of which bits per byte are computed."""

import json
import math

import pytest

from tests.data.test_prepare import Pieces
from tril import train as train_script
from tril.data.prepare import prepare
from tril.data.prepared import val_bytes
from tril.data.sources.base import Piece
from tril.data.tokenizer import TokenizerConfig

WORDS = [Piece("some words here and there " * 20, True), Piece("1 2 3 4 " * 30, True), Piece("é漢" * 40, True)]


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_bytes_of_a_part_are_those_of_its_tokens(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("tril.data.prepared.DECODED_TOKENS", 7)
    train = [Piece("".join(sorted(set("".join(piece.text for piece in WORDS)))) * 9, True), *WORDS]
    tokenizer = TokenizerConfig(kind=kind, **({"vocab_size": 300} if kind == "bpe" else {}))
    prepared = prepare(Pieces(train=train, val=WORDS), tokenizer, tmp_path, progress=False)
    tokens, eot = prepared.tokens("val").tolist(), prepared.meta["eot_id"]
    text = "".join(piece.text for piece in WORDS).encode()
    assert val_bytes(prepared, len(tokens) - 1) == val_bytes(prepared, 10**9) == len(text)
    first = len(prepared.tokenizer.decode(tokens[:1]).encode())  # it is not predicted
    for end in (tokens.index(eot), len(WORDS[0].text) // 3, tokens.index(eot) + 1):  # within ASCII
        expected = prepared.tokenizer.decode([token for token in tokens[: end + 1] if token != eot])
        assert text.startswith(expected.encode())
        assert val_bytes(prepared, end) == len(expected.encode()) - first


def test_bits_per_byte_of_limited_validation_count_the_bytes_that_were_read(configure, tmp_path):
    """The first windows hold long words of few tokens, the rest digits: bytes per token differ by a factor."""
    train, val = tmp_path / "train.txt", tmp_path / "val.txt"
    train.write_text("internationalization of telecommunications 7 3 1 9 2 8\n" * 400)
    val.write_text("internationalization of telecommunications " * 60 + "\n" + "7 3 1 9 2 8 " * 2000)
    files = [f"data.path={train}", f"data.val_path={val}", "data.tokenizer.kind=bpe", "data.tokenizer.vocab_size=300"]
    options = [*files, "data.val_batch_size=1", "+trainer.limit_val_batches=2"]
    metrics = train_script.train(configure(*options, folder="limited"))
    [meta] = [json.loads(path.read_text()) for path in (tmp_path / "cache").glob("*/meta.json")]
    counts = meta["counts"]["val"]
    bytes_per_token = metrics["val/loss"] / math.log(2) / metrics["val/bpb"]
    whole = counts["bytes"] / (counts["tokens"] - 1)
    assert bytes_per_token > 3 * whole  # the old quotient was that of the whole text
    tokens = 2 * 32  # two windows of the tiny run's context
    assert bytes_per_token * tokens == pytest.approx(round(bytes_per_token * tokens), abs=1e-3)  # a number of bytes
