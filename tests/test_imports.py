"""Who may import whom: the layout in docs/design.md, enforced on the source text."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for folder in ("model", "data", "scripts") for path in (ROOT / folder).rglob("*.py")) + [
    ROOT / "train.py"
]

# Each file of a chain may import from those before it, never from those after it.
CHAINS = (
    (
        "model.masks",
        "model.backends",
        "model.attention",
        "model.gpt",
        "model.generation",
        "model.checkpoint",
        "model.causality",
        "model.training",
    ),
    ("model.rope", "model.attention"),
    ("model.norm", "model.attention"),
    ("model.kv_cache", "model.attention"),
    ("model.backends", "model.config", "model.gpt"),
    (
        "model.generation.sampling",
        "model.generation.step",
        "model.generation.generate",
        "model.generation.language_model",
    ),
    ("model.checkpoint", "model.heads", "model.training"),
    ("model.training.schedule", "model.training.optim", "model.training.module"),
    (
        "model.causality.receptive_field",
        "model.causality.subject",
        "model.causality.case",
        "model.causality.checks",
        "model.causality.grids",
    ),
    ("model.causality.case", "model.causality.certificate", "model.causality.grids"),
    ("model.causality.canary", "model.causality.certificate", "model.causality.plot"),
    ("model.causality.subject", "model.causality.canary", "model.causality.grids"),
    ("model.causality.subject", "model.causality.attention_probe", "model.causality.checks"),
    ("model.causality.grids.gpt_grid", "model.causality.grids.callable_grid"),
    ("model.causality.grids.gpt_grid", "model.causality.grids.transformers_grid"),
    ("model.causality.prefix_loss", "model.causality.mask_control"),
    ("model.heads.attention_maps", "model.heads.scores", "model.heads.head_plots"),
    ("model.heads.attention_maps", "model.heads.ablation", "model.heads.head_plots"),
    ("model.training.callbacks.metrics", "model.training.callbacks.head_metrics"),
    ("model.training.hardware", "model.training.run_estimate", "model.training.attention_kernels"),
    ("data.cache", "data.sources", "data.prepare", "data.datamodule"),
    ("data.sources.base", "data.sources.files", "data.sources.hub", "data.config"),
    ("data.tokenizer", "data.prepare"),
    ("data.words", "data.prepare"),
    ("data.batches", "data.datamodule"),
    ("scripts.common", "scripts.ablation"),
    ("scripts.common", "scripts.benchmarks"),
    ("scripts.ablation.statistics", "scripts.ablation.results", "scripts.ablation.figures", "scripts.ablation.report"),
    ("scripts.ablation.results", "scripts.ablation.scaling_law", "scripts.ablation.scaling_plots"),
)
LIGHTNING = {
    "model.training.module",
    "model.training.callbacks",
    "model.training.checkpointing",
    "model.training.loggers",
    "data.datamodule",
    "scripts.benchmarks.training_speed",
    "train",
}
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
    return [(name.removeprefix("tril."), at_top) for name, at_top in found]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_follow_the_layout(path):
    name = module_name(path)
    package = name.split(".")[0]
    for target, at_top in imports(path):
        where = f"{name} imports {target}"
        if package in ("model", "data"):
            assert target.split(".")[0] not in {"model", "data", "scripts", "train", "tests"} - {package}, where
            assert target.split(".")[0] not in ("hydra", "omegaconf"), where
        elif within(target, "scripts"):
            shared = within(target, "scripts.common") or within(target, "scripts.ablation")
            own = name == "scripts.bench" or within(name, "scripts.benchmarks")  # its parts are its own
            assert shared or own and within(target, "scripts.benchmarks"), where
        assert not within(target, "train"), where
        if within(target, "lightning"):
            assert any(within(name, owner) for owner in LIGHTNING) and not (name == "train" and at_top), where
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
