"""Checkpoints of nanoGPT: the ckpt.pt of its train.py, and the meta.pkl of its data sets of characters.

A file cannot run code: ckpt.pt is loaded with weights_only, and meta.pkl by an unpickler that knows no class.
"""

import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor

from tril.model.checkpoint import Checkpoint, digest, load_plain
from tril.model.config import GPTConfig
from tril.model.generation.language_model import EOT, LanguageModel
from tril.model.interop.architectures import EMBED, HEAD, NANOGPT, from_theirs, read_config

COMPILED = "_orig_mod."  # before the names of a compiled model
META, UNKNOWN = "meta.pkl", "<|unknown|>"  # the token as in data.tokenizer.kind=char
MAX_META_BYTES = 50_000_000  # Unicode has 1.1 million characters


@dataclass(frozen=True)
class NanoGPT:
    """A checkpoint.

    Attributes:
        state: the weights of GPT.
        meta: the character table of its data; None: there is none, and the tokens are GPT-2's.
        step: of the optimizer; None: not stored.
    """

    path: Path
    config: GPTConfig
    state: dict[str, Tensor]
    meta: Path | None
    step: int | None

    def language_model(self, tokenizer: Tokenizer | None = None, eot: str = EOT) -> LanguageModel:
        """The model, in float32 on the CPU and in evaluation mode, with a tokenizer.

        Args:
            tokenizer: None: the characters of `meta`. nanoGPT has no end-of-text token there, so the vocabulary gets
                one, and one for unknown characters; their rows are the mean of the others unless the model has unused
                rows.

        Raises:
            OSError: `meta` cannot be read.
            ValueError: the tokenizer does not belong to the model.
        """
        config, state = self.config, self.state
        if tokenizer is None:
            assert self.meta is not None
            tokenizer = character_tokenizer(characters_of(self.meta))
            missing = tokenizer.get_vocab_size() - config.vocab_size
            if missing > 2:
                limit = f"the vocab_size={config.vocab_size} of {self.path}"
                raise ValueError(f"{self.meta} has {config.vocab_size + missing - 2} characters and exceeds {limit}")
            if missing > 0:
                embed = state[EMBED].float()
                embed = torch.cat([embed, embed.mean(0, keepdim=True).expand(missing, -1)])
                config, state = replace(config, vocab_size=len(embed)), state | {EMBED: embed, HEAD: embed}
        return Checkpoint(config, state, tokenizer.to_str(), eot, path=self.path).language_model()


def read_nanogpt(path: Path) -> NanoGPT:
    """Reads a ckpt.pt.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a checkpoint of nanoGPT, or is damaged; one line.
    """
    content = load_plain(path)
    weights, arguments = (content.get(key) if isinstance(content, dict) else None for key in ("model", "model_args"))
    if not isinstance(weights, dict) or not isinstance(arguments, dict):
        raise ValueError(f"{path} has no model and model_args; name the ckpt.pt that train.py of nanoGPT wrote")
    try:
        config = read_config(NANOGPT, arguments)
        named = {str(name).removeprefix(COMPILED): tensor for name, tensor in weights.items()}
        if wrong := [name for name, tensor in named.items() if not isinstance(tensor, Tensor)]:
            raise ValueError(f"{wrong[0]} is no tensor; use another file")
        digest(named)  # raises if they are not dense
        state = from_theirs(NANOGPT, config, named)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    run, step = content.get("config"), content.get("iter_num")
    dataset = run.get("dataset") if isinstance(run, dict) else None
    return NanoGPT(path, config, state, _find_meta(path, dataset), step if type(step) is int else None)


def _find_meta(path: Path, dataset: Any) -> Path | None:
    """The character table next to the checkpoint, or in data/DATASET of the folder above it or of the working one."""
    folders = [path.parent]
    if isinstance(dataset, str) and dataset not in ("", "..") and Path(dataset).name == dataset:  # within data/
        folders += [root / "data" / dataset for root in (path.absolute().parent.parent, Path.cwd())]
    return next((folder / META for folder in folders if (folder / META).is_file()), None)


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts and containers. A pickle that names any class or function is refused, so it runs nothing."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}, which no character table needs")


def characters_of(path: Path) -> list[str]:
    """The characters of a meta.pkl, by id.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a table of characters; one line.
    """
    if path.stat().st_size > MAX_META_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, and the limit is {MAX_META_BYTES}; use another file")
    try:
        with path.open("rb") as file:
            content = PlainUnpickler(file).load()
    except OSError:
        raise
    except Exception as error:  # of any kind: the file decides what the unpickler meets
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be read ({reason}); write it again with prepare.py of nanoGPT") from error
    table = content.get("itos") if isinstance(content, dict) else None
    characters: list[Any] = [table.get(i) for i in range(len(table))] if isinstance(table, dict) else []
    is_table = all(type(c) is str and len(c) == 1 and not "\ud800" <= c <= "\udfff" for c in characters)
    if not characters or not is_table or len(set(characters)) < len(characters):
        raise ValueError(f"{path} has no table itos of distinct characters with the ids 0, 1, ...; use another file")
    return characters


def character_tokenizer(characters: list[str]) -> Tokenizer:
    """One token for each character, then end-of-text and the unknown character."""
    tokens = [*characters, EOT, UNKNOWN]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()  # joins tokens without a separator
    tokenizer.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
    return tokenizer
