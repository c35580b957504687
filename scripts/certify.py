"""Certifies that a model sees no future, and all of its past:  python scripts/certify.py ckpt=latest

Also a fresh model (model=nano model.window=64), a `transformers` model (hf=FOLDER) and any function from ids to logits
(call=package.module:function vocab_size=V context_length=T). Prints a table, and writes all figures and a plot into a
folder. Of a checkpoint it first says whether the certificate that the file holds belongs to these weights, config, data
and code, and it also certifies the loss and the windows of the run. Exit status, of the certificate computed now: 0:
certified; 1: not certified; 2: wrong settings; 3: the model raises an exception or returns no logits; 4: certified, but
a leak of the size of rounding would pass too.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.cache import keep_compiled_code
from tril.data.settings import build, strict_settings
from tril.model.runs import find_checkpoint, run_folder
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import UserError, fail, pick_device, user_errors, writable
from tril.scripts.cli.typed import Typed

if TYPE_CHECKING:
    from tril.model.causality.certificate import Certificate

KINDS = ("ckpt", "hf", "call")
TEXTS = (*KINDS, "out")  # keys whose value is text as it was typed
SIZES = ("vocab_size", "context_length", "receptive_field")  # of a callable


@dataclass(frozen=True, config=strict_settings())
class CertifyConfig:
    """Settings, as in configs/certify.yaml; the grids check the sizes."""

    model: dict
    ckpt: str | None = None
    hf: str | None = None
    call: str | None = None
    vocab_size: int | None = None
    context_length: int | None = None
    receptive_field: int | None = None
    compile: bool = False
    exhaustive: bool = False
    device: str = "auto"
    out: str | None = None

    @model_validator(mode="after")
    def _check_combinations(self):
        if self.call is None and any(getattr(self, key) is not None for key in SIZES):
            raise ValueError(f"{', '.join(SIZES)} go with call=...; of a fresh model set model.vocab_size and so on")
        if self.compile and (self.hf or self.call) is not None:
            raise ValueError("compile=true needs one of Tril's own models; a function of call= may compile itself")
        return self


@entry("certify", TEXTS)
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():
        settings = build(CertifyConfig, cfg)
        models = [f"{kind}={getattr(settings, kind)}" for kind in KINDS if getattr(settings, kind) is not None]
        models += [f"{each.key}={each.value}" for each in typed if models and each.key.startswith("model")]
        if len(models) > 1:
            raise ValueError(f"{' and '.join(models)} name several models; keep one")
        checkpoint = find_checkpoint(settings.ckpt) if settings.ckpt is not None else None
    keep_compiled_code()
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # intended on a CPU
    # Importing torch takes a second, so wrong settings are reported before.
    from tril.model.causality.case_processes import certify_grid
    from tril.model.causality.certificate import certify
    from tril.model.checkpoint import one_line
    from tril.model.training.hardware import keep_freed_memory

    with model_errors(), user_errors():
        device = pick_device(settings.device)
        name, cases, origin, pipeline = subject(settings, checkpoint, device, typed.get("model") or "nano")
        default = run_folder(checkpoint) if checkpoint else Path("outputs/causality", Path(name).name.replace(":", "-"))
        folder = writable(settings.out or default, "out")
    if device == "cpu":
        keep_freed_memory()
    if origin:
        print(f"stored certificate: {one_line(origin['stored_certificate']['text'])}", flush=True)
    with model_errors():  # its own code may fail in any case
        run_cases: Any = certify_grid if callable(cases) else certify
        certificate = run_cases(name, cases, progress=lambda case: print(case, file=sys.stderr, flush=True))
        if pipeline is not None:
            print("loss and windows of the run", file=sys.stderr, flush=True)
            certificate.add(pipeline())
    report(certificate, origin, folder)
    sys.exit(1 if not certificate.passed else 4 if certificate.undecided else 0)


@contextlib.contextmanager
def model_errors() -> Iterator[None]:
    """Ends the command with status 3 and one line if the model under test fails."""
    from tril.model.causality.case import ModelError

    try:
        yield
    except UserError as error:
        if not isinstance(error.__cause__, ModelError):
            raise
        fail(error, status=3)
    except ModelError as error:
        fail(error, status=3)


def subject(
    settings: CertifyConfig, checkpoint: Path | None, device: str, preset: str
) -> tuple[str, Any, dict, Callable[[], "Certificate"] | None]:
    """The name of the model, its cases or a function that returns their builders, and of a checkpoint what
    causality.json says about it and the certificate of its loss and windows.
    """
    options = {"device": device, "exhaustive": settings.exhaustive}
    if settings.hf is not None:
        from tril.model.causality.grids.transformers_grid import transformers_cases
        from tril.model.interop.hf_folder import stored_certificate

        stored = stored_certificate(Path(settings.hf))  # of an exported folder
        origin = {} if stored is None else {"stored_certificate": stored}
        return settings.hf, transformers_cases(settings.hf, **options), origin, None
    if settings.call is not None:
        from tril.model.causality.grids.callable_grid import Sizes, callable_cases

        sizes = Sizes(**{key: getattr(settings, key) for key in SIZES})
        return settings.call, callable_cases(settings.call, sizes, **options), {}, None
    from tril.model.causality.grids.gpt_grid import FRESH_VOCABULARY, gpt_case_builders
    from tril.model.config import GPTConfig

    if settings.compile:
        from tril.model.training.hardware import check_compiler

        check_compiler(device)
    options["compile"] = settings.compile
    if checkpoint is not None:
        from tril.model.checkpoint import Checkpoint, verdict
        from tril.scripts.cli.run_pipeline import certify_pipeline

        stored = Checkpoint.read(checkpoint)
        model, origin = stored.language_model().model, {"stored_certificate": verdict(stored)}
        cases = functools.partial(gpt_case_builders, model.config, model.state_dict(), **options)
        return str(checkpoint), cases, origin, lambda: certify_pipeline(model.to(device), stored.entry())
    vocab_size = settings.model["vocab_size"] or FRESH_VOCABULARY
    config = build(GPTConfig, settings.model | {"vocab_size": vocab_size}, "model")
    return preset, functools.partial(gpt_case_builders, config, **options), {}, None


def report(certificate, origin: dict, folder: Path) -> None:
    """Prints the certificate; writes causality.json and causality.png."""
    from tril.model.atomic_files import write_json
    from tril.model.causality.plot import plot

    write_json(folder / "causality.json", certificate.to_dict() | origin)
    plot(folder / "causality.png", certificate)
    print(certificate)
    print(f"{folder}: causality.json, causality.png", flush=True)


if __name__ == "__main__":
    main()
