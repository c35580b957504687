"""Several texts in fixed shares: which ones, their common tokenizer, and each of them prepared with it."""

import difflib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from dataclasses import dataclass as plain_dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError, model_validator
from pydantic.dataclasses import dataclass
from tokenizers import Tokenizer

from tril.data.cache import preparing, resolve_cache_dir, write_folder
from tril.data.integrity import TOKENIZER
from tril.data.prepare import Counts, prepare, train_tokenizer, training_texts
from tril.data.prepared import PreparedText
from tril.data.settings import setting, strict_settings
from tril.data.sources.base import Source, Split, printable
from tril.data.sources.files import Files
from tril.data.sources.hub import Hub
from tril.data.sources.prose import Prose
from tril.data.sources.single_text import SingleText
from tril.data.sources.stdlib import StandardLibrary
from tril.data.tokenizer import TokenizerConfig, first_bytes

SINGLE = {"stdlib": StandardLibrary, "prose": Prose, "shakespeare": SingleText, "files": Files, "hub": Hub}
GROUPS = Path(__file__).resolve().parents[1] / "configs" / "data"
BLOCK = 1000  # training windows in which the shares are exact
CHECKSUMS = "checksums.json"  # of a tokenizer's folder
FORMAT = 1  # incremented when the same settings train another tokenizer
EXAMPLE = "data.sources={stdlib: 0.7, notes/*.md: 0.3}"


@plain_dataclass(frozen=True)
class Member:
    """A source of a mixture.

    Attributes:
        budgets: tokens of the training and of the validation part to prepare, as its data group has them.
        count: its windows in a block of BLOCK training windows.
    """

    source: Source
    budgets: dict[Split, int | None]
    count: int


