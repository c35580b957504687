"""The contract knows Tril by its public names only."""

import re
from pathlib import Path

import pytest

PUBLIC = {
    "tril.train": ("train",),
    "tril.model": "GPT GPTConfig MultiHeadAttention causal_mask load".split(),
    "tril.model.attention": ("attention", "attention_weights"),
    "tril.model.causality": ("certify", "assert_causal", "certify_loss"),
}
ALLOWED = {*PUBLIC, *(f"{module}.{name}" for module, names in PUBLIC.items() for name in names)}
OTHERS = ("harness.py", "bad_input.py")  # which know the commands
FILES = [path for path in sorted(Path(__file__).parent.glob("*.py")) if path.name not in OTHERS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_public_names_are_imported(path):
    text = path.read_text("utf-8")
    names = re.findall(r"\btril(?:\.\w+)+", text)  # also in strings, as for importlib and monkeypatch
    for module, imported in re.findall(r"^ *from (\S+) import (.+)", text, re.MULTILINE):
        names += [f"{module}.{name}" for name in re.findall(r"\w+", imported.partition("#")[0])]
    hidden = re.compile(r"\.|tril\b|tests\.(?!contract\.|oracles|foreign)")
    assert not [name for name in names if hidden.match(name) and name not in ALLOWED]
