"""Only allowed classes are instantiated, whatever a run folder names."""

from pathlib import Path

import pytest
import yaml
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf

from tril.model.training.callbacks.progress import Progress
from tril.model.training.callbacks.window_losses import WindowLosses
from tril.scripts.common import build_trainer
from tril.scripts.common.targets import RENAMED, find_target, instantiate

OLD_CONFIG = Path(__file__).parent / "old_config.yaml"
MARKS: list[str] = []


class Custom:
    """A class that is not on the list."""

    def __init__(self, mark: str = "custom") -> None:
        MARKS.append(mark)


@pytest.fixture(autouse=True)
def no_marks():
    MARKS.clear()


def test_callbacks_and_loggers_of_tril_and_lightning():
    progress = instantiate({"_target_": "tril.model.training.callbacks.progress.Progress", "lines": 3}, "callbacks.p")
    assert isinstance(progress, Progress) and progress.lines == 3
    for name in (
        "lightning.pytorch.callbacks.EarlyStopping",
        "lightning.pytorch.callbacks.early_stopping.EarlyStopping",
    ):
        stopping = instantiate({"_target_": name, "monitor": "val/loss"}, "callbacks.stop")
        assert isinstance(stopping, EarlyStopping)
    logger = {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "x"}
    assert isinstance(instantiate([logger], "logger")[0], CSVLogger)
    assert instantiate({"a": [1, {"b": None}], "c": "${x}"}, "callbacks.z") == {"a": [1, {"b": None}], "c": "${x}"}


@pytest.mark.parametrize(
    "target",
    [
        "torch.load",
        "os.system",
        "tests.scripts.common.test_targets.Custom",
        "lightning.pytorch.callbacks.os.system",
        "lightning.pytorch.callbacks.timer.time.sleep",
        "lightning.pytorch.callbacks.model_checkpoint.os.system",
        "lightning.pytorch.callbacks.model_checkpoint.shutil",
        "lightning.pytorch.callbacks.model_checkpoint",
        "lightning.pytorch.callbacks.__loader__",
        "lightning.pytorch.loggers.wandb.WandbLogger.__init__",
        "lightning.pytorch.callbacks_evil.Evil",
        "lightning.pytorch.callbacks.nothing.Nothing",
        "lightning.pytorch.trainer.Trainer",
        "tril.model.training.module.TrainingModule",
        "tril.model.training.summary.subprocess.run",
        "tril.model.training.loggers.os.system",
        "hydra.utils.call",
        "hydra.utils.instantiate",
        "builtins.eval",
        "eval",
        "",
        "${oc.env:HOME}",
        3,
        None,
        ["os.system"],
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda entry: entry,
        lambda entry: [entry],
        lambda entry: {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": {"deep": [entry]}},
    ],
    ids=["alone", "in a list", "in an argument"],
)
def test_other_targets_are_refused_by_name_at_any_depth(target, wrap):
    with pytest.raises(ValueError) as error:
        instantiate(wrap({"_target_": target, "f": "x"}), "callbacks.z")
    assert f"_target_={target} is not a callback or logger of Tril or Lightning" in str(error.value)
    assert f"add allow_targets=[{target}] to the command line" in str(error.value) and "\n" not in str(error.value)


def test_a_module_outside_the_packages_is_not_even_imported(tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text(
        "import tests.scripts.common.test_targets as t; t.MARKS.append('imported')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="evil_module.Evil is not a callback"):
        instantiate({"_target_": "evil_module.Evil"}, "callbacks.z")
    assert MARKS == []


@pytest.mark.parametrize("name", ["_partial_", "_args_", "_recursive_", "_convert_"])
def test_other_special_keys_are_refused(name):
    entry = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", name: True}
    with pytest.raises(ValueError, match=f"callbacks.z.{name} is not supported"):
        instantiate(entry, "callbacks.z")


def test_the_command_line_allows_a_target():
    name = "tests.scripts.common.test_targets.Custom"
    inner = {"_target_": name, "mark": "inner"}
    assert isinstance(instantiate({"_target_": name, "mark": [inner]}, "callbacks.z", [name]), Custom)
    assert MARKS[0] == "inner" and isinstance(MARKS[1][0], Custom)
    with pytest.raises(ValueError, match="nowhere.Class does not exist; correct it"):
        instantiate({"_target_": "nowhere.Class"}, "callbacks.z", ["nowhere.Class"])


def test_what_a_constructor_refuses_names_its_key():
    entry = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "mode": "minimal"}
    with pytest.raises(ValueError, match="^callbacks.stop: .*monitor"):
        instantiate(entry, "callbacks.stop")


def test_the_targets_of_an_old_config_resolve():
    """old_config.yaml was written by the version before the packages were renamed."""
    old = yaml.safe_load(OLD_CONFIG.read_text(encoding="utf-8"))
    replaced = ("best", "last")  # the run writes its checkpoints itself
    callbacks = {name: entry for name, entry in old["callbacks"].items() if name not in replaced}
    assert set(old["callbacks"]) - set(callbacks) == set(replaced)
    entries = {**callbacks, "logger": old["logger"]}
    found = {key: find_target(entry["_target_"], key, ()).__name__ for key, entry in entries.items()}
    assert found == {
        "causality": "CausalityCheck",
        "gc": "GarbageCollection",
        "windows": "WindowLosses",
        "heads": "HeadMetrics",
        "progress": "Progress",
        "samples": "Samples",
        "logger": "CSVLogger",
    }
    assert isinstance(instantiate(callbacks, "callbacks")["windows"], WindowLosses)
    for name in RENAMED:
        assert find_target(name, "callbacks.z", ()) is not None


@pytest.mark.parametrize("prefix", ["", "+"])
def test_targets_are_allowed_by_the_command_line_and_by_no_file(prefix, monkeypatch):
    cfg = OmegaConf.create({"allow_targets": ["torch.load"]})
    monkeypatch.setattr(build_trainer, "task_overrides", lambda: ["experiment=theirs", "model.dim=8"])
    with pytest.raises(ValueError, match=r"allow_targets=\['torch.load'\] must be set on the command line"):
        build_trainer.allowed_targets(cfg)
    monkeypatch.setattr(build_trainer, "task_overrides", lambda: [f"{prefix}allow_targets=[torch.load]"])
    assert build_trainer.allowed_targets(cfg) == ["torch.load"]
