"""Folders as `transformers` writes them with save_pretrained: config.json, safetensors, tokenizer.json.

`read_hf` loads one into a LanguageModel and `write_hf` writes one; neither imports `transformers`. Weights are read
from safetensors only, whose header the library compares with the file. Pickles (pytorch_model.bin) are refused.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from tril.data.tokenizer import load_tokenizer
from tril.model.checkpoint import Checkpoint
from tril.model.generation.language_model import LanguageModel
from tril.model.interop.architectures import ARCHITECTURES, from_hf, from_theirs, model_type, to_hf, to_theirs
from tril.model.interop.model_card import CERTIFICATE, sha256_of

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
CONVERT = "save it again with save_pretrained of transformers"
COPY = "copy the folder again"


def read_hf(folder: str | Path) -> LanguageModel:
    """The model, in float32 on the CPU and in evaluation mode, and the tokenizer of a folder.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: the folder has a model that GPT does not express, or its parts do not match; one line.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; name one that save_pretrained of transformers wrote")
    values = read_json(folder / CONFIG)
    try:
        config = from_hf(values)
        if (folder / "tokenizer.model").is_file() and not (folder / TOKENIZER).is_file():
            raise ValueError(f"it has only a SentencePiece tokenizer, tokenizer.model; {CONVERT} as {TOKENIZER}")
        tokenizer = load_tokenizer(_read_text(folder / TOKENIZER), config.vocab_size)
        eot = _eot(folder, values)
        eot = tokenizer.id_to_token(eot) if type(eot) is int and eot >= 0 else eot
        if not isinstance(eot, str) or tokenizer.token_to_id(eot) is None:
            raise ValueError(f"no end-of-text token: set eos_token_id in {CONFIG}, or eos_token in {TOKENIZER_CONFIG}")
        state = from_theirs(ARCHITECTURES[values["model_type"]], config, read_weights(folder))
        return LanguageModel(Checkpoint(config, state, tokenizer="", eot=eot).model().eval(), tokenizer, eot)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def write_hf(folder: Path, lm: LanguageModel) -> dict[str, Tensor]:
    """Writes the model and the tokenizer into an existing folder, and returns the tensors that it wrote.

    Raises:
        OSError: it cannot be written.
        ValueError: no class of `transformers` expresses the model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    special = {"bos_token_id": lm.eot_id, "eos_token_id": lm.eot_id}
    config = to_hf(lm.config) | special | {"torch_dtype": "float32"}
    generation: dict[str, Any] = special | {"pad_token_id": lm.eot_id, "do_sample": True}
    if lm.n_ids < lm.config.vocab_size:  # rows of a padded embedding, which no text has
        generation["suppress_tokens"] = list(range(lm.n_ids, lm.config.vocab_size))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes all of tokenizer.json, without rules of its own
        **{f"{name}_token": lm.eot for name in ("eos", "bos", "pad")},
        "model_max_length": lm.config.context_length,
        "clean_up_tokenization_spaces": False,
    }
    for name, values in ((CONFIG, config), (GENERATION, generation), (TOKENIZER_CONFIG, tokenizer)):
        (folder / name).write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / TOKENIZER).write_text(lm.tokenizer.to_str(pretty=True), encoding="utf-8")
    weights = to_theirs(ARCHITECTURES[model_type(lm.config)], lm.model)
    try:
        save_file(weights, folder / WEIGHTS, {"format": "pt"})
    except SafetensorError as error:  # which is no OSError
        raise OSError(f"cannot write {folder / WEIGHTS}: {_line(error)}") from error
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)  # safetensors lets nobody else read the file
    return weights


def stored_certificate(folder: Path) -> dict[str, Any] | None:
    """Whether certificate.json of an exported folder belongs to its weights; None: the folder has none.

    Returns:
        "text": one line; "belongs": whether every tensor has the sha256 of the certificate; "passed": as stored.
    """
    if not (folder / CERTIFICATE).is_file():
        return None
    stored = read_json(folder / CERTIFICATE)
    causality, expected = stored.get("causality"), stored.get("sha256")
    passed = causality.get("passed") if isinstance(causality, dict) else None
    if not isinstance(passed, bool) or not isinstance(expected, dict):
        text = "none" if causality is None else "none that can be read"
        return {"text": text, "belongs": False, "passed": None}
    found = sha256_of(read_weights(folder))
    differs = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    text = "belongs to these weights"
    if differs:
        text = f"does not belong to these weights: {len(differs)} tensors differ, the first is {differs[0]}"
    return {"text": f"{'passed' if passed else 'FAILED'}; {text}", "belongs": not differs, "passed": passed}


def chat_template(folder: Path) -> str | None:
    """The Jinja template of a folder, which begins with the special tokens that it names; None: the folder has none.

    chat_template.jinja goes before tokenizer_config.json, as in transformers. Of several, the default one counts.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged.
    """
    settings = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    template = settings.get("chat_template")
    if (folder / CHAT_TEMPLATE).is_file():
        template = _read_text(folder / CHAT_TEMPLATE)
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    if not isinstance(template, str | None):
        where = folder / TOKENIZER_CONFIG
        raise ValueError(f"{where}: chat_template must be text, not {type(template).__name__}; {COPY}")
    special = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    lines = (f"{{% set {k} = {json.dumps(v, ensure_ascii=False)} %}}" for k, v in special.items() if isinstance(v, str))
    return None if template is None else "".join(lines) + template


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a folder, which are mapped into memory and not read yet.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: the weights are in a pickle, or the files do not match their index.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ValueError("weights of Hugging Face need the library safetensors; pip install safetensors") from error
    index = {}
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file() and (pickles := sorted(path.name for path in folder.glob("*.bin"))):
            cause = f"has its weights in {pickles[0]}, a pickle, which can run any code when it is loaded"
            raise ValueError(f"{folder} {cause}; {CONVERT}, which writes {WEIGHTS}")
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ValueError(f"{folder / INDEX} has no weight_map; {COPY}")
    files = sorted({str(file) for file in index.values()}) or [WEIGHTS]
    if outside := [file for file in files if Path(file).name != file]:
        raise ValueError(f"{folder / INDEX} names the file {outside[0]!r}, which is no name in this folder")
    if missing := [file for file in files if not (folder / file).is_file()]:
        count = f"{len(missing)} of its {len(files)} files with weights"
        raise FileNotFoundError(f"{folder} lacks {count}, the first is {missing[0]}; {COPY}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            found = load_file(folder / file)
        except SafetensorError as error:  # which is no OSError
            raise OSError(f"{folder / file} cannot be read: {_line(error)}") from error
        placed = {name for name, place in index.items() if place == file}
        if wrong := sorted((placed - found.keys()) | (found.keys() & tensors.keys())):
            raise ValueError(f"{folder / INDEX} does not say where {wrong[0]} is; {COPY}")
        tensors |= found
    return tensors


def _eot(folder: Path, values: dict[str, Any]) -> Any:
    """The id or the text of the token that ends a text."""
    eot = values.get("eos_token_id")
    eot = eot[0] if isinstance(eot, list) and eot else eot
    if type(eot) is int or not (folder / TOKENIZER_CONFIG).is_file():
        return eot
    return _content(read_json(folder / TOKENIZER_CONFIG).get("eos_token"))


def _content(token: Any) -> Any:
    """The text of a special token, which may be an object."""
    return token.get("content") if isinstance(token, dict) else token


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}; {CONVERT}, the tokenizer too")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason}); {COPY}") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({_line(error)}); {COPY}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a JSON object, not {type(values).__name__}; {COPY}")
    return values


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
