"""What a user may write below `data:`, checked before anything expensive starts."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from tril.data.sources.base import Source
from tril.data.sources.files import Files
from tril.data.sources.hub import Hub
from tril.data.sources.single_text import SingleText
from tril.data.sources.stdlib import StandardLibrary
from tril.data.tokenizer import TokenizerConfig

SOURCES = {"stdlib": StandardLibrary, "shakespeare": SingleText, "files": Files, "hub": Hub}


@dataclass(frozen=True)
class DataConfig:
    """The arguments of `TextDataModule` that `data:` decides.

    batch_size: windows per device and step; val_batch_size: null takes the same.
    cache_dir: where prepared data lies; null takes `default_cache_dir()`.
    token_budget, val_token_budget: tokens to prepare of the two parts; null takes all.
    document_mask: documents that share a window do not see each other, and positions restart in each.
    """

    source: Source
    tokenizer: TokenizerConfig
    batch_size: int
    val_batch_size: int | None = None
    cache_dir: str | None = None
    token_budget: int | None = None
    val_token_budget: int | None = None
    document_mask: bool = False

    def __post_init__(self) -> None:
        problems = []
        for name in ("batch_size", "val_batch_size", "token_budget", "val_token_budget"):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if not is_count and (value is not None or name == "batch_size"):
                problems.append(
                    f"data.{name}={value}: must be a positive integer{'' if name == 'batch_size' else ' or null'}"
                )
        if self.cache_dir is not None and not isinstance(self.cache_dir, str):
            problems.append(f"data.cache_dir={self.cache_dir}: must be a folder or null")
        if isinstance(self.cache_dir, str) and Path(self.cache_dir).expanduser().is_file():
            problems.append(f"data.cache_dir={self.cache_dir}: is a file; give a folder")
        if not isinstance(self.document_mask, bool):
            problems.append(f"data.document_mask={self.document_mask}: must be true or false")
        if problems:
            raise ValueError("; ".join(problems))


def parse(mapping: Mapping[str, Any]) -> DataConfig:
    """Settings from plain values: `source` names the source, whose own keys stand beside the common ones and `tokenizer`.

    Raises:
        ValueError: an unknown key (names the nearest legal one), a missing key, or a wrong value.
        OSError: a file or folder that does not exist.
    """
    kind = mapping["source"] if "source" in mapping else None
    if kind not in SOURCES:
        raise ValueError(f"data.source={kind}: must be one of {', '.join(SOURCES)}")
    _check_keys("data.", mapping, fields(DataConfig) + fields(SOURCES[kind]))
    tokenizer = mapping["tokenizer"]
    if not isinstance(tokenizer, Mapping):
        raise ValueError(f"data.tokenizer={tokenizer}: has keys of its own, such as data.tokenizer.kind=byte")
    _check_keys("data.tokenizer.", tokenizer, fields(TokenizerConfig))

    own = _select(mapping, SOURCES[kind])
    _check_types(own, SOURCES[kind])
    built = {"source": SOURCES[kind](**own), "tokenizer": TokenizerConfig(**tokenizer)}
    return DataConfig(**(_select(mapping, DataConfig) | built))


def _select(mapping: Mapping[str, Any], dataclass_type: type) -> dict[str, Any]:
    names = {field.name for field in fields(dataclass_type)}
    return {key: value for key, value in mapping.items() if key in names}


def _check_keys(prefix: str, mapping: Mapping[str, Any], legal: Iterable[Field]) -> None:
    """Every key of `mapping` is one of the fields `legal`, and the fields without a default are all there."""
    needed = {field.name: field.default is MISSING for field in legal}
    for key in mapping:
        if key not in needed:
            near = difflib.get_close_matches(str(key), needed, n=1, cutoff=0.5)
            remedy = f"did you mean {prefix}{near[0]}?" if near else f"legal are {', '.join(needed)}"
            raise ValueError(f"{prefix}{key}: no such key; {remedy}")
    missing = [prefix + key for key in needed if needed[key] and key not in mapping]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}; add what is missing, such as {missing[0]}=...")


def _check_types(values: Mapping[str, Any], dataclass_type: type) -> None:
    """The values have the types that the fields declare; a whole number is a number too, and a null where a value must be given
    is left to the class, which says best what it wants."""
    hints = get_type_hints(dataclass_type)
    needed = {field.name for field in fields(dataclass_type) if field.default is MISSING}
    for key, value in values.items():
        if value is None and key in needed:
            continue
        if not isinstance(value, float | int if hints[key] is float else hints[key]):
            wanted = getattr(hints[key], "__name__", str(hints[key])).replace("None", "null")
            raise ValueError(f"data.{key}={value}: must be of type {wanted}, not {type(value).__name__}")
