"""Certifies that a model is causal:  tril certify ckpt=latest

Also a fresh model (model=nano model.window=64), a `transformers` model (hf=FOLDER) and any function from ids to logits
(call=package.module:function vocab_size=V context_length=T). Prints the verdict, and writes all figures into
a folder. For a checkpoint, it first prints whether the stored certificate matches these weights, config, data and
code, and it also certifies a training step of the run. Exit status, of the certificate computed now:
0: causal; 1: not causal; 2: wrong settings; 3: the model raises an exception or returns no logits; 4: inconclusive:
a leak of the size of rounding would pass too.
"""

import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import build, setting, strict_settings
from tril.model.runs import find_checkpoint, run_folder
from tril.scripts.cli.app import Composed, command
from tril.scripts.cli.config import refuse_unused
from tril.scripts.cli.errors import check_writable, fail, printed_too, user_errors, writable

if TYPE_CHECKING:
    from tril.model.causality.model import Model
    from tril.model.checkpoint import Checkpoint

KINDS = ("ckpt", "hf", "call")
FRESH_VOCABULARY = 128  # of a fresh model, which needs no tokenizer: the checks are about positions


@dataclass(frozen=True, config=strict_settings())
class CertifyCommand:
    """What is certified: a fresh model of the group `model`, or another one. `as_model` checks the sizes."""

    ckpt: str | None = setting(
        None, "a checkpoint file, a run's folder, or latest; first says what the certificate in it belongs to"
    )
    hf: str | None = setting(
        None, "a model of `transformers`: a folder, a config.json alone (random weights), or a name on the hub"
    )
    call: str | None = setting(
        None, "package.module:function, any callable from ids (B, T) to logits (B, T, V); needs the next two"
    )
    vocab_size: int | None = setting(None, "of call: V", needs="call", lt=2**31)
    context_length: int | None = setting(None, "of call: largest T", needs="call", lt=2**31)
    receptive_field: int | None = setting(
        None, "positions before its own that each output depends on; null: the certificate states it", needs="call"
    )
    compile: bool = setting(
        False, "test the compiled model too; not with hf or call (on a CPU: one more minute, and a C++ compiler)"
    )
    budget_seconds: float = setting(
        5.0,
        "time of the certificate; the checks at the full context always run, and further ones until it is over",
        ge=0,
    )
    device: str = setting("auto", "auto | cpu | cuda | mps")
    out: str | None = setting(
        None, "folder for causality.json; null: the checkpoint's run, else outputs/causality/NAME"
    )

    @model_validator(mode="after")
    def _check_combinations(self):
        if self.compile and (self.hf or self.call) is not None:
            raise ValueError("compile=true needs one of Tril's own models; a function of call= may compile itself")
        return self


@command("certify", CertifyCommand, {"model": "nano"})
def main(settings: CertifyCommand, composed: Composed) -> None:
    with user_errors():
        models = [f"{kind}={getattr(settings, kind)}" for kind in KINDS if getattr(settings, kind) is not None]
        models += [f"{key}={value}" for key, value in composed.given.items() if models and key.startswith("model")]
        if len(models) > 1:
            raise ValueError(f"{' and '.join(models)} name several models; keep one")
        if not models and not any(key.partition(".")[0] == "model" for key in composed.given):
            raise ValueError(
                "no model is named; give ckpt=latest, model=nano, hf=FOLDER or call=package.module:function"
            )
        path = find_checkpoint(settings.ckpt) if settings.ckpt is not None else None
    # Importing torch takes a second, so wrong settings are reported before.
    from tril.model.atomic_files import write_json
    from tril.model.causality.certificate import certify_model
    from tril.model.causality.gpt import gpt_variants
    from tril.model.causality.model import ModelError
    from tril.model.causality.step import check_stored_step
    from tril.model.checkpoint import Checkpoint, verdict
    from tril.model.training.hardware import choose_compile, use_device

    try:
        with user_errors():
            device = use_device(settings.device)
            stored = Checkpoint.read(path) if path is not None else None
            model = model_of(settings, composed, stored, device)
            choose_compile(settings.compile, device)
            fresh = Path("outputs/causality", Path(model.name).name.replace(":", "-"))
            folder = Path(settings.out or (run_folder(path) if path else fresh))
            check_writable(folder, "out")  # before minutes of checks
        gpt: Any = model.function
        is_ours = settings.hf is None and settings.call is None
        variants = gpt_variants(gpt.config, compile=settings.compile) if is_ours else None
        origin = {}
        if stored is not None:
            origin["stored_certificate"] = verdict(stored)
            print(f"stored certificate: {origin['stored_certificate']}", flush=True)
        certificate = certify_model(model, variants, settings.budget_seconds)
        if stored is not None and certificate.passed:
            with certificate.running():
                check_stored_step(certificate, gpt, stored)
        with printed_too(f"{certificate}\n{folder}: causality.json"):
            write_json(writable(folder, "out") / "causality.json", certificate.to_dict() | origin)
    except ModelError as error:
        fail(error, status=3)
    else:
        sys.exit(1 if certificate.failures else 4 if certificate.undecided else 0)


def model_of(settings: CertifyCommand, composed: Composed, stored: "Checkpoint | None", device: str) -> "Model":
    """The model that the command line names."""
    from tril.model.causality.gpt import subject_of

    if settings.hf is not None:
        from tril.model.causality.interface import hf_model

        return hf_model(settings.hf, device=device)
    if settings.call is not None:
        sizes = {key: getattr(settings, key) for key in ("vocab_size", "context_length", "receptive_field")}
        return subject_of(load_function(settings.call), **sizes, device=device, name=settings.call)
    if stored is not None:
        return subject_of(stored.language_model().model, device=device, name=str(stored.path))
    from tril.model.config import GPTConfig
    from tril.model.gpt import GPT

    chosen = composed.settings["model"]
    config = build(GPTConfig, chosen | {"vocab_size": chosen["vocab_size"] or FRESH_VOCABULARY}, "model")
    refuse_unused([("model", config)], composed.given)
    gpt = GPT(config)
    return subject_of(gpt, device=device, name=composed.choices["model"])


def load_function(spec: str) -> Callable:
    """Imports package.module:function; the working directory is searched first."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        function: Any = pkgutil.resolve_name(spec)
    except (ImportError, AttributeError, ValueError) as error:
        remedy = f"name package.module:function, such as call=mymodels.bigram:logits; searched from {folder}"
        raise ValueError(f"call={spec} cannot be imported: {error}; {remedy}") from error
    if isinstance(function, type) or not callable(function):
        raise ValueError(f"call={spec} is not callable on ids; name a function or a module instance")
    return function


if __name__ == "__main__":
    main()
