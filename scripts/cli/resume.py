"""A run that goes on: its settings, and the comparison with its checkpoint.

The folder of a run can come from somebody else, so its settings are data: plain values of known settings. A `_target_`,
which names code, counts only on the command line and in configs/.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.data.settings import typed as as_typed
from tril.model.runs import SETTINGS, SUMMARY, Run, find_checkpoint, newest, run_folder
from tril.scripts.cli.app import CommandLine
from tril.scripts.cli.config import FOLDER, FOR_TRAINING, RunConfig, TrainCommand, flatten, is_given, known_settings
from tril.scripts.cli.process import shared_source, warn

if TYPE_CHECKING:
    from tril.model.checkpoint import Checkpoint

# A resumed run may differ from its checkpoint in these without a word; in others only if they are given.
FREE = (
    *("checkpoint.", "data.", "callbacks.progress", "callbacks.samples", "callbacks.heads"),
    *("trainer.accelerator", "trainer.log_every_n_steps"),
)
OF_THE_WINDOWS = ("data.batch_size", "data.document_mask")  # these are compared too
FIXED = ("model.", "optim.kind")  # with others, the weights would be other weights


def resume(line: CommandLine[TrainCommand]) -> "tuple[dict[str, Any], Checkpoint]":
    """The settings of a run that goes on, with those that are given in their place, and its checkpoint.

    Raises:
        ValueError: a setting that a run cannot change, or a damaged config.yaml or checkpoint.
        OSError: no checkpoint or no config.yaml.
    """
    from tril.model.checkpoint import Checkpoint, read_state

    changes = {key: value for key, value in line.given.items() if key != "resume"}
    for key, value in changes.items():
        if key not in ("seed", "compile", "logger") and ("." not in key or key == FOLDER):
            cause = "a run goes on in its folder with its own settings"
            remedy = "change single ones, such as trainer.max_steps=2000"
            raise ValueError(f"{key}={value} cannot be combined with resume: {cause}; {remedy}")
    source = shared_source(str(line.own.resume))
    path = find_checkpoint(newest("run", SETTINGS).parent if source == "latest" else source, prefer=("last",))
    settings = read_saved(path)
    values = {key: value for key, value in flatten(settings).items() if value is not None}
    if code := [key for key in values if key.endswith("_target_") or key.startswith("logger.")]:
        remedy = f"remove it from {run_folder(path) / SETTINGS}, and give it on the command line if you trust it"
        raise ValueError(f"the saved {code[0]} is not taken from a saved run; {remedy}")
    for key in changes:
        copy_setting(key, line.settings, settings)
    state = read_state(path)
    if "loops" not in state:
        cause = "holds a model without the state of its training"
        raise ValueError(f"{path} {cause}; name the checkpoint of a run")
    checkpoint = Checkpoint.of(state, path)
    tokenizer = settings["data"].get("tokenizer", {})
    if tokenizer.get("kind") == "file" and not Path(str(tokenizer.get("path"))).is_file():
        from tril.scripts.cli.init_from import keep_tokenizer  # which imports tokenizers

        tokenizer["path"] = str(keep_tokenizer(checkpoint.tokenizer))  # the checkpoint has it too
    return settings, checkpoint


def copy_setting(key: str, source: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Copies the value of a dotted key between nested settings; None where `source` lacks it, as after ~callbacks.X."""
    *groups, name = key.split(".")
    for group in groups:
        target[group] = dict(target.get(group) or {})  # None: a callback that is off
        source, target = source.get(group) or {}, target[group]
    target[name] = source.get(name)


def read_saved(checkpoint: Path) -> dict[str, Any]:
    """The content of the config.yaml of the run that wrote a checkpoint.

    Raises:
        FileNotFoundError: there is no config.yaml.
        ValueError: it is damaged.
    """
    folder = run_folder(checkpoint)
    path = folder / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist, so the data of {checkpoint} are unknown; name a run's folder")
    saved = Run(folder).settings
    if not isinstance(saved.get("data"), dict):
        raise ValueError(f"{path} does not have the settings of a run; restore it, or start a new run")
    return saved


def check_resumed(checkpoint: "Checkpoint", config: RunConfig, fingerprint: str, given: Mapping[str, str]) -> None:
    """Compares a run that goes on with its checkpoint. Other code or another torch is a warning.

    Args:
        fingerprint: of the prepared text.

    Raises:
        ValueError: the model, the text or a setting differs, and may not, or is not given on the command line.
    """
    import torch

    from tril.model.checkpoint import code_sha256

    if fingerprint != (before := checkpoint.data["fingerprint"]):
        differs = f"the data (fingerprint {fingerprint[:12]}) must be those of {checkpoint.path} ({before[:12]})"
        raise ValueError(f"{differs}: the text, its split or its tokenizer changed; restore them, or start a new run")
    new, old, written = config.resolved(), checkpoint.settings, flatten(config.to_dict())
    for key in dict.fromkeys([*old, *new]):
        before, now = old.get(key), new.get(key)
        if now == before or key.startswith(FREE) and key not in OF_THE_WINDOWS:
            continue
        differs = f"{key}={as_typed(now)} must be {as_typed(before)}, as in {checkpoint.path}"
        if key.startswith(FIXED) and key.removeprefix("model.") not in FOR_TRAINING:
            raise ValueError(f"{differs}; leave it out, or start a new run")
        if not is_given(given, key):
            raise ValueError(f"{differs}; to change it, add {key}={as_typed(written.get(key, now))}")
    before, now = (version.rpartition(".")[0] for version in (checkpoint.torch_version, torch.__version__))
    code_before, code = (checkpoint.code or "")[:12], code_sha256()[:12]
    for name, old, new in (("torch", before, now), ("the code of Tril", code_before, code)):
        if old != new:
            warn(f"{name} is {new}, and was {old}, so results may differ")


def is_finished(run: Run, step: int, steps: int, given: Mapping[str, str]) -> bool:
    """Whether a run that goes on from `step` has a summary and no step left; says so.

    Raises:
        ValueError: no step is left, and a setting is given that would need one.
    """
    if not (run.folder / SUMMARY).is_file() or run.summary.get("diverged"):
        return False
    end, limit = f"finished its {step:,} steps", "trainer.max_steps"
    if step < steps:
        limit = str(run.summary.get("stopped_early")).rpartition(" by ")[2]  # a setting, or "a callback"
        if limit not in known_settings() or is_given(given, limit):
            return False
        end = f"stopped at step {step:,} by {limit}"
    if changed := [key for key in given if key != "resume"]:
        remedy = f"raise {limit} to continue it, or start a new run"
        raise ValueError(f"{run.folder} has {end} without {changed[0]}; {remedy}")
    print(f"{run.folder} has {end}; it is unchanged", flush=True)
    return True
