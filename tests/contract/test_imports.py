"""The contract knows Tril by its public names only."""

import ast
import re
from pathlib import Path

import pytest

PUBLIC = {
    "tril": {"train", "load"},
    "tril.model": {
        "GPT", "GPTConfig", "MultiHeadAttention", "attention", "attention_weights", "causal_mask", "load",
    },
    "tril.model.causality": {"certify", "assert_causal", "certify_loss"},
    "tests.contract": {"harness"},
}  # fmt: skip
OWN = ("tril", "tests")  # any other module is a library
FILES = sorted(Path(__file__).parent.glob("*.py"))
ANY_NAME = ("harness.py", "defects.py")  # the first starts the commands, the second edits source files


@pytest.mark.parametrize("path", [path for path in FILES if path.name not in ANY_NAME], ids=lambda path: path.name)
def test_only_public_names_are_imported(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        for module, name in imported(node):
            if module.partition(".")[0] in OWN and not module.startswith("tests.contract."):
                assert name in PUBLIC.get(module, ()), f"line {node.lineno}: {module}.{name} is not public"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # as in importlib and monkeypatch
            for name in re.findall(r"\btril(?:\.\w+)+", node.value):
                module, _, last = name.rpartition(".")
                known = name in PUBLIC or last in PUBLIC.get(module, ())
                assert known, f"line {node.lineno}: {name} is not public"


def imported(node: ast.AST) -> list[tuple[str, str]]:
    if isinstance(node, ast.Import):
        return [(alias.name, "") for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [(node.module or "", alias.name) for alias in node.names]
    return []
