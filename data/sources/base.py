"""A text and the settings below `data:`, checked before anything expensive starts.

A source yields documents; `data/split.py` splits them, and `data/prepare.py` tokenizes them.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import group, setting, strict_settings
from tril.data.tokenizer import TokenizerConfig

MIN_LENGTH = 128  # of windows that double; shorter ones at first gave a higher loss (docs/log.md)
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Split = Literal["train", "val"]


class Document(NamedTuple):
    """A text that Tril keeps in one part of the split, if it can.

    Attributes:
        name: unique in its source; its hash decides the order in which documents are chosen for validation.
        is_row: it is compared without white space at its ends; one of too many is split by a hash of its content.
    """

    name: str
    text: str
    is_row: bool = False


@dataclass(frozen=True, config=strict_settings("data"))
class Source:
    """Text with a training and a validation part, its tokenizer and batches; registered in `data.sources.SOURCES`.

    A source defines `name`, `fingerprint`, `documents` and the setting `val_fraction`; it has the settings below too.

    Attributes:
        name: a short slug, which begins the name of the folder in the cache.
        own_split: why the source splits itself: `documents` then yields the documents of one part. None: it yields all
            of them, and Tril chooses `val_fraction` for validation.
        by_content: rows are split by a hash of their content, without being compared first.
        ends_documents: the end-of-text token is put after each document.
        note: a line about the documents that were read, for the user; "": there is nothing to say.
        prompt: what a sample of a model of this text begins with, unless the user chooses; "": a new document.
    """

    tokenizer: TokenizerConfig = group(TokenizerConfig, "text <-> token ids")
    batch_size: int = setting(4, "windows of context_length tokens per device and step", common=True, ge=1, le=1 << 16)
    double_length_at: Annotated[tuple[Fraction, ...], Field(strict=False)] = setting(  # not strict: yaml has lists
        (0.3, 0.7), "fractions of the run where windows double in length, up to context_length; []: never", common=True
    )
    val_batch_size: Count | None = setting(None, "windows per device in validation; null: batch_size")
    cache_dir: str | None = setting(None, "null: $TRIL_CACHE, else $XDG_CACHE_HOME/tril, else ~/.cache/tril")
    token_budget: Count | None = setting(None, "training tokens to prepare; null: all")
    val_token_budget: Count | None = setting(None, "validation tokens to prepare, likewise")
    document_mask: bool = setting(
        False, "true: documents in a window do not attend to each other; positions restart in each", common=True
    )
    name = ""
    val_fraction = 0.0
    own_split = None
    by_content = False
    ends_documents = True
    note = ""
    prompt = ""

    @field_validator("double_length_at")
    @classmethod
    def _check_order(cls, fractions: tuple[float, ...]) -> tuple[float, ...]:
        if list(fractions) != sorted(set(fractions)):
            raise ValueError(f"data.double_length_at={[*fractions]} must rise, such as [0.3,0.7]")
        return fractions

    def fingerprint(self) -> dict[str, Any]:
        """JSON values that change if the text or its split changes; computed at every start.

        Raises:
            OSError: the text, or the server that has it, cannot be reached.
        """
        raise NotImplementedError

    def documents(self, split: Split) -> Iterator[Document]:
        """The documents, always in the same order; `split` matters only with `own_split`."""
        raise NotImplementedError

    def window_lengths(self, context_length: int) -> dict[int, float]:
        """The lengths of training windows, in the order of training, each with the fraction of the run where it ends.

        Short sequences first: Press, Smith and Lewis, 2021, https://arxiv.org/abs/2012.15832. The first doublings are
        left out where the length before them would not be whole, or below MIN_LENGTH.
        """
        lengths = {context_length: 1.0}
        for end in reversed(self.double_length_at):
            length = min(lengths)
            if length % 2 or length < 2 * MIN_LENGTH:
                break
            lengths[length // 2] = end
        return dict(sorted(lengths.items()))
