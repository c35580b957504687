"""Folders as `transformers` writes them with save_pretrained: config.json, safetensors, tokenizer.json.

`read_hf` loads one into a LanguageModel and `write_hf` writes one; neither imports `transformers`. Weights are read
from safetensors only, whose header is compared with the file and with the config before memory is taken. Pickles
(pytorch_model.bin) are refused.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from tril.model.generation.language_model import LanguageModel
from tril.model.interop.hf_config import ARCHITECTURES, from_hf, model_type, to_hf
from tril.model.interop.hf_weights import Shape, from_hf_weights, to_hf_weights
from tril.model.interop.model_card import CERTIFICATE, sha256_of
from tril.model.stored_model import PREFIX, build
from tril.model.stored_tokenizer import load_tokenizer

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
DTYPES = ("F16", "BF16", "F32", "F64")  # converted to float32
PICKLES = "*.bin"
CONVERT = "save it again with save_pretrained of transformers"


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
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    files = _weight_files(folder)
    text, eot = _tokenizer_text(folder), _eot(folder, values)
    try:
        tokenizer = load_tokenizer(text, config.vocab_size)
        eot = tokenizer.id_to_token(eot) if isinstance(eot, int) and eot >= 0 else eot
        if not isinstance(eot, str) or tokenizer.token_to_id(eot) is None:
            raise ValueError(f"no end-of-text token: set eos_token_id in {CONFIG}, or eos_token in {TOKENIZER_CONFIG}")
        with _opened(folder, files) as (shapes, read):
            state = from_hf_weights(values["model_type"], config, shapes, read)
            model = build(config.to_dict(), {PREFIX + name: tensor for name, tensor in state.items()}, "cpu")
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return LanguageModel(model.eval(), tokenizer, eot)


def write_hf(folder: Path, lm: LanguageModel) -> dict[str, Tensor]:
    """Writes the model and the tokenizer into an existing folder, and returns the tensors that it wrote.

    Raises:
        OSError: it cannot be written.
        ValueError: no class of `transformers` expresses the model.
    """
    values = to_hf(lm.config)
    special = {"bos_token_id": lm.eot_id, "eos_token_id": lm.eot_id}
    generation: dict[str, Any] = special | {"pad_token_id": lm.eot_id, "do_sample": True}
    if lm.n_ids < lm.config.vocab_size:  # rows of a padded embedding, which no text has
        generation["suppress_tokens"] = list(range(lm.n_ids, lm.config.vocab_size))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes all of tokenizer.json, without rules of its own
        "eos_token": lm.eot,
        "bos_token": lm.eot,
        "pad_token": lm.eot,
        "model_max_length": lm.config.context_length,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / CONFIG, values | special | {"torch_dtype": "float32"})
    _write_json(folder / GENERATION, generation)
    _write_json(folder / TOKENIZER_CONFIG, tokenizer)
    (folder / TOKENIZER).write_text(lm.tokenizer.to_str(pretty=True), encoding="utf-8")
    weights = to_hf_weights(model_type(lm.config), lm.model)
    save_file = _safetensors()[1]
    with _one_line(f"cannot write {folder / WEIGHTS}"):
        save_file(weights, folder / WEIGHTS, {"format": "pt"})
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
    with _opened(folder, _weight_files(folder)) as (shapes, read):
        found = sha256_of({name: read(name) for name in shapes})
    differs = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    text = "belongs to these weights"
    if differs:
        text = f"does not belong to these weights: {len(differs)} tensors differ, the first is {differs[0]}"
    return {"text": f"{'passed' if passed else 'FAILED'}; {text}", "belongs": not differs, "passed": passed}


def class_name(lm: LanguageModel) -> str:
    """The class of `transformers` that expresses a model."""
    return ARCHITECTURES[model_type(lm.config)].class_name


def _safetensors() -> tuple[Any, Any]:
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise ValueError("weights of Hugging Face need the library safetensors; pip install safetensors") from error
    return safe_open, save_file


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Errors of safetensors, which are no OSErrors, become one."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{what}: {' '.join(str(error).split())[:200]}") from error


@contextlib.contextmanager
def _opened(folder: Path, files: dict[str, list[str]]) -> Iterator[tuple[dict[str, Shape], Any]]:
    """The shapes of all tensors by name, and a function that reads one; the files are closed at the end."""
    safe_open, _ = _safetensors()
    shapes: dict[str, Shape] = {}
    readers: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for file, expected in files.items():
            with _one_line(f"{folder / file} cannot be read"):
                reader = stack.enter_context(safe_open(folder / file, framework="pt", device="cpu"))
            names = list(reader.keys())
            if missing := sorted(set(expected) - set(names)):
                raise ValueError(f"{file} has no {missing[0]}, which {INDEX} places there; copy the folder again")
            for name in names:
                part = reader.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise ValueError(f"{name} is {part.get_dtype()}, and must be one of {', '.join(DTYPES)}")
                if name in readers:
                    raise ValueError(f"{name} is in several files; copy the folder again")
                shapes[name], readers[name] = tuple(part.get_shape()), reader
        yield shapes, lambda name: readers[name].get_tensor(name)


def _weight_files(folder: Path) -> dict[str, list[str]]:
    """The safetensors files of a folder, and the tensors that its index places in each."""
    if (folder / WEIGHTS).is_file():
        return {WEIGHTS: []}
    if not (folder / INDEX).is_file():
        if pickles := sorted(path.name for path in folder.glob(PICKLES)):
            cause = f"has its weights in {pickles[0]}, a pickle, which can run any code when it is loaded"
            raise ValueError(f"{folder} {cause}; {CONVERT}, which writes {WEIGHTS}")
        raise FileNotFoundError(f"{folder} has no {WEIGHTS} and no {INDEX}; name a folder with weights")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{folder / INDEX} has no weight_map; copy the folder again")
    files: dict[str, list[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:  # nothing outside of the folder
            raise ValueError(f"{folder / INDEX} names the file {file!r}, which is no name in this folder")
        files.setdefault(file, []).append(name)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        count = f"{len(missing)} of its {len(files)} files with weights"
        raise FileNotFoundError(f"{folder} lacks {count}, the first is {missing[0]}; copy the folder again")
    return files


def _tokenizer_text(folder: Path) -> str:
    path = folder / TOKENIZER
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            raise ValueError(f"{folder} has only a SentencePiece tokenizer, tokenizer.model; {CONVERT} as {TOKENIZER}")
        raise FileNotFoundError(f"{folder} has no {TOKENIZER}; {CONVERT}, the tokenizer too")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason}); copy the folder again") from error


def _eot(folder: Path, values: dict[str, Any]) -> Any:
    """The id or the text of the token that ends a text."""
    eot = values.get("eos_token_id")
    eot = eot[0] if isinstance(eot, list) and eot else eot
    if type(eot) is int:
        return eot
    path = folder / TOKENIZER_CONFIG
    eot = read_json(path).get("eos_token") if path.is_file() else None
    return eot.get("content") if isinstance(eot, dict) else eot


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}; name a folder that save_pretrained wrote")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({' '.join(str(error).split())[:100]}); copy the folder again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a JSON object, not {type(values).__name__}; copy the folder again")
    return values


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
