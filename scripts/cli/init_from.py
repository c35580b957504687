"""`init_from`: a new run from the weights, the config and the tokenizer of another model."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.data.cache import make_folder, resolve_cache_dir
from tril.data.settings import defaults
from tril.model.atomic_files import write_text
from tril.model.runs import find_checkpoint
from tril.scripts.cli.app import Composed
from tril.scripts.cli.config import FOR_TRAINING

if TYPE_CHECKING:
    from tril.model.checkpoint import Checkpoint
    from tril.model.generation.language_model import LanguageModel
    from tril.model.gpt import GPT

HF, NANOGPT = "hf:", "nanogpt:"  # before a folder or name of Hugging Face, and before a ckpt.pt of nanoGPT


def take_over(source: str, composed: Composed) -> "tuple[dict[str, Any], LanguageModel, dict[str, Any]]":
    """The settings of a new run with the model and the tokenizer that `init_from` names.

    Returns:
        The settings, in which dropout, backend and activation checkpointing may be others than those of the source,
        and the vocabulary may be larger; the model; its path or name as "source", with its optimizer steps or None as
        "step".

    Raises:
        ValueError: settings that contradict the source, or a source that cannot be read.
        OSError: there is no source.
    """
    settings, given = composed.settings, composed.given
    may_change = [f"model.{name}" for name in (*FOR_TRAINING, "vocab_size")]
    if fixed := [f"{key}={given[key]}" for key in given if key.partition(".")[0] == "model" and key not in may_change]:
        raise ValueError(f"init_from={source} takes over the whole model; leave out {', '.join(fixed)}")
    of_tokenizer = [f"{key}={given[key]}" for key in given if key.startswith("data.tokenizer")]
    if of_tokenizer and not source.startswith(NANOGPT):
        contradicts = f"contradicts init_from={source}, whose tokenizer the run takes over"
        raise ValueError(f"{of_tokenizer[0]} {contradicts}; leave it out")
    checkpoint, origin = read_source(source, settings["data"] if of_tokenizer else None)
    lm = checkpoint.language_model()
    chosen, default = settings["model"], defaults(type(lm.config))
    changed = {name: chosen[name] for name in FOR_TRAINING if chosen[name] != default[name] or f"model.{name}" in given}
    vocab_size = chosen["vocab_size"] or lm.config.vocab_size
    if vocab_size < lm.config.vocab_size:
        raise ValueError(f"model.vocab_size={vocab_size} must be at least {lm.config.vocab_size}, as in {source}")
    changed["vocab_size"] = vocab_size
    tokenizer = {"kind": "file", "path": str(keep_tokenizer(lm.tokenizer.to_str())), "eot": lm.eot}
    parts = {"model": lm.config.to_dict() | changed, "data": settings["data"] | {"tokenizer": tokenizer}}
    return settings | parts, lm, {"source": origin, "step": checkpoint.step}


def read_source(source: str, data: Mapping[str, Any] | None) -> "tuple[Checkpoint, str]":
    """The checkpoint that `init_from` names, and its absolute path or its name with the commit.

    Args:
        data: settings with the tokenizer of a checkpoint of nanoGPT; None: its characters.

    Raises:
        ValueError: it cannot be read.
        OSError: it does not exist.
    """
    if source.startswith(NANOGPT):
        from tril.data.sources import parse
        from tril.data.tokenizer import build
        from tril.model.interop.nanogpt import read_nanogpt

        path = Path(os.path.expanduser(source.removeprefix(NANOGPT)))
        config = None if data is None else parse(data).tokenizer
        if config and config.kind not in ("file", "hub"):  # the text would decide it
            valid = "leave it out for the characters of meta.pkl, or name its tokenizer with kind=file or kind=hub"
            raise ValueError(f"data.tokenizer.kind={config.kind} does not go with init_from={source}; {valid}")
        return read_nanogpt(path, config and (build(config, ()), config.eot)), str(path.absolute())
    if source.startswith(HF):
        from tril.model.interop.hf import download, is_hub_name, read_hf

        name = source.removeprefix(HF)
        folder, commit = download(name) if is_hub_name(name) else (Path(os.path.expanduser(name)), None)
        return read_hf(folder), f"{HF}{commit}" if commit else str(folder.absolute())
    from tril.model.checkpoint import Checkpoint

    try:
        path = find_checkpoint(source)
    except FileNotFoundError as error:
        valid = f"must be a checkpoint, the folder of a run, {HF}FOLDER, {HF}ORG/NAME or {NANOGPT}FILE"
        raise FileNotFoundError(f"init_from={source} {valid}: {error}") from error
    return Checkpoint.read(path), str(path.absolute())


def keep_tokenizer(text: str) -> Path:
    """A tokenizer.json in the cache with this content, which names it."""
    folder = make_folder(resolve_cache_dir() / "taken_over")
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if not path.is_file():
        write_text(path, text)
    return path


def load_weights(lm: "LanguageModel", model: "GPT") -> None:
    """Copies the weights. New rows of the embedding and of the head are the mean of the rows that tokens have.

    Thus the logit of a new row is the mean of the others, and its probability at most the mean probability; a row of
    random values could get most of it (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
    """
    import torch

    state, old, new = lm.model.state_dict(), lm.config.vocab_size, model.config.vocab_size
    if new > old:
        rows = f"{new - old:,} new rows are the mean of the {lm.n_ids:,} rows of tokens"
        print(f"model.vocab_size={new:,} from {old:,}: {rows}; no token uses them", flush=True)
    for name, weight in model.state_dict().items():
        if weight.shape != state[name].shape:
            mean = state[name][: lm.n_ids].mean(0, keepdim=True)  # (1, C)
            state[name] = torch.cat([state[name], mean.expand(len(weight) - len(state[name]), -1)])  # (V, C)
    model.load_state_dict(state)
