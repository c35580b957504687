"""Writes a model for other programs:  python scripts/export.py ckpt=latest to=hf out=FOLDER   or  to=gguf out=FILE.gguf

The folder is for AutoModelForCausalLM and AutoTokenizer, without custom code: a GPT-2, Llama or Qwen3 class,
safetensors, the tokenizer, a model card, and certificate.json with the stored causality certificate and the sha256 of
each tensor. Before it gets its name, `transformers` loads it, and its logits and greedy text are compared with those of
Tril. The file is for llama.cpp; every tensor of it is read back and compared. Exit status: 0: written; 1: the
comparison fails, and nothing is written; 2: wrong settings, or a model that the format does not express.
"""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.data.settings import build, strict_settings
from tril.model.runs import SUMMARY, find_checkpoint, run_folder
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import check_writable, fail, user_errors
from tril.scripts.cli.typed import Typed

if TYPE_CHECKING:
    from tril.model.checkpoint import Checkpoint
    from tril.model.generation.language_model import LanguageModel

TEXT_KEYS = ("ckpt", "out")


@dataclass(frozen=True, config=strict_settings())
class ExportConfig:
    """Settings, as in configs/export.yaml."""

    ckpt: str
    to: Literal["hf", "gguf"]
    out: str | None
    license: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]*$", max_length=60)] | None


@entry("export", TEXT_KEYS)
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():
        settings = build(ExportConfig, cfg)
        checkpoint = find_checkpoint(settings.ckpt)
    if settings.to == "gguf":
        export_gguf(settings, checkpoint)
    else:
        export_hf(settings, checkpoint)


def export_gguf(settings: ExportConfig, checkpoint: Path) -> None:
    """Writes a GGUF file."""
    with user_errors():
        file = new_file(settings.out)
        if settings.license is not None:
            raise ValueError(f"license={settings.license} is for to=hf, whose folder has a model card; leave it out")
    from tril.model.atomic_files import atomic_path
    from tril.model.checkpoint import load
    from tril.model.interop.gguf_file import difference, require_gguf, write_gguf

    try:
        with user_errors():
            require_gguf()
            lm = load(checkpoint)
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(file) as part:
                write_gguf(part, lm, file.stem)
                if (problem := difference(part, lm)) is not None:
                    raise DiffersError(problem)
    except DiffersError as error:
        fail(f"{checkpoint} was not exported: the file has {error}", status=1)
    print(f"{file}: GGUF in float32, every tensor equal to {checkpoint}", flush=True)


class DiffersError(Exception):
    """What was written is not the model."""


def export_hf(settings: ExportConfig, checkpoint: Path) -> None:
    """Writes a folder of `transformers`."""
    with user_errors():
        folder = new_folder(settings.out)
    # Importing torch takes a second, so wrong settings are reported before.
    from tril.model.checkpoint import Checkpoint
    from tril.model.interop.hf_check import difference, require_transformers

    with user_errors():
        require_transformers()
        stored = Checkpoint.read(checkpoint)
        lm = stored.language_model()
        with temporary_sibling(folder) as part:
            name = write(part, lm, stored, settings.license, folder.name)
            problem = difference(part, lm)
            if problem is None:
                part.replace(folder)
    if problem is not None:
        fail(f"{checkpoint} was not exported: in transformers {problem}", status=1)
    print(f"{folder}: {name}, equal to {checkpoint} in logits and greedy text", flush=True)


def new_file(out: str | None) -> Path:
    """The GGUF file to write.

    Raises:
        ValueError: none is named, or it has another ending.
        OSError: it cannot be written, or exists.
    """
    if out is None or not out.endswith(".gguf"):
        raise ValueError(f"out={'null' if out is None else out} must be a new file with the ending .gguf")
    file = Path(os.path.expanduser(out)).absolute()
    if file.exists():
        raise FileExistsError(f"out={out} exists; name a new file")
    check_writable(file.parent, "out")
    return file


def new_folder(out: str | None) -> Path:
    """The folder to write.

    Raises:
        ValueError: none is named.
        OSError: it cannot be written, or is not empty.
    """
    if out is None:
        raise ValueError("out is missing; name a new folder with out=FOLDER")
    folder = Path(os.path.expanduser(out)).absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"out={out} exists and is not an empty folder; name a new one")
    check_writable(folder.parent, "out")
    return folder


@contextlib.contextmanager
def temporary_sibling(folder: Path) -> Iterator[Path]:
    """A new folder next to `folder`, which is removed at the end unless the block has renamed it to `folder`.

    Raises:
        OSError: the block could not write, with a remedy.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)  # of an earlier process with this id
    part.mkdir()
    try:
        if sys.platform == "win32" and folder.is_dir():  # which does not rename over an empty folder
            folder.rmdir()
        yield part
    except OSError as error:
        reason = (error.strerror or str(error)).replace(str(part), str(folder))
        raise OSError(
            f"cannot write {folder} ({reason}); free space, or choose another folder with out=FOLDER"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write(part: Path, lm: "LanguageModel", stored: "Checkpoint", license: str | None, name: str) -> str:
    """Writes all files of the folder `name` into `part`; returns the class of the model."""
    from tril.model.atomic_files import write_json, write_text
    from tril.model.checkpoint import verdict
    from tril.model.interop.architectures import ARCHITECTURES, model_type
    from tril.model.interop.hf_folder import write_hf
    from tril.model.interop.model_card import CERTIFICATE, model_card, sha256_of

    tensors, comparison = write_hf(part, lm), verdict(stored)
    certificate = {"causality": stored.certificate, "stored_certificate": comparison, "sha256": sha256_of(tensors)}
    write_json(part / CERTIFICATE, certificate)
    words = {"verdict": comparison["text"], "license": license}
    card = model_card(name, lm, checkpoint=stored, summary=summary_of(stored.path), **words)
    write_text(part / "README.md", card)
    return ARCHITECTURES[model_type(lm.config)].class_name


def summary_of(checkpoint: Path | None) -> dict[str, Any]:
    """summary.json of the run of a checkpoint; {} without one that can be read."""
    if checkpoint is None:
        return {}
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads((run_folder(checkpoint) / SUMMARY).read_text(encoding="utf-8"))
        return summary if isinstance(summary, dict) else {}
    return {}


if __name__ == "__main__":
    main()
