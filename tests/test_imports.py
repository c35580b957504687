"""Who may import whom: the layout in docs/design.md, enforced on the source text."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ("model", "data", "scripts", "train", "tests")
FILES = sorted(path for folder in ("model", "data", "scripts") for path in (ROOT / folder).rglob("*.py")) + [ROOT / "train.py"]

# Each file of a chain may import from those before it, never from those after it.
CHAINS = (
    ("model.masks", "model.backends", "model.attention", "model.gpt", "model.generate", "model.text", "model.checkpoint", "model.training"),
    ("model.rope", "model.attention"),
    ("model.norm", "model.attention"),
    ("model.kv_cache", "model.attention"),
    ("model.backends", "model.gpt_config", "model.gpt"),
    ("model.sampling", "model.decode", "model.generate"),
    ("model.gpt", "model.decode"),
    ("model.training.schedule", "model.training.optim", "model.training.module"),
    ("model.checkpoint", "model.analysis", "model.training"),
    ("model.analysis.reach", "model.analysis.cell", "model.analysis.checks", "model.analysis.causality"),
    ("model.analysis.cell", "model.analysis.certificate", "model.analysis.causality"),
    ("model.analysis.canary", "model.analysis.certificate"),
    ("model.analysis.certificate", "model.analysis.picture"),
    ("model.analysis.reach", "model.analysis.subject", "model.analysis.cell"),
    ("model.analysis.subject", "model.analysis.canary", "model.analysis.causality"),
    ("model.analysis.subject", "model.analysis.probe", "model.analysis.checks"),
    ("model.analysis.causality", "model.analysis.callables"),
    ("model.analysis.causality", "model.analysis.transformers_models"),
    ("model.analysis.honest", "model.analysis.control"),
    ("model.analysis.statistics", "model.analysis.sweeps", "model.analysis.report_figures", "model.analysis.report"),
    ("model.analysis.observe", "model.analysis.head_scores", "model.analysis.heads_figures"),
    ("model.analysis.observe", "model.analysis.heads", "model.analysis.heads_figures"),
    ("model.analysis.statistics", "model.analysis.heads"),
    ("model.analysis.sweeps", "model.analysis.scaling", "model.analysis.scaling_figures"),
    ("model.training.callbacks", "model.training.heads"),
    ("model.training.callbacks", "model.training.causality"),
    ("model.training.hardware", "model.training.estimate", "model.training.kernels"),
    ("data.cache", "data.sources", "data.files", "data.hub", "data.packing", "data.datamodule"),
    ("data.hub", "data.settings"),
    ("data.tokenizer", "data.packing"),
    ("data.words", "data.packing"),
    ("data.windows", "data.datamodule"),
)
LIGHTNING = {
    "model.training.module",
    "model.training.callbacks",
    "model.training.causality",
    "model.training.checkpoints",
    "model.training.heads",
    "model.training.loggers",
    "data.datamodule",
    "scripts.benchmarks.training",
    "train",
}
SHARED = {"scripts.cli", "scripts.plan", "scripts.grid", "scripts.sweep", "scripts.cell", "scripts.measured", "scripts.tables"}  # by train.py and the scripts
LAZY = ("datasets", "jinja2", "matplotlib", "scipy", "transformers", "wandb", "pyarrow", "huggingface_hub")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, stands at the top level of the file) of every import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module, id(node) in top))
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_follow_the_layout(path):
    name = module_name(path)
    package = name.split(".")[0]
    for target, at_top in imports(path):
        where = f"{name} imports {target}"
        if package in ("model", "data"):
            assert target.split(".")[0] not in set(HOUSE) - {package}, where
            assert target.split(".")[0] not in ("hydra", "omegaconf"), where
        else:
            own = name == "scripts.bench" or within(name, "scripts.benchmarks")  # its parts are its own
            assert not within(target, "scripts") or target in SHARED or own and within(target, "scripts.benchmarks"), where
            assert not within(target, "train"), where
        if within(target, "lightning"):
            assert name in LIGHTNING and not (name == "train" and at_top), where
        if target.split(".")[0] in LAZY:
            assert not at_top, f"{where} at the top of the file"


@pytest.mark.parametrize("chain", CHAINS, ids=" <- ".join)
def test_chains_run_one_way(chain):
    for path in FILES:
        name = module_name(path)
        places = [i for i, member in enumerate(chain) if within(name, member)]
        if not places:
            continue
        for target, _ in imports(path):
            for later in chain[places[0] + 1 :]:
                assert not within(target, later), f"{name} imports {target}, which stands above it"


def test_every_file_stays_readable():
    for path in FILES + sorted((ROOT / "tests").rglob("*.py")):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 300, f"{path} holds more than one concept"
