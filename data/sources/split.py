"""Which documents are for validation: in the order of a hash of their names, until the wanted share is met."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tril.data.families import Sketch, copied_shares, families
from tril.data.sources.base import key_hash

TOLERANCE = 1.5  # the share of the validation part is at most this factor from the wanted one
MAX_DOCUMENTS = 10_000  # with more, memory and time to compare them become noticeable
MAX_BYTES = 1 << 27  # of text in which near-copies are found, in 1 to 3 s
MAX_COPIED = 0.01  # of a validation document of an embedded corpus
MAX_DOCUMENT = 0.12  # of the validation part of an embedded corpus


def choose_val(
    names: Sequence[str], sketches: Sequence[Sketch], val_fraction: float, near: bool = True
) -> frozenset[str] | None:
    """Names of the documents for validation: whole families of copies, until the share fits.

    Args:
        near: near-copies belong to a family too, see `data.families.families`.

    Returns:
        None if whole families cannot give a share within a factor TOLERANCE of `val_fraction`.
    """
    sizes: dict[int, int] = {}
    groups = families(sketches, near)
    for group, sketch in zip(groups, sketches, strict=True):
        sizes[group] = sizes.get(group, 0) + sketch.size
    total = sum(sizes.values())
    target = val_fraction * total
    chosen = _fill({group: (names[group], size) for group, size in sizes.items()}, target, TOLERANCE * target)
    size = sum(sizes[group] for group in chosen)
    if not target / TOLERANCE <= size < total:
        return None
    return frozenset(name for name, group in zip(names, groups, strict=True) if group in chosen)


def choose_clean_val(documents: Mapping[str, bytes], val_fraction: float, salt: str = "") -> frozenset[str]:
    """Names of the documents of an embedded corpus for validation.

    Documents of which more than MAX_COPIED is copied from or to others are for training, with all their family. So the
    overlap of validation with training is at most MAX_COPIED. A document is at most MAX_DOCUMENT of the wanted part.
    """
    texts = list(documents.values())
    counts, shares = Counter(texts), copied_shares(texts)
    target = val_fraction * sum(map(len, texts))
    clean = {
        name: (f"{salt}:{name}", len(text))
        for (name, text), share in zip(documents.items(), shares, strict=True)
        if share <= MAX_COPIED and counts[text] == 1
    }
    small = {name: entry for name, entry in clean.items() if entry[1] <= MAX_DOCUMENT * target}
    enough = sum(size for _, size in small.values()) >= target  # not in the small texts of tests
    return frozenset(_fill(small if enough else clean, target, TOLERANCE * target))


def _fill(candidates: Mapping[Any, tuple[str, int]], target: float, limit: float) -> set[Any]:
    """Takes candidates, (name, size) each, in the order of a hash of the name, while that brings the sum nearer."""
    chosen, size = set(), 0
    for key in sorted(candidates, key=lambda key: key_hash(candidates[key][0])):
        larger = size + candidates[key][1]
        if larger <= limit and abs(larger - target) < abs(size - target):
            chosen.add(key)
            size = larger
    return chosen


def split_point(window: bytes) -> int:
    """Where to cut text near the start of `window`, the bytes from the one before the wanted position on.

    Returns:
        An index above 0: the first start of a line, else the first white space, else the first start of a character.
    """
    if line_end := window.find(b"\n", 0, len(window) - 1) + 1:  # at the end it would leave nothing
        return line_end
    blanks = [i for blank in (b" ", b"\t", b"\r", b"\v", b"\f") if (i := window.find(blank, 1)) > 0]
    characters = (i for i in range(1, len(window)) if window[i] & 0xC0 != 0x80)  # not inside a UTF-8 sequence
    return min(blanks) if blanks else next(characters, len(window))
