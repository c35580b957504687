"""Folders as `transformers` writes them with save_pretrained, and models of the Hugging Face hub: read and written.

Reading does not import `transformers`. Weights are read from safetensors only, whose header the library compares with
the file. Any model is written; the folder gets its name after `transformers` has computed the same. GPT-2, Llama and
Qwen3 need no code of Tril. Any other model gets `modeling_tril.py`, which imports it.
"""

import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tril.data.settings import one_line, typed
from tril.data.tokenizer import check_ids, load_tokenizer
from tril.model.atomic_files import reading, write_json
from tril.model.causality.interface import quiet
from tril.model.checkpoint import Checkpoint, named, verdict
from tril.model.config import GPTConfig
from tril.model.generation.language_model import LanguageModel
from tril.model.interop.architectures import HEAD, HUGGING_FACE, read_config, read_weights, write_config, write_weights

CONFIG, WEIGHTS, SHARDS = "config.json", "model.safetensors", "model-*-of-*.safetensors"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
OWN, OWN_PREFIX = "tril", "model."  # the model_type of a model that no class expresses, and before its weights' names
HUB_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
CODE, OWN_CLASS = Path(__file__).with_name("modeling_tril.py"), "TrilForCausalLM"
LIMIT = 1e-4  # on the difference of logits in float32
RELATIVE_LIMIT = 1e-5  # of the largest logit, where that is more: rounding grows with it


def read_hf(folder: str | Path) -> Checkpoint:
    """The model of a folder.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: the folder has a model that GPT does not express, or its parts do not match; one line.
    """
    folder = Path(os.path.expanduser(folder))
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
        eot = tokenizer.id_to_token(eot) if type(eot) is int and 0 <= eot < 2**32 else named_eot
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
        OSError: there is no file.
        ValueError: one cannot be read.
    """
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ValueError('weights of Hugging Face need the library safetensors; pip install -e ".[hf]"') from error
    files = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob(SHARDS))
    if not files:
        cause = "a pickle such as pytorch_model.bin could run any code when it is loaded"
        raise FileNotFoundError(f"{folder} has no {WEIGHTS} ({cause}); save it again with save_pretrained")
    tensors: dict[str, Tensor] = {}
    for file in files:
        with reading(file):
            tensors |= load_file(file)
    return tensors


def is_hub_name(name: str) -> bool:
    """Whether it is ORG/NAME or ORG/NAME@REVISION, and no folder on this disk."""
    return HUB_NAME.fullmatch(name) is not None and not os.path.exists(os.path.expanduser(name))


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


def export_hf(folder: Path, checkpoint: Checkpoint) -> str:
    """Writes a new folder for AutoModelForCausalLM and AutoTokenizer.

    Args:
        folder: new or empty.

    Returns:
        The class of the model.

    Raises:
        OSError: it cannot be written.
        ValueError: weights are not finite, a library is missing, or `transformers` computes something else; nothing is
            written.
    """
    lm, certificate = checkpoint.language_model(), verdict(checkpoint)
    lm.check_finite(checkpoint.path)
    try:
        quiet()
    except ImportError as error:
        raise ValueError('to=hf needs transformers, which compares the folder; pip install -e ".[hf]"') from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".export-", dir=folder.parent) as temporary:
        part = Path(temporary) / folder.name
        part.mkdir()
        try:
            class_name = write_hf(part, lm)
            write_json(part / "certificate.json", (checkpoint.certificate or {}) | {"text": certificate})
        except OSError as error:
            cause = f"cannot write {folder} ({error.strerror or error})"
            raise OSError(f"{cause}; choose another folder with out=FOLDER") from error
        check_equal(part, lm)
        part.replace(folder)
    return class_name


def write_hf(folder: Path, lm: LanguageModel) -> str:
    """Writes the model and the tokenizer into an existing folder; returns the class of the model.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if (values := write_config(lm.config)) is not None:
        weights = write_weights(HUGGING_FACE[values["model_type"]], lm.model)
    else:
        values, state = own_config(lm.config), lm.model.state_dict()
        if lm.config.tie_embeddings:
            del state[HEAD]
        weights = {OWN_PREFIX + name: tensor.float().cpu().contiguous() for name, tensor in state.items()}
        shutil.copyfile(CODE, folder / CODE.name)
    special = {"bos_token_id": lm.eot_id, "eos_token_id": lm.eot_id}
    config: dict[str, Any] = values | special | {"torch_dtype": "float32"}
    generation: dict[str, Any] = special | {"pad_token_id": lm.eot_id, "do_sample": True}
    if lm.n_ids < lm.config.vocab_size:  # rows of a padded embedding, which no text has
        generation["suppress_tokens"] = list(range(lm.n_ids, lm.config.vocab_size))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes all of tokenizer.json, without rules of its own
        **{f"{name}_token": lm.eot for name in ("eos", "bos", "pad")},
        "model_max_length": lm.config.context_length,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in ((CONFIG, config), ("generation_config.json", generation), (TOKENIZER_CONFIG, tokenizer)):
        write_json(folder / name, content)
    (folder / TOKENIZER).write_text(lm.tokenizer.to_str(pretty=True), encoding="utf-8")
    try:
        save_file(weights, folder / WEIGHTS, {"format": "pt"})
    except SafetensorError as error:  # which is no OSError
        raise OSError(one_line(f"cannot write {folder / WEIGHTS}: {error}")) from error
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)  # safetensors lets nobody else read the file
    return config["architectures"][0]


def own_config(config: GPTConfig) -> dict[str, Any]:
    """The config.json of a model that no class of `transformers` expresses; other programs know the standard keys."""
    return {
        "model_type": OWN,
        "architectures": [OWN_CLASS],
        "auto_map": {"AutoConfig": "modeling_tril.TrilConfig", "AutoModelForCausalLM": f"modeling_tril.{OWN_CLASS}"},
        "gpt": config.to_dict(),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "num_hidden_layers": config.n_layers,
        "hidden_size": config.dim,
        "num_attention_heads": config.n_heads,
        "tie_word_embeddings": config.tie_embeddings,
    }


@torch.no_grad()
def check_equal(folder: Path, lm: LanguageModel) -> None:
    """Compares the logits at all positions of a full context, and the ids of a text.

    Raises:
        ValueError: `transformers` cannot load the folder, or computes something else than `lm`.
    """
    import transformers

    from tril.model.interop.modeling_tril import TrilForCausalLM

    loader: Any = TrilForCausalLM if (folder / CODE.name).is_file() else transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **options)
        model = loader.from_pretrained(folder, **options, dtype=torch.float32).eval()
    except Exception as error:  # transformers raises many kinds, with many lines
        raise ValueError(one_line(f"not exported: transformers cannot load the folder ({error})")) from error
    length, generator = lm.config.context_length, torch.Generator().manual_seed(0)
    ids = torch.randint(lm.n_ids, (2, length), generator=generator)  # (B, T)
    ours = lm.model(ids)  # (B, T, V)
    error = (ours - model(ids).logits).abs().max().item()
    limit = max(LIMIT, RELATIVE_LIMIT * ours.abs().max().item())
    if not error <= limit:  # a NaN fails as well
        raise ValueError(
            f"not exported: the logits of transformers differ by {error:.3g}, and the limit is {limit:.3g}"
        )
    text = lm.tokenizer.decode(torch.randperm(lm.n_ids, generator=generator).tolist(), skip_special_tokens=False)
    if tokenizer(text, add_special_tokens=False).input_ids != lm.tokenizer.encode(text, add_special_tokens=False).ids:
        raise ValueError("not exported: the tokenizer of transformers gives other ids for the same text")
