"""Continues a run: finds its checkpoint and its settings."""

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tril.model.runs import (
    CHECKPOINTS,
    LAST,
    PREVIOUS,
    ROOTS,
    find_checkpoint,
    new_folder,
    newest_run,
    relocate,
    run_folder,
)
from tril.scripts.common.cli import UserError, flatten, plain, task_overrides
from tril.scripts.common.ranks import process_rank, shared_folder
from tril.scripts.common.saved_settings import as_typed, foreign, saved_settings

TOP_LEVEL_KEYS = ("resume", "seed", "compile", "output_dir", "allow_targets", "allow_changes")  # of the command line
THIS_COMMAND = ("resume", "output_dir", "allow_targets", "allow_changes")  # keys that are no settings of the run
LIGHTNING_ENTRIES = ("optimizer_states", "lr_schedulers", "loops", "callbacks", "global_step")
LATER_GROUPS = ("causality", "checkpoint")  # groups of configs/train.yaml that run folders of older versions lack
OLD_LOGS = ("lightning.pytorch.loggers.CSVLogger", "tril.model.training.loggers.RunLog")  # of metrics.csv, or none
OLD_LOGS += ("tril.model.training.loggers.no_logger", "model.training.loggers.no_logger")
VERSION_KEY, VERSION = "config_version", 2  # of config.yaml; since 2 trainer.val_check_interval counts optimizer steps
OLD_CHECKPOINTS = {"model.training.checkpoints.Checkpoint", "tril.model.training.checkpointing.Checkpoint"}


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run continues from: its file, and its content as `model.checkpoint.read` gives it.

    `changed` are the settings that differ from those in the run's folder.
    """

    path: Path
    content: dict[str, Any]
    changed: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps."""
        return self.content["global_step"]


def choose_folder(resume: str | None) -> str:
    """Hydra's run folder: a new outputs/DATE/TIME, or the folder of the resumed run; one for all processes."""
    return shared_folder(lambda: _choose(resume), ROOTS[0])


def _choose(resume: str | None) -> str:
    if resume is not None:
        try:
            return str(run_folder(_find(resume)))
        except FileNotFoundError:
            pass  # train() reports it in one line
    return str(new_folder(ROOTS[0]))


def chosen_folder(cfg: DictConfig) -> Path:
    """The folder of a run that Hydra composed; raises UserError if a setting replaces it."""
    if not isinstance(cfg.output_dir, str) or not cfg.output_dir:
        raise UserError(f"output_dir={cfg.output_dir} is for saved runs; choose the folder with hydra.run.dir=FOLDER")
    return Path(cfg.output_dir)


def resolve_resume(cfg: DictConfig) -> tuple[DictConfig, Resumed | None]:
    """The settings of the run and the checkpoint that it starts from.

    With `resume` these are the settings in the run's folder, changed by the keys of the command line. Saved values are
    literal text, never interpolations, since the folder can come from somebody else.

    Raises:
        ValueError: an override that replaces a whole group, or a damaged config.yaml or checkpoint.
        OSError: no checkpoint or no config.yaml.
    """
    if cfg.resume is None:
        if cfg.get("allow_changes") is not None:
            raise ValueError(f"allow_changes={cfg.allow_changes} has no effect without resume; leave it out")
        return cfg, None
    found = _find(cfg.output_dir if process_rank() > 0 else cfg.resume)  # rank 0 has chosen
    saved = _of_this_version(saved_settings(found), cfg)
    merged = DictConfig(literal(saved))
    for override in task_overrides():
        key = override.split("=")[0].lstrip("+~")
        if "." not in key and key not in TOP_LEVEL_KEYS:
            remedy = "change single keys, such as trainer.max_steps=2000"
            raise ValueError(f"{override} cannot be combined with resume, which keeps the run's own settings; {remedy}")
        if override.startswith("~"):
            group, _, name = key.rpartition(".")
            OmegaConf.select(merged, group).pop(name, None)
        else:
            value = OmegaConf.select(cfg, key)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            OmegaConf.update(merged, key, literal(value), force_add=True)
    settings, folder = plain(merged), Path(cfg.output_dir)
    if unknown := foreign(settings, folder, plain(cfg)):
        key, limit = next(iter(unknown)), f"is neither Tril's own nor in the run's folder {folder}"
        raise ValueError(f"the saved {key}={unknown[key]} {limit}; if you trust it, type {as_typed(unknown)}")
    old, new = flatten(saved), flatten(settings)
    changed = (
        key for key in {**old, **new} if key not in THIS_COMMAND and (key not in old or old[key] != new.get(key))
    )
    return merged, replace(_read(found, newest=cfg.resume == "latest"), changed=tuple(changed))


