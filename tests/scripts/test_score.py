"""score.py: the bits of each token against a loop over prefixes, and what it refuses."""

import json
import math

import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tests.model.evaluation.test_token_page import Reader
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.checkpoint import load, save
from tril.model.generation.language_model import LanguageModel
from tril.scripts.score import MAX_BYTES, main

T = 12  # context length of tiny_gpt
TEXT = "def caf\u00e9(x):\r\n\t<script>alert('\u6f22')</script> <|endoftext|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("score")
    save(folder / "bytes.ckpt", LanguageModel(tiny_gpt(vocab_size=320), build(TokenizerConfig(kind="byte"), ())))
    characters = build(TokenizerConfig(kind="char"), ["abc \n"])
    save(folder / "characters.ckpt", LanguageModel(tiny_gpt(), characters))
    (folder / "text.txt").write_bytes(TEXT.encode())
    (folder / "latin1.txt").write_bytes("\u00e9".encode("latin1"))
    (folder / "empty.txt").touch()
    (folder / "large.txt").write_bytes(b"a" * (MAX_BYTES + 1))
    return folder


def run(folder, *arguments):
    return call(main, *arguments, "device=cpu", cwd=folder, strict=True)


def bits_by_a_loop(model, tokens, stride):
    """The bits of each token but the first; the first window that holds a token scores it."""
    bits = []
    for target in range(1, len(tokens)):
        start = max(0, math.ceil((target - T) / stride)) * stride
        with torch.no_grad():
            log_p = model(torch.tensor([tokens[start:target]]))[0, -1].double().log_softmax(-1)
        bits.append(-log_p[tokens[target]].item() / math.log(2))
    return bits


@pytest.mark.parametrize("stride", [None, 5])
def test_the_bits_of_each_token(folder, tmp_path, stride):
    option = [] if stride is None else [f"stride={stride}"]
    done = run(folder, "ckpt=bytes.ckpt", "path=text.txt", f"out={tmp_path / 'out'}", *option)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"score.json", "score.html"}
    report = json.loads((tmp_path / "out" / "score.json").read_text(encoding="utf-8"))
    rows = report["tokens"]
    lm, content = load(folder / "bytes.ckpt"), TEXT.encode()
    # Bytes one by one: <|endoftext|> in the text is text, and not the token.
    tokens = [lm.eot_id, *(i for char in TEXT for i in lm.tokenizer.encode(char).ids)]
    expected = bits_by_a_loop(lm.model, tokens, stride or T)
    assert [row["bits"] for row in rows] == pytest.approx(expected, abs=1e-4) and len(rows) == len(content)
    assert "".join(row["text"] for row in rows) == TEXT
    total, n = sum(expected), len(content)
    assert f"{total:,.1f} bits for {n} bytes and {n} tokens: {total / n:.4f} bits per byte" in done.stdout
    assert (report["bits"], report["bits_per_byte"]) == pytest.approx((total, total / n), rel=1e-5)
    page = Reader((tmp_path / "out" / "score.html").read_text(encoding="utf-8"))
    assert [attrs["title"] for attrs, _ in page.tokens] == [f"{row['bits']:.2f} bits" for row in rows]
    assert "script" not in page.tags and "<script>" in "".join(text for _, text in page.tokens)
    assert done.stdout.splitlines()[1].split() == ["0", f"{expected[0]:.2f}", "'d'"]


def test_a_text_of_the_command_line(folder, tmp_path):
    done = run(folder, "ckpt=characters.ckpt", "text=abc abc", f"out={tmp_path}")
    lines = done.stdout.splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines[1:8]] == ["'a'", "'b'", "'c'", "' '", "'a'", "'b'", "'c'"]
    assert "bits for 7 bytes and 7 tokens" in lines[9]


def test_of_a_long_text_the_most_expensive_tokens_are_printed(folder, tmp_path):
    done = run(folder, "ckpt=characters.ckpt", "text=" + "abc " * 60 + "ab", f"out={tmp_path}")
    lines = done.stdout.splitlines()
    shown = [float(line.split()[1]) for line in lines[3:23]]
    bits = [row["bits"] for row in json.loads((tmp_path / "score.json").read_text(encoding="utf-8"))["tokens"]]
    assert lines[0] == "The 20 tokens of the most bits; score.json has all." and len(bits) == 242
    assert shown == pytest.approx(sorted(bits, reverse=True)[:20], abs=0.006)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "text and path: exactly one of them must be set; use text=TEXT or path=FILE"),
        (["text=a", "path=text.txt"], "text and path: exactly one of them must be set; use text=TEXT or path=FILE"),
        (["text="], "text is empty; give at least one character"),
        (["path=empty.txt"], "path=empty.txt is empty; give at least one character"),
        (["path=latin1.txt"], "path=latin1.txt is not UTF-8 (unexpected end of data); convert it first, e.g. iconv"),
        (["path=large.txt"], "path=large.txt has 1,048,577 bytes, at most 1,048,576 are read; cut it into parts"),
        (["path=nothing.txt"], "path=nothing.txt cannot be read (No such file or directory); name a text file"),
        (["text=\udce9"], "text is not UTF-8; set the terminal to UTF-8"),
        (["text=a", "stride=13"], "stride=13 exceeds the context length of bytes.ckpt, 12; lower it"),
        (["ckpt=characters.ckpt", "text=x"], "has 'x', which the tokenizer does not know; use only characters of the"),
    ],
)
def test_refusals(folder, tmp_path, arguments, message):
    first = [] if arguments[:1] == ["ckpt=characters.ckpt"] else ["ckpt=bytes.ckpt"]
    before = set(folder.iterdir())
    assert_refused(run(folder, *first, *arguments), message)
    assert set(folder.iterdir()) == before
