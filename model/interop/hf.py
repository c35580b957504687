"""Folders as `transformers` writes them with save_pretrained, and models of the Hugging Face hub, as checkpoints.

`transformers` is not imported. Weights are read from safetensors only, whose header the library compares with the file.
"""

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from tril.data.settings import one_line, typed
from tril.data.tokenizer import check_ids, load_tokenizer
from tril.model.atomic_files import reading
from tril.model.checkpoint import Checkpoint, named
from tril.model.config import GPTConfig
from tril.model.interop.architectures import HUGGING_FACE, read_config, read_weights

CONFIG, WEIGHTS, SHARDS = "config.json", "model.safetensors", "model-*-of-*.safetensors"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
OWN, OWN_PREFIX = "tril", "model."  # the model_type of a model that no class expresses, and before its weights' names
HUB_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")


def read_hf(folder: str | Path) -> Checkpoint:
    """The model of a folder.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: the folder has a model that GPT does not express, or its parts do not match; one line.
    """
    folder = Path(folder).expanduser()
    with named(folder):
        values = _read_json(folder / CONFIG)
        if (kind := values.get("model_type")) not in [*HUGGING_FACE, OWN]:
            raise ValueError(f"model_type={typed(kind)} must be one of {', '.join(HUGGING_FACE)}, {OWN}")
        config = GPTConfig(**values["gpt"]) if kind == OWN else read_config(HUGGING_FACE[kind], values)
        settings = _read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
        text = _read_text(folder / TOKENIZER)
        tokenizer = load_tokenizer(text)
        check_ids(tokenizer, config.vocab_size or 0)
        eot = values.get("eos_token_id")
        eot = eot[0] if isinstance(eot, list) and eot else eot
        named_eot = settings.get("eos_token")  # a text, or an object that has it
        named_eot = named_eot.get("content") if isinstance(named_eot, dict) else named_eot
        eot = tokenizer.id_to_token(eot) if type(eot) is int and eot >= 0 else named_eot
        if not isinstance(eot, str) or tokenizer.token_to_id(eot) is None:
            raise ValueError(f"no end-of-text token: set eos_token_id in {CONFIG}, or eos_token in {TOKENIZER_CONFIG}")
        weights = read_tensors(folder)
        if kind != OWN:
            weights = read_weights(HUGGING_FACE[kind], config, weights)
        weights = {name.removeprefix(OWN_PREFIX): tensor for name, tensor in weights.items()}
        return Checkpoint(config, weights, text, eot, path=folder)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a folder, which are mapped into memory and not read yet.

    Raises:
        OSError: there is no file, or one cannot be read.
        ValueError: two files hold the same tensor.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ValueError('weights of Hugging Face need the library safetensors; pip install -e ".[hf]"') from error
    files = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob(SHARDS))
    if not files:
        cause = "a pickle such as pytorch_model.bin could run any code when it is loaded"
        raise FileNotFoundError(f"{folder} has no {WEIGHTS} ({cause}); save it again with save_pretrained")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            loaded = load_file(file)
        except SafetensorError as error:  # which is no OSError
            raise OSError(one_line(f"{file} cannot be read: {error}; copy it again")) from error
        if twice := loaded.keys() & tensors.keys():
            raise ValueError(f"{file.name} and another file hold {min(twice)}; remove the files of another model")
        tensors |= loaded
    return tensors


def is_hub_name(name: str) -> bool:
    """Whether it is ORG/NAME or ORG/NAME@REVISION, and no folder on this disk."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).expanduser().exists()


def download(name: str) -> tuple[Path, str]:
    """The folder of a model of the hub, with what `read_hf` needs, and its name with the commit: ORG/NAME@COMMIT.

    Files of an earlier download are not downloaded again, and without network they are used unchanged.

    Args:
        name: ORG/NAME, or ORG/NAME@REVISION with a branch, tag or commit.

    Raises:
        OSError: the hub cannot be reached, or does not know the model; one line.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    match = HUB_NAME.fullmatch(name)
    assert match is not None, name
    if not sys.stderr.isatty():
        disable_progress_bars()
    for client in ("httpx", "httpx2"):  # of huggingface_hub 1 and 2, which log a line for each request
        logging.getLogger(client).setLevel(logging.WARNING)
    patterns = [CONFIG, WEIGHTS, SHARDS, TOKENIZER, TOKENIZER_CONFIG]
    try:
        folder = Path(snapshot_download(match["repository"], revision=match["revision"], allow_patterns=patterns))
    except Exception as error:  # network, server and library errors have no common base class
        remedy = "check name, revision and network, set HF_ENDPOINT to a mirror, or name a folder on this disk"
        reason = one_line(str(error))[:200] or type(error).__name__
        raise OSError(f"{name} is no folder, and cannot be read from the hub ({reason}); {remedy}") from error
    return folder, f"{match['repository']}@{folder.name}"  # the cache has a folder for each commit


def _read_text(path: Path) -> str:
    try:
        with reading(path):
            return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        remedy = "save it again with save_pretrained of transformers, the tokenizer too"
        raise FileNotFoundError(f"{path.parent} has no {path.name}; {remedy}") from error


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    with reading(path):
        return dict(json.loads(text))
