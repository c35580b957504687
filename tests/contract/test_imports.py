"""The contract knows Tril by its public names only."""

import ast
import re
from pathlib import Path

import pytest

PUBLIC = {
    "tril": ("train", "load"),
    "tril.model": "GPT GPTConfig MultiHeadAttention attention attention_weights causal_mask load".split(),
    "tril.model.causality": ("certify", "assert_causal", "certify_loss"),
}
ALLOWED = {*PUBLIC, *(f"{module}.{name}" for module, names in PUBLIC.items() for name in names)}
FILES = [path for path in sorted(Path(__file__).parent.glob("*.py")) if path.name != "harness.py"]  # of the commands


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_public_names_are_imported(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # as in importlib and monkeypatch
            names = re.findall(r"\btril(?:\.\w+)+", node.value)
        private = [name for name in names if re.match(r"\.|tril\b|tests\.(?!contract\.)", name) and name not in ALLOWED]
        assert not private, f"line {node.lineno}: not public"
