"""evaluate.py text=...: the bits of each token against a loop over prefixes, and what it refuses."""

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
from tril.scripts.evaluate import main

T = 12  # context length of tiny_gpt
TEXT = "def caf\u00e9(x):\r\n\t<script>alert('\u6f22')</script> <|endoftext|>"


def run(folder, *arguments):
    return call(main, *arguments, "device=cpu", "out=out", cwd=folder, strict=True)


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
def test_the_bits_of_each_token(tmp_path, stride):
    save(tmp_path / "a.ckpt", LanguageModel(tiny_gpt(vocab_size=320), build(TokenizerConfig(kind="byte"), ())))
    option = [] if stride is None else [f"stride={stride}"]
    done = run(tmp_path, "ckpt=a.ckpt", f"text={TEXT}", *option)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tokens.json", "tokens.html"}
    report = json.loads((tmp_path / "out" / "tokens.json").read_text(encoding="utf-8"))
    rows = report["tokens"]
    lm, content = load(tmp_path / "a.ckpt"), TEXT.encode()
    # Bytes one by one: <|endoftext|> in the text is text, and not the token.
    tokens = [lm.eot_id, *(i for char in TEXT for i in lm.tokenizer.encode(char).ids)]
    expected = bits_by_a_loop(lm.model, tokens, stride or T)
    assert [row["bits"] for row in rows] == pytest.approx(expected, abs=1e-4) and len(rows) == len(content)
    assert "".join(row["text"] for row in rows) == TEXT
    total, n = sum(expected), len(content)
    assert f"{total:,.1f} bits for {n} bytes and {n} tokens: {total / n:.4f} bits per byte" in done.stdout
    assert (report["bits"], report["bits_per_byte"]) == pytest.approx((total, total / n), rel=1e-5)
    page = Reader((tmp_path / "out" / "tokens.html").read_text(encoding="utf-8"))
    assert [attrs["title"] for attrs, _ in page.tokens] == [f"{row['bits']:.2f} bits" for row in rows]
    assert "script" not in page.tags and "<script>" in "".join(text for _, text in page.tokens)
    assert done.stdout.splitlines()[1].split() == ["0", f"{expected[0]:.2f}", "'d'"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\udce9", "must be a valid string, unable to parse raw data as a unicode string"),
        ("x", "has 'x', which the tokenizer does not know; use only characters of the"),
    ],
)
def test_refusals(tmp_path, text, message):
    save(tmp_path / "a.ckpt", LanguageModel(tiny_gpt(), build(TokenizerConfig(kind="char"), ["abc \n"])))
    assert_refused(run(tmp_path, "ckpt=a.ckpt", f"text={text}"), message)
    assert not (tmp_path / "out").exists()