def settings_text(cfg: DictConfig) -> str:
    """The content of a run's config.yaml."""
    return f"{OmegaConf.to_yaml(cfg, resolve=True)}{VERSION_KEY}: {VERSION}\n"


def _find(resume: str) -> Path:
    if resume != "latest":
        return find_checkpoint(resume, prefer=("last",))
    path = newest_run() / CHECKPOINTS / LAST
    if not path.is_file():
        remedy = "start it again, or name the folder of another run"
        raise FileNotFoundError(f"the newest run, {run_folder(path)}, has no checkpoint yet; {remedy}")
    return path


def _of_this_version(saved: dict, cfg: DictConfig) -> dict:
    """The content of a run's config.yaml for its folder as it is now, with groups that came later from `cfg`."""
    if saved.pop(VERSION_KEY, 1) == 1:
        _count_steps(saved.get("trainer"))
    saved = relocate(saved, saved["output_dir"], cfg.output_dir)  # the folder may have been moved or copied
    saved = {name: OmegaConf.to_container(cfg[name]) for name in LATER_GROUPS} | saved
    saved |= {"allow_targets": None, "allow_changes": None, "init_from": None}  # only the command line has these
    if not isinstance(logger := saved.get("logger"), dict) or logger.get("_target_") in OLD_LOGS:
        saved["logger"] = {}
    elif "_target_" in logger:  # older versions had one logger, without a name
        saved["logger"] = {"wandb" if str(logger["_target_"]).endswith(".wandb_logger") else "saved": logger}
    if isinstance(callbacks := saved.get("callbacks"), dict):
        targets = {name: value.get("_target_") for name, value in callbacks.items() if isinstance(value, dict)}
        saved["callbacks"] = {name: x for name, x in callbacks.items() if targets.get(name) not in OLD_CHECKPOINTS}
    return saved


def _count_steps(trainer: object) -> None:
    """Validates after as many steps as the version did whose interval counted micro-batches, up to a whole step."""
    if isinstance(trainer, dict):
        interval, batches = trainer.get("val_check_interval"), trainer.get("accumulate_grad_batches")
        if isinstance(interval, int) and isinstance(batches, int) and batches > 1:
            trainer["val_check_interval"] = -(-interval // batches)


def _read(path: Path, *, newest: bool) -> Resumed:
    """Reads and verifies a checkpoint; `newest`: where it is damaged, the one before takes its place."""
    from tril.model.checkpoint import DamagedCheckpoint, read

    try:
        content = read(path)
    except DamagedCheckpoint as error:
        previous = path.with_name(PREVIOUS)
        if not newest or path.name != LAST or not previous.is_file():
            raise
        content = read(previous)
        logging.getLogger(__name__).warning("%s; continuing from %s", error, previous)
        path = previous
    missing = [name for name in LIGHTNING_ENTRIES if name not in content]
    if missing:
        cause = "it holds a model without the state of its training"
        raise ValueError(f"{path} has no {', '.join(missing)}: {cause}; name the checkpoint of a run")
    if "gradients" in content:
        cause = "an earlier version wrote it within an optimizer step, which this version cannot continue"
        raise ValueError(f"{path}: {cause}; use another checkpoint, or that version")
    return Resumed(path, content)


def literal(value: Any) -> Any:
    """The plain containers with every `${` escaped, so that OmegaConf reads it as text."""
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
