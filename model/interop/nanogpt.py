"""Checkpoints of nanoGPT: the ckpt.pt of its train.py, and the meta.pkl of its data sets of characters.

A file cannot run code: ckpt.pt is loaded with weights_only, and meta.pkl by an unpickler that knows no class.
"""

import io
import pickle
import pickletools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor

from tril.model.checkpoint import Checkpoint, check_weights, load_plain, named
from tril.model.generation.language_model import EOT
from tril.model.interop.architectures import EMBED, HEAD, NANOGPT, read_config, read_weights

COMPILED = "_orig_mod."  # before the names of a compiled model
META, UNKNOWN = "meta.pkl", "<|unknown|>"  # the token as in data.tokenizer.kind=char


def read_nanogpt(path: Path, tokenizer: tuple[Tokenizer, str] | None = None) -> Checkpoint:
    """Reads a ckpt.pt.

    Args:
        tokenizer: with its end-of-text token. None: the characters of meta.pkl. nanoGPT has no end-of-text token
            there, so the vocabulary gets one, and one for unknown characters; their rows are the mean of the others
            unless the model has unused rows.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a checkpoint of nanoGPT, or is damaged, or its tokens are unknown; one line.
    """
    content = load_plain(path)
    weights, arguments = (content.get(key) if isinstance(content, dict) else None for key in ("model", "model_args"))
    if not isinstance(weights, dict) or not isinstance(arguments, dict):
        raise ValueError(f"{path} has no model and model_args; name the ckpt.pt that train.py of nanoGPT wrote")
    with named(path):
        if wrong := [name for name, x in arguments.items() if isinstance(x, Tensor)]:
            raise ValueError(f"{wrong[0]} of model_args is a tensor; use another file")
        config = read_config(NANOGPT, arguments)
        tensors = {str(name).removeprefix(COMPILED): tensor for name, tensor in weights.items()}
        check_weights(config, tensors)
        state = read_weights(NANOGPT, config, tensors)
        if tokenizer is None:
            meta = find_meta(path, content.get("config"))
            characters = characters_of(meta)
            tokenizer = character_tokenizer(characters), EOT
            missing = len(characters) + 2 - (config.vocab_size or 0)
            if missing > 2:
                limit = f"exceeds its vocab_size={config.vocab_size}"
                raise ValueError(f"{meta} has {len(characters)} characters and {limit}")
            if missing > 0 and EMBED in state:
                mean = state[EMBED].float().mean(0, keepdim=True)  # (1, C)
                embed = torch.cat([state[EMBED].float(), mean.expand(missing, -1)])
                config, state = replace(config, vocab_size=len(embed)), state | {EMBED: embed, HEAD: embed}
    step = content.get("iter_num")
    step = step if type(step) is int else None
    return Checkpoint(config, state, tokenizer[0].to_str(), tokenizer[1], step=step, path=path)


def find_meta(path: Path, run: Any) -> Path:
    """The character table next to a checkpoint, or in data/DATASET of the folder above it. Raises ValueError."""
    dataset, folders = run.get("dataset") if isinstance(run, dict) else None, [path.parent]
    if isinstance(dataset, str) and dataset not in ("", "..") and Path(dataset).name == dataset:  # within data/
        folders.append(path.absolute().parent.parent / "data" / dataset)
    for folder in folders:
        if (folder / META).is_file():
            return folder / META
    remedy = "data.tokenizer.kind=file data.tokenizer.path=tokenizer.json, or kind=hub path=openai-community/gpt2"
    raise ValueError(f"it has no {META}, so its tokens are those of GPT-2; name its tokenizer with {remedy}")


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts and containers. A pickle that names any class or function is refused, so it runs nothing."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}, which no character table needs")


def characters_of(path: Path) -> list[str]:
    """The characters of a meta.pkl, by id. Raises ValueError if it is not a table of characters."""
    try:
        content = path.read_bytes()
        if any("TUPLE" in opcode.name for opcode, *_ in pickletools.genops(content)):  # as keys they may take forever
            raise pickle.UnpicklingError("it has a tuple")
        table = PlainUnpickler(io.BytesIO(content)).load()["itos"]
        characters = [table[i] for i in range(len(table))]
        is_table = all(type(c) is str and len(c) == 1 and c.encode() for c in characters)  # half a pair has no UTF-8
        if not is_table or not characters or len(set(characters)) < len(characters):
            raise ValueError("its values are not distinct characters")
    except Exception as error:  # of any kind: the file decides what the unpickler meets
        reason = f"has no table itos of distinct characters with the ids 0, 1, ... ({error!r})"
        raise ValueError(f"{path} {reason}; write it again with prepare.py of nanoGPT") from error
    return characters


def character_tokenizer(characters: list[str]) -> Tokenizer:
    """One token for each character, then end-of-text and the unknown character."""
    tokens = [*characters, EOT, UNKNOWN]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()  # joins tokens without a separator
    tokenizer.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
    return tokenizer