@dataclass(frozen=True, config=strict_settings("data"))
class Mixture:
    """Several texts, of which each gives a fixed share of the training tokens; their order has no effect."""

    sources: dict[Any, Any] | None = setting(
        None, "weights, of any sum: NAME of another data=NAME (with its settings), path or glob: weight"
    )
    exhausted: Literal["repeat", "stop"] = setting(
        "repeat", "a source that was read once: repeat starts its next epoch, stop ends the run there"
    )
    name = "mixture"

    @model_validator(mode="after")
    def _check_sources(self) -> "Mixture":
        self.members  # noqa: B018 raises
        return self

    @cached_property
    def members(self) -> dict[str, Member]:
        """The sources by name, sorted.

        Raises:
            ValueError: fewer than two sources, one of them twice, or an invalid name or weight.
            OSError: a path matches nothing.
        """
        weights = self.sources or {}
        if len(weights) < 2:
            raise ValueError(f"data.sources={_shown(weights)} must have at least two sources, such as {EXAMPLE}")
        for name, weight in weights.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"data.sources: the name {name!r} must be a text, such as in {EXAMPLE}")
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not math.isfinite(weight) or weight <= 0:
                needs = "must be a number above 0, such as 0.3"
                raise ValueError(f"data.sources: the weight {weight} of {printable(name)} {needs}; change it")
        names = sorted(weights)
        counts = block_counts([weights[name] for name in names])
        members = {}
        for name, count in zip(names, counts, strict=True):
            if count == 0:
                least = f"at least {0.5 / BLOCK:.2%} of the sum of all weights"
                raise ValueError(
                    f"data.sources: the weight {weights[name]} of {printable(name)} must be {least}; raise it"
                )
            members[name] = Member(*_source(name), count=count)
        _check_files({name: member.source for name, member in members.items()})
        return members

    @property
    def shares(self) -> dict[str, float]:
        """The share of each source in the training windows."""
        return {name: member.count / BLOCK for name, member in self.members.items()}

    def prepare(
        self,
        tokenizer: TokenizerConfig,
        cache_dir: str | Path | None,
        *,
        token_budget: int | None,
        val_token_budget: int | None,
    ) -> "PreparedMixture":
        """Trains or loads the common tokenizer, and prepares every source with it, see `prepare.prepare`.

        Args:
            token_budget: of each source, as `val_token_budget`; None: that of its data group.
        """
        _check_different({name: member.source.fingerprint() for name, member in self.members.items()})
        members = self.members.values()
        token_budgets = [token_budget or member.budgets["train"] for member in members]
        val_budgets = [val_token_budget or member.budgets["val"] for member in members]
        common = self._common_tokenizer(tokenizer, cache_dir, token_budgets)
        texts = [
            prepare(member.source, common, cache_dir, token_budget=budget, val_token_budget=val_budget)
            for member, budget, val_budget in zip(members, token_budgets, val_budgets, strict=True)
        ]
        return PreparedMixture(dict(zip(self.members, texts, strict=True)), self.shares, tokenizer.fingerprint())

    def _common_tokenizer(
        self, config: TokenizerConfig, cache_dir: str | Path | None, token_budgets: list[int | None]
    ) -> TokenizerConfig:
        """A tokenizer that is trained on the text of all sources is a file of the cache; others stay as they are.

        It does not depend on the weights, so that runs with other weights have the same tokens.
        """
        if config.kind not in ("bpe", "char"):
            return config
        sources = [member.source for member in self.members.values()]
        settings = {"format": FORMAT, "tokenizer": config.fingerprint(), "sources": [s.fingerprint() for s in sources]}
        if config.kind == "char":
            settings |= {"budgets": token_budgets}
        fingerprint = _sha256(settings)
        folder = resolve_cache_dir(cache_dir) / f"tokenizer-{fingerprint[:16]}"

        def texts() -> Iterator[str]:
            for source, budget in zip(sources, token_budgets, strict=True):
                found = training_texts(source, config, budget, progress=True)
                yield from first_bytes(found, config.train_bytes // len(sources)) if config.kind == "bpe" else found

        def fill(part: Path) -> None:
            content = train_tokenizer(config, texts(), progress=True).to_str(pretty=True).encode()
            (part / TOKENIZER).write_bytes(content)
            checksums = {"fingerprint": fingerprint, TOKENIZER: hashlib.sha256(content).hexdigest()}
            (part / CHECKSUMS).write_text(json.dumps(checksums), encoding="utf-8")

        def is_valid(folder: Path) -> bool:
            try:
                checksums = json.loads((folder / CHECKSUMS).read_bytes())
                digest = hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest()
                return checksums == {"fingerprint": fingerprint, TOKENIZER: digest}
            except (OSError, ValueError):
                return False

        if not is_valid(folder):
            with preparing(folder, "trains"):
                if not is_valid(folder):  # another process may have written it
                    write_folder(folder, fill, is_valid)
        return TokenizerConfig(kind="file", path=str(folder / TOKENIZER), eot=config.eot)


class PreparedMixture:
    """The prepared texts of a mixture by name, and values about all of them.

    Attributes:
        meta: like meta.json of one text: "fingerprint" of all texts with their tokenizer, but not of the shares;
            "counts" are sums; "sources" has the share and the values of each text.
    """

    def __init__(self, texts: dict[str, PreparedText], shares: Mapping[str, float], tokenizer: dict[str, Any]) -> None:
        self.texts, first = texts, next(iter(texts.values()))
        metas = {name: text.meta for name, text in texts.items()}
        kept = ("fingerprint", "source", "counts", "split", "overlap")
        counts = {split: [meta["counts"][split] for meta in metas.values()] for split in ("train", "val")}
        self.tokenizer: Tokenizer = first.tokenizer
        self.meta: dict[str, Any] = {
            "fingerprint": _sha256([meta["fingerprint"] for meta in metas.values()]),
            "source": {"kind": Mixture.name, "sources": {name: meta["source"] for name, meta in metas.items()}},
            "tokenizer": tokenizer,
            "counts": {
                split: asdict(Counts(**{key: sum(part[key] for part in parts) for key in parts[0]}))
                for split, parts in counts.items()
            },
            "sources": {
                name: {"share": shares[name]} | {key: meta[key] for key in kept} for name, meta in metas.items()
            },
        } | {key: first.meta[key] for key in ("dtype", "vocab_size", "eot_id", "libraries")}


def prepare_source(
    source: Source | Mixture,
    tokenizer: TokenizerConfig,
    cache_dir: str | Path | None,
    *,
    token_budget: int | None,
    val_token_budget: int | None,
) -> PreparedText | PreparedMixture:
    """`prepare.prepare` of one text, or `Mixture.prepare`."""
    if isinstance(source, Mixture):
        return source.prepare(tokenizer, cache_dir, token_budget=token_budget, val_token_budget=val_token_budget)
    return prepare(source, tokenizer, cache_dir, token_budget=token_budget, val_token_budget=val_token_budget)


def block_counts(weights: list[float]) -> list[int]:
    """Windows of each source in a block: in proportion to the weights, by largest remainder."""
    relative = np.array(weights, float) / max(weights)  # a sum of the weights themselves could overflow
    exact = relative / relative.sum() * BLOCK
    counts = np.floor(exact).astype(int)
    by_remainder = np.argsort(counts - exact, kind="stable")  # the largest remainder first
    counts[by_remainder[: BLOCK - counts.sum()]] += 1
    return counts.tolist()


def _source(name: str) -> tuple[Source, dict[Split, int | None]]:
    """The source of a data group with its budgets, or the files of a path.

    Raises:
        ValueError: neither of them.
        OSError: the path matches nothing.
    """
    import yaml

    groups = sorted(path.stem for path in GROUPS.glob("*.yaml"))
    if name == Mixture.name:
        raise ValueError(f"data.sources: {name} must not contain {name}; name its sources")
    if name == Files.name:
        raise ValueError(f"data.sources: {name} needs a path; give the path instead of {name}")
    if name in groups:
        values = yaml.safe_load((GROUPS / f"{name}.yaml").read_text(encoding="utf-8"))
        kind = SINGLE[values["source"]]
        settings = {field.name: values[field.name] for field in fields(kind) if field.name in values}
        return kind(**settings), {"train": values["token_budget"], "val": values["val_token_budget"]}
    if not any(char in name for char in "*?[") and not Path(name).expanduser().exists():
        near = difflib.get_close_matches(name, groups, n=1)
        valid = ", ".join(group for group in groups if group not in (Mixture.name, Files.name))
        remedy = f"did you mean {near[0]}?" if near else f"give a path, or one of {valid}"
        raise ValueError(f"data.sources: {printable(name)} is no source and no path that exists; {remedy}")
    try:
        return Files(path=name), {"train": None, "val": None}
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ValueError(message.replace("data.path=", "data.sources: ")) from error
    except OSError as error:
        raise OSError(str(error).replace("data.path=", "data.sources: ")) from error


def _check_files(sources: dict[str, Source]) -> None:
    """Raises ValueError if two sources share a file: the validation text of one could be training text of the other."""
    files = {
        name: {path.resolve() for _, path in source.files("train")}
        for name, source in sources.items()
        if isinstance(source, Files)
    }
    for (a, first), (b, second) in combinations(files.items(), 2):
        if both := first & second:
            names = f"{printable(a)} and {printable(b)}"
            raise ValueError(f"data.sources: {names} both contain {printable(min(both))}; leave it out of one of them")


def _check_different(fingerprints: dict[str, dict[str, Any]]) -> None:
    """Raises ValueError if two sources have the same text."""
    for (a, first), (b, second) in combinations(fingerprints.items(), 2):
        if first == second:
            names = f"{printable(a)} and {printable(b)}"
            raise ValueError(f"data.sources: {names} are the same text; leave out one of them")


def _shown(weights: Mapping[Any, Any]) -> str:
    return "{" + ", ".join(f"{name}: {weight}" for name, weight in weights.items()) + "}"


def _sha256(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
