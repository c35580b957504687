"""Continues a run: its settings, its checkpoint, and what must not have changed since."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from tril.model.runs import ROOTS, find_checkpoint, new_folder, relocate, run_folder
from tril.scripts.common.cli import task_overrides

if TYPE_CHECKING:
    from tril.data.datamodule import TextDataModule
    from tril.model.gpt import GPT

CHANGEABLE_MODEL_KEYS = {"backend", "embd_dropout", "attn_dropout", "resid_dropout"}
TOP_LEVEL_KEYS = ("resume", "seed", "compile", "output_dir", "allow_targets")  # of the command line


def choose_folder(resume: str | None) -> str:
    """Hydra's run folder: a new outputs/DATE/TIME, or the folder of the resumed run."""
    if resume is not None:
        try:
            return str(run_folder(find_checkpoint(resume, prefer=("last",))))
        except FileNotFoundError:
            pass  # train() reports it in one line
    return str(new_folder(ROOTS[0]))


def resolve_resume(cfg: DictConfig) -> tuple[DictConfig, Path | None]:
    """The settings of the run and the checkpoint that it starts from.

    With `resume` these are the settings in the run's folder, changed by the keys of the command line. Saved values are
    literal text, never interpolations, since the folder can come from somebody else.

    Raises:
        ValueError: an override that replaces a whole group, or a damaged config.yaml.
        OSError: no checkpoint or no config.yaml.
    """
    if cfg.resume is None:
        return cfg, None
    checkpoint = find_checkpoint(cfg.resume, prefer=("last",))
    path = run_folder(checkpoint) / "config.yaml"
    saved = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(saved, dict) or not isinstance(saved.get("output_dir"), str):
        raise ValueError(f"{path} does not have the settings of a run; restore it, or start a new run")
    saved = relocate(saved, saved["output_dir"], cfg.output_dir)  # the folder may have been moved or copied
    saved |= {"causality": saved.get("causality", OmegaConf.to_container(cfg.causality))}  # not in older versions
    saved |= {"allow_targets": None}  # only the command line allows targets
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
    return merged, checkpoint


def literal(value: Any) -> Any:
    """The plain containers with every `${` escaped, so that OmegaConf reads it as text."""
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def checkpoint_payload(model: "GPT", data: "TextDataModule", checkpoint: Path | None) -> dict[str, Any]:
    """The "tril" entry of the run's checkpoints, see `model.checkpoint.payload`.

    Raises:
        ValueError: the model or the data differ from those of the resumed `checkpoint`.
    """
    from tril.model.checkpoint import payload, read
    from tril.model.config import GPTConfig

    new = payload(model, data.tokenizer, eot=data.tokenizer_config.eot, data=data.meta)
    if checkpoint is None:
        return new
    old = read(checkpoint)["tril"]
    # Through GPTConfig, since checkpoints of older versions lack fields and have other values of the same meaning.
    for name, value in GPTConfig(**old["config"]).to_dict().items():
        if name not in CHANGEABLE_MODEL_KEYS and new["config"][name] != value:
            chosen = f"model.{name}={new['config'][name]}"
            raise ValueError(f"{chosen} must be {value}, as in {checkpoint}; leave it out, or start a new run")
    prints = [entry["data"]["fingerprint"] for entry in (new, old)]
    if prints[0] != prints[1]:
        cause = "the text, its split or its tokenizer changed; restore them, or start a new run"
        raise ValueError(
            f"the data (fingerprint {prints[0][:12]}) must be those of {checkpoint} ({prints[1][:12]}): {cause}"
        )
    return new
