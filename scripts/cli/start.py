"""What a run starts from: random weights, the checkpoint of a run that it continues, or another model (`init_from`).

The folder of a run can come from somebody else, so its settings are data: plain values of known settings. A `_target_`,
which names code, counts only on the command line and in configs/.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tril.data.settings import typed as as_typed
from tril.model.runs import SETTINGS, Run, find_checkpoint, newest, run_folder
from tril.scripts.cli.app import CommandLine
from tril.scripts.cli.config import FOLDER, RunConfig, TrainCommand, flatten, is_given
from tril.scripts.cli.errors import user_errors
from tril.scripts.cli.process import RUN_FOLDER, process_rank

if TYPE_CHECKING:
    from tril.model.checkpoint import Checkpoint
    from tril.model.generation.language_model import LanguageModel

# A resumed run may differ from its checkpoint in these without a word; in others only if they are given.
FREE = (
    *("checkpoint.", "data.", "callbacks.progress", "callbacks.samples", "callbacks.heads"),
    *("trainer.accelerator", "trainer.log_every_n_steps"),
)
OF_THE_WINDOWS = ("data.batch_size", "data.document_mask")  # these are compared too
# They make other weights or another order of the text, so they cannot change at all; a model's others neither.
FIXED = ("model.", "optim.kind")
FOR_TRAINING = ("backend", "checkpoint_activations", "embd_dropout", "attn_dropout", "resid_dropout")  # of a model


@dataclass(frozen=True)
class Start:
    """Where a run starts: from random weights, unless one of the attributes is set.

    Attributes:
        checkpoint: the run goes on from it.
        lm: the run takes over its weights and its tokenizer.
        lineage: of the weights: "source", a path or name; "step", optimizer steps or None.
    """

    checkpoint: "Checkpoint | None" = None
    lm: "LanguageModel | None" = None
    lineage: dict[str, Any] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps that the run has made."""
        return 0 if self.checkpoint is None else self.checkpoint.step or 0

    @property
    def path(self) -> Path | None:
        """The checkpoint file that the run goes on from."""
        return None if self.checkpoint is None else self.checkpoint.path


def find_start(line: CommandLine[TrainCommand]) -> tuple[dict[str, Any], Start]:
    """The settings of a run as nested plain values, and where it starts.

    Raises:
        UserError: settings that contradict the start, or a start that cannot be read.
    """
    with user_errors():
        if line.own.resume is not None:
            return resume(line.own.resume, line.settings, line.given)
        if line.own.init_from is not None:
            from tril.scripts.cli.init_from import take_over

            return take_over(line.own.init_from, line.settings, line.given)
        return line.settings, Start()


def resume(source: str, composed: Mapping[str, Any], given: Mapping[str, str]) -> tuple[dict[str, Any], Start]:
    """The settings of a run that goes on, with those that are given in their place, and its checkpoint.

    Raises:
        ValueError: a setting that a run cannot change, or a damaged config.yaml or checkpoint.
        OSError: no checkpoint or no config.yaml.
    """
    from tril.model.checkpoint import Checkpoint, read_state

    changes = {key: value for key, value in given.items() if key != "resume"}
    for key, value in changes.items():
        if key not in ("seed", "compile", "logger") and ("." not in key or key == FOLDER):
            cause = "a run goes on in its folder with its own settings"
            remedy = "change single ones, such as trainer.max_steps=2000"
            raise ValueError(f"{key}={value} cannot be combined with resume: {cause}; {remedy}")
    if process_rank() > 0:
        source = os.environ.get(RUN_FOLDER, source)
    path = find_checkpoint(newest("run", SETTINGS).parent if source == "latest" else source, prefer=("last",))
    settings = read_saved(path)
    values = {key: value for key, value in flatten(settings).items() if value is not None}
    if code := [key for key in values if key.endswith("_target_") or key.startswith("logger.")]:
        remedy = f"remove it from {run_folder(path) / SETTINGS}, and give it on the command line if you trust it"
        raise ValueError(f"the saved {code[0]} is not taken from a saved run; {remedy}")
    for key in changes:
        copy_setting(key, composed, settings)
    state = read_state(path)
    if "loops" not in state:
        cause = "holds a model without the state of its training"
        raise ValueError(f"{path} {cause}; name the checkpoint of a run")
    checkpoint = Checkpoint.of(state, path)
    tokenizer = settings["data"].get("tokenizer", {})
    if tokenizer.get("kind") == "file" and not Path(str(tokenizer.get("path"))).is_file():
        from tril.scripts.cli.init_from import keep_tokenizer

        tokenizer["path"] = str(keep_tokenizer(checkpoint.tokenizer))  # the checkpoint has it too
    return settings, Start(checkpoint, lineage=checkpoint.lineage)


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
    new, old, written = resolved_settings(config), checkpoint.settings, flatten(config.to_dict())
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
            tell(f"warning: {name} is {new}, and was {old}, so results may differ", sys.stderr)


def resolved_settings(config: RunConfig) -> dict[str, Any]:
    """The settings as dotted keys and plain values, with what "auto" became."""
    assert config.hardware is not None
    return flatten(config.to_dict()) | {
        "compile": config.hardware.compile,
        "trainer.precision": config.hardware.precision,
        "trainer.accelerator": config.hardware.accelerator,
    }


def tell(line: str, file: TextIO | None = None) -> None:
    """Prints a line once, and not in every process of the run."""
    if process_rank() == 0:
        print(line, file=file, flush=True)
