"""A run that goes on, with the settings of its checkpoint.

A checkpoint can come from somebody else, so its settings are data: plain values of known settings. A `_target_`, which
names code, counts only on the command line and in configs/.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tril.data.settings import flatten, unflatten
from tril.model.runs import SETTINGS, SUMMARY, Run, find_checkpoint, newest
from tril.scripts.cli.app import Composed
from tril.scripts.cli.config import FOR_TRAINING, RunConfig, is_given, known_settings
from tril.scripts.cli.run import shared_folder

if TYPE_CHECKING:
    from tril.model.checkpoint import Checkpoint

OF_OPTIM = ("lr", "muon_lr", "lr_scale", "betas", "weight_decay", "muon_weight_decay", "momentum", "schedule")
MAY_CHANGE = (  # settings, and groups with all that is in them, that a resumed run takes from the command line
    *("trainer", "callbacks", "checkpoint", "logger", "compile", "data.path", "data.cache_dir"),
    *("data.batch_size", "data.val_batch_size"),  # of a process: their number may change
    *(f"optim.{name}" for name in OF_OPTIM),
    *(f"model.{name}" for name in FOR_TRAINING),
)


def resumed(source: str, composed: Composed) -> "tuple[RunConfig, Checkpoint]":
    """The settings of a run that goes on, with those that are given in their place, and its checkpoint.

    Args:
        source: latest, a run's folder or a checkpoint.

    Raises:
        ValueError: a setting that a run cannot change, or a damaged checkpoint.
        OSError: there is no checkpoint.
    """
    from tril.model.checkpoint import Checkpoint, read_state

    given = {key: text for key, text in composed.given.items() if key != "resume"}
    for key, text in given.items():
        if not is_given(MAY_CHANGE, key) or key in ("trainer", "callbacks"):  # a choice sets the whole group
            remedy = f"leave it out, or start a new run; resume goes with {', '.join(MAY_CHANGE)}"
            raise ValueError(f"{key}={text} cannot change in a run that goes on; {remedy}")
    source = shared_folder() or source
    path = find_checkpoint(newest("run", SETTINGS).parent if source == "latest" else source, prefer=("last",))
    state = read_state(path)
    if "loops" not in state or state.get("global_step") is None:
        raise ValueError(f"{path} holds a model without the state of its training; name the checkpoint of a run")
    checkpoint = Checkpoint.of(state, path)
    if code := [key for key in checkpoint.settings if key.startswith("logger") or "_target_" in key]:
        raise ValueError(f"the saved {code[0]} is not taken from a checkpoint; give it on the command line")
    # A given setting replaces all that is below it, and a callback that is off.
    kept = {
        k: v
        for k, v in checkpoint.settings.items()
        if not any(is_given([k], key) or is_given([key], k) for key in given)
    }
    settings = kept | {k: v for k, v in flatten(composed.settings).items() if is_given(given, k)}
    is_file, key = settings.get("data.tokenizer.kind") == "file", "data.tokenizer.path"
    if is_file and not Path(str(settings.get(key))).is_file():  # the checkpoint has it too
        from tril.scripts.cli.init_from import keep_tokenizer

        settings[key] = str(keep_tokenizer(checkpoint.tokenizer))
    return RunConfig.of(unflatten(settings), given), checkpoint


def check_text(checkpoint: "Checkpoint", fingerprint: str) -> None:
    """Raises ValueError if the prepared text is another one than that of the checkpoint."""
    if fingerprint != (before := str(checkpoint.data.get("fingerprint"))):
        differs = f"the data (fingerprint {fingerprint[:12]}) must be those of {checkpoint.path} ({before[:12]})"
        raise ValueError(f"{differs}: the text, its split or its tokenizer changed; restore them, or start a new run")


def is_finished(run: Run, step: int, steps: int, given: Mapping[str, str]) -> bool:
    """Whether a run that goes on from `step` has a summary and no step left; says so.

    Raises:
        ValueError: no step is left, and a setting is given that would need one.
    """
    if not (run.folder / SUMMARY).is_file() or run.summary.get("diverged"):
        return False
    limit = str(run.summary.get("stopped_early")).rpartition(" by ")[2] if step < steps else "trainer.max_steps"
    if step < steps and (limit not in known_settings() or is_given(given, limit)):  # by "a callback", or raised
        return False
    end = f"{run.folder} has stopped at step {step:,} by {limit}"
    if changed := [key for key in given if key != "resume"]:
        unused = f"{changed[0]}={given[changed[0]]} has no effect"
        raise ValueError(f"{unused}, since {end}; raise {limit} to continue it, or start a new run")
    print(f"{end}; it is unchanged", flush=True)
    return True
