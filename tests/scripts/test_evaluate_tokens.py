"""evaluate.py text=...: the bits of each token against a loop over prefixes, and the page, read by an HTML parser."""

import json
import math
from html.parser import HTMLParser

import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.checkpoint import load, save
from tril.model.generation.language_model import LanguageModel
from tril.scripts.evaluate import main

T = 12  # context length of tiny_gpt
TEXT = "def caf\u00e9(x):\r\n\t<script>alert('\u6f22')</script> &lt; \x00<|endoftext|>"


class Reader(HTMLParser):
    """The tags of a page, and the title and text of each token."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.titles, self.texts = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "span":
            self.titles.append(dict(attrs)["title"])
            self.texts.append("")

    def handle_data(self, data):
        if self.tags[-1:] == ["span"]:
            self.texts[-1] += data


def run(folder, *arguments):
    return call(main, *arguments, "device=cpu", "out=out", cwd=folder, strict=True)


def test_the_bits_of_each_token(tmp_path):
    save(tmp_path / "a.ckpt", LanguageModel(tiny_gpt(vocab_size=320), build(TokenizerConfig(kind="byte"), ())))
    done = run(tmp_path, "ckpt=a.ckpt", f"text={TEXT}")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tokens.json", "tokens.html"}
    report = json.loads((tmp_path / "out" / "tokens.json").read_text(encoding="utf-8"))
    lm, content = load(tmp_path / "a.ckpt"), TEXT.encode()
    # Bytes one by one: <|endoftext|> in the text is text, and not the token.
    tokens, bits = [lm.eot_id, *(i for char in TEXT for i in lm.tokenizer.encode(char).ids)], []
    for target in range(1, len(tokens)):
        start = (target - 1) // T * T  # windows do not overlap
        with torch.no_grad():
            log_p = lm.model(torch.tensor([tokens[start:target]]))[0, -1].double().log_softmax(-1)
        bits.append(-log_p[tokens[target]].item() / math.log(2))
    rows, total, n = report["tokens"], sum(bits), len(content)
    assert [row["bits"] for row in rows] == pytest.approx(bits, abs=1e-4) and len(rows) == n
    assert "".join(row["text"] for row in rows) == TEXT
    assert (report["bits"], report["bits_per_byte"]) == pytest.approx((total, total / n), rel=1e-5)
    assert f"{total:,.1f} bits for {n} bytes and {n} tokens: {total / n:.4f} bits per byte" in done.stdout
    page = Reader((tmp_path / "out" / "tokens.html").read_text(encoding="utf-8"))
    assert page.titles == [f"{row['bits']:.2f} bits" for row in rows] and "script" not in page.tags
    shown = "".join(page.texts)
    assert "\\r\u21b5\n\u2192\t<script>alert('\u6f22\u25e6\u25e6')</script> &lt; \\x00<|endoftext|>" in shown


def test_a_text_with_unknown_characters_is_refused(tmp_path):
    save(tmp_path / "a.ckpt", LanguageModel(tiny_gpt(), build(TokenizerConfig(kind="char"), ["abc \n"])))
    assert_refused(run(tmp_path, "ckpt=a.ckpt", "text=x"), "has 'x', which the tokenizer does not know; use only")
    assert_refused(run(tmp_path, "ckpt=a.ckpt", "text=a", "part=all"), "part=all has no effect without text=null")
    assert not (tmp_path / "out").exists()
