"""What must not have changed since the checkpoint that a run continues."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.model.runs import SUMMARY, run_folder
from tril.scripts.common.cli import flatten, task_overrides
from tril.scripts.common.resume import Resumed
from tril.scripts.common.run_config import RunConfig

if TYPE_CHECKING:
    from torch import Tensor

    from tril.data.datamodule import TextDataModule
    from tril.model.gpt import GPT

CHANGEABLE_MODEL_KEYS = {"backend", "checkpoint_activations", "embd_dropout", "attn_dropout", "resid_dropout"}
FIXED_KEYS = {"optim.kind", "optim.scale_with_width", "optim.base_width", "optim.base_head_dim"}  # optimizer groups
FIXED_KEYS |= {"data.sources"}  # another mixture would give the windows of the data order another meaning
CHANGES = ("code", "torch")  # values of allow_changes


def checkpoint_payload(
    model: "GPT",
    data: "TextDataModule",
    config: RunConfig,
    resumed: Resumed | None,
    allowed: object = None,
    *,
    lineage: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The "tril" entry of the run's checkpoints: that of `model.checkpoint.payload`, "run" and "code", and "init_from".

    Args:
        allowed: the value of allow_changes.
        lineage: the source of the initial weights, see `tril.scripts.common.init_from`; a resumed run keeps its own.

    Raises:
        ValueError: model, data, settings or code differ from those of the resumed checkpoint.
    """
    from tril.model.checkpoint import payload

    new = payload(model, data.tokenizer, eot=data.config.tokenizer.eot, data=data.meta)
    new |= {"run": run_settings(config), "code": source_fingerprint()}
    if resumed is not None:
        old, path = resumed.content["tril"], resumed.path
        _check_data(new["data"], old.get("data"), path)
        _check_model(new["config"], old["config"], path)
        _check_shapes(model.state_dict(), resumed.content["state_dict"], path)
        _check_run(new["run"], old.get("run", {}), path)
        _check_versions(new, old, allowed, path)
        lineage = old.get("init_from")
    return new if lineage is None else new | {"init_from": lineage}


def finished_results(resumed: Resumed, config: RunConfig, folder: Path, trainer: Any) -> dict[str, float] | None:
    """The metrics in the summary of a run that makes no more steps, as `train` returns them; None: work is left.

    It says that nothing is done.

    Args:
        trainer: lightning.Trainer with the run's settings and callbacks.

    Raises:
        ValueError: no step is left, and a setting differs from those that the run was trained with.
    """
    from tril.model.training.callbacks.stop_reason import no_step_left
    from tril.model.training.summary import results_of

    end, remedy = f"finished its {resumed.step:,} steps", "raise trainer.max_steps"
    if resumed.step < config.steps:
        if (limit := no_step_left(trainer, resumed.content)) is None:
            return None
        end, remedy = f"stopped at step {resumed.step:,} by {limit}", f"raise {limit.partition('=')[0]}"
    if resumed.changed:
        done = f"{run_folder(resumed.path)} has {end} without {resumed.changed[0]}"
        raise ValueError(f"{done}; {remedy} to continue it, or start a new run")
    if not (folder / SUMMARY).is_file():  # the process ended before it was written
        return None
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    if summary.get("diverged"):
        return None
    print(f"{folder} has {end}; it is unchanged", flush=True)
    return results_of(summary)


def run_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that decide the steps of a run, apart from the model: dotted keys, plain values."""
    from tril.data.mixture import Mixture

    trainer, data = config.trainer, config.data
    settings = flatten({"optim": dataclasses.asdict(config.optim)})
    settings |= {f"trainer.{name}": getattr(trainer, name) for name in ("max_steps", "accumulate_grad_batches")}
    settings |= {f"data.{name}": getattr(data, name) for name in ("batch_size", "document_mask")}
    settings |= {"seed": config.top.seed}
    if isinstance(data.source, Mixture):
        settings |= {"data.sources": data.source.shares}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


def source_fingerprint() -> str:
    """sha256 of the source files that decide a run's results: train.py, model/ and data/."""
    from tril.model.binding import sources_sha256

    return sources_sha256("train.py", "model/**/*.py", "data/**/*.py")


def _check_model(new: dict[str, Any], old: dict[str, Any], path: Path) -> None:
    from tril.model.config import GPTConfig

    # Through GPTConfig, since checkpoints of older versions lack fields and have other values of the same meaning.
    for name, value in GPTConfig(**old).to_dict().items():
        if name not in CHANGEABLE_MODEL_KEYS and new[name] != value:
            raise ValueError(
                f"model.{name}={new[name]} must be {value}, as in {path}; leave it out, or start a new run"
            )


def _check_shapes(new: "dict[str, Tensor]", old: "dict[str, Tensor]", path: Path) -> None:
    for name, tensor in new.items():
        stored = old.get(f"model.{name}")
        if stored is None or stored.shape != tensor.shape:
            shape = None if stored is None else tuple(stored.shape)
            expected = f"must have the shape {tuple(tensor.shape)} of the model"
            raise ValueError(f"{path}: {name} has the shape {shape} and {expected}; use another checkpoint")


def _check_data(new: dict[str, Any], old: object, path: Path) -> None:
    expected = old.get("fingerprint") if isinstance(old, dict) else None
    if not isinstance(expected, str):
        raise ValueError(f"{path} does not say which data it was trained on; use another checkpoint")
    if new["fingerprint"] != expected:
        cause = "the text, its split or its tokenizer changed; restore them, or start a new run"
        raise ValueError(
            f"the data (fingerprint {new['fingerprint'][:12]}) must be those of {path} ({expected[:12]}): {cause}"
        )


def _check_run(new: dict[str, Any], old: dict[str, Any], path: Path) -> None:
    typed = {override.split("=")[0].lstrip("+") for override in task_overrides()}
    for key, value in old.items():
        if key not in new or new[key] == value:
            continue
        if key in FIXED_KEYS:
            raise ValueError(f"{key}={new[key]} must be {value}, as in {path}; leave it out, or start a new run")
        if key not in typed:
            raise ValueError(f"{key}={new[key]} must be {value}, as in {path}; to change it, type {key}={new[key]}")


def _check_versions(new: dict[str, Any], old: dict[str, Any], allowed: object, path: Path) -> None:
    """Versions may differ if allow_changes names them; a checkpoint of an older version does not have all of them."""
    allowed = [] if allowed is None else allowed
    if not isinstance(allowed, list) or not set(allowed) <= set(CHANGES):
        raise ValueError(
            f"allow_changes={allowed} must be a list of {', '.join(CHANGES)}, such as allow_changes=[code]"
        )
    version, expected = (_minor(entry.get("versions", {}).get("torch", "")) for entry in (new, old))
    if expected not in ("", version) and "torch" not in allowed:
        differ = f"torch {version} is not the {expected} of {path}"
        raise ValueError(f"{differ}, so results would differ; install that one, or add allow_changes=[torch]")
    if old.get("code") not in (None, new["code"]) and "code" not in allowed:
        differ = f"the source code of Tril has changed since {path}"
        raise ValueError(f"{differ}, so results could differ; restore it, or add allow_changes=[code]")


def _minor(version: str) -> str:
    """2.13.0+cpu -> 2.13"""
    return ".".join(version.split(".")[:2])
