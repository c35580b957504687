"""The checks of a data pipeline that need no model: "shift" of its batches, and "overlap" of two texts.

B batch, T positions, N tokens of a text, n tokens of a passage.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from tril.model.causality.case import Result, first_true

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 (B, T) each
Batches = Callable[[Tensor, torch.Generator], Iterable[Batch]]

MAX_BATCHES = 64  # compared by "shift"
TEXT_SIZES = (1 << 16, 1 << 21)  # tokens: the second one where the first one gives no batch
MIN_COMPARED = 8  # targets of a row; fewer may be equal by chance
MIN_EQUAL = 0.9  # share of them
MAX_DISTANCE, MAX_AHEAD = 64, 4  # positions from a target back, and ahead, to its copy among the inputs
PASSAGE_TOKENS, MIN_PASSAGE_TOKENS = 50, 16  # n for a long text, and for a text of less than 1,000 tokens
MAX_SHARE = 0.01  # of the validation tokens


def checked_batches(batches: Iterable[Batch], limit: int = MAX_BATCHES) -> Iterator[Batch]:
    """The first batches.

    Raises:
        ValueError: an item is not a pair of int64 tensors of one shape (B, T).
    """
    for item in itertools.islice(batches, limit):
        if not (isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(x, Tensor) for x in item)):
            raise ValueError(f"batches yields {type(item).__name__}, not a pair of tensors; yield (inputs, targets)")
        inputs, targets = item
        if inputs.dim() != 2 or inputs.shape != targets.shape or {inputs.dtype, targets.dtype} != {torch.int64}:
            shapes = " and ".join(f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in (inputs, targets))
            raise ValueError(f"batches yields {shapes} but needs int64 (B, T) twice; shift before batching")
        yield inputs, targets


def batches_of(batches: Batches, text: Callable[[int], Tensor]) -> list[Batch]:
    """The first batches of a text of the size that they need.

    Args:
        text: number of tokens -> tokens (N,).

    Raises:
        ValueError: no batch, or as `checked_batches`.
    """
    for size in TEXT_SIZES:
        found = list(checked_batches(batches(text(size), torch.Generator().manual_seed(0))))
        if found:
            return found
    raise ValueError(
        f"batches(tokens, generator) yields nothing for {TEXT_SIZES[-1]:,} tokens; yield (inputs, targets)"
    )


def first_batches(batches: Batches, tokens: Tensor | None, vocab_size: int) -> list[Batch]:
    """The first batches of a text, or of random tokens. Raises ValueError if there are none."""
    if tokens is None:
        generator = torch.Generator().manual_seed(0)
        return batches_of(batches, lambda size: torch.randint(vocab_size, (size,), generator=generator))
    found = list(checked_batches(batches(tokens, torch.Generator().manual_seed(0))))
    if not found:
        raise ValueError(f"batches(tokens, generator) yields nothing for {len(tokens)} tokens; give a longer text")
    return found


def random_batches(batches: Batches, kinds: Tensor, generator: torch.Generator) -> Iterator[Batch]:
    """Batches without end, of random tokens of these kinds (K,): each epoch has a new text."""
    for size in TEXT_SIZES:
        n_batches = 1
        while n_batches:
            n_batches, text = 0, kinds[torch.randint(len(kinds), (size,), generator=generator)]
            for batch in batches(text, generator):
                n_batches += 1
                yield batch


def windows_like(batch: Batch) -> Batches:
    """Windows of a text in the shape of a batch, whose targets are the next tokens, ignored where those are."""
    targets = batch[1].cpu()
    n_rows, length = targets.shape

    def batches(tokens: Tensor, generator: torch.Generator) -> Iterator[Batch]:
        for rows in tokens.split(n_rows * (length + 1)):
            if len(rows) == n_rows * (length + 1):
                rows = rows.view(n_rows, length + 1)
                yield rows[:, :-1], torch.where(targets < 0, targets, rows[:, 1:])

    return batches


def check_shift(batches: Batches, vocab_size: int) -> tuple[Result, str]:
    """No target stands among its inputs: at its own position or before it.

    The batches are those of a text without repeated tokens, whose ids are not below `vocab_size`. So each token of a
    batch is known by its place in the text, and tokens that the pipeline inserts are no part of it.

    Returns:
        The result, and a note if targets are not the next tokens of the text, or "".
    """
    n_targets, n_seen, where, key, query, length = 0, 0, "", None, None, 0
    distances = []
    for number, (inputs, targets) in enumerate(batches_of(batches, lambda size: torch.arange(size) + vocab_size)):
        length, known = inputs.shape[1], targets >= vocab_size
        seen_at = first_equal(inputs, targets)  # (B, T)
        seen = known & (seen_at <= torch.arange(length, device=inputs.device))
        n_targets, n_seen = n_targets + int(known.sum()), n_seen + int(seen.sum())
        distances.append((targets - inputs)[known & (inputs >= vocab_size)])
        if not where and seen.any():
            row, query = first_true(seen)
            key = int(seen_at[row, query])
            which = f"the target at position {query} of row {row} of batch {number}"
            where = f"{which} is the input at position {key}{described(query - key)}"
    result = Result("shift", "distinct tokens", length, not where, n_seen, 0, n_targets, where, query, key)
    distance = abs(int(torch.cat(distances).mode().values)) if sum(map(len, distances)) else 0
    note = f"shift: most targets are {distance} tokens from their input in the text, not 1"
    return result, "" if where or distance == 1 else note


def first_equal(inputs: Tensor, targets: Tensor) -> Tensor:
    """The position of the first input of the row that equals each target, (B, T); T where there is none."""
    values, order = inputs.sort(dim=1, stable=True)
    rank = torch.searchsorted(values, targets.contiguous()).clamp(max=inputs.shape[1] - 1)
    return torch.where(values.gather(1, rank) == targets, order.gather(1, rank), inputs.shape[1])


def described(distance: int) -> str:
    """The usual reason why a target is the input `distance` positions before it."""
    reasons = {0: ", as if the targets were not shifted", 1: ", as if they were shifted to the past"}
    return reasons.get(distance, "")


def check_shift_of_rows(batches: Iterable[Batch]) -> Result:
    """No row has targets that equal its inputs at a fixed distance at or before them.

    For batches that are given. It misses single targets, reversed inputs and distances of 64 positions and more, all of
    which `check_shift` finds. A row that is equal at a distance ahead as well, as a constant one is, passes.
    """
    length, tested, worst = 0, 0, 0.0
    for number, (inputs, targets) in enumerate(batches):
        length, tested = max(length, inputs.shape[1]), tested + int((targets >= 0).sum())
        ahead = torch.zeros(len(inputs), device=inputs.device)
        for distance in range(1, min(MAX_AHEAD + 1, inputs.shape[1])):
            ahead = torch.maximum(ahead, equal_share(inputs, targets, -distance))
        for distance in range(min(MAX_DISTANCE, inputs.shape[1])):
            share = equal_share(inputs, targets, distance)
            wrong = (share >= MIN_EQUAL) & (share > ahead)
            worst = max(worst, share[wrong].max().item() if wrong.any() else 0.0)
            if wrong.any():
                [row] = first_true(wrong)
                share_of_row = f"{100 * share[row].item():.0f} % of the targets in row {row} of batch {number}"
                where = f"{share_of_row} are the inputs {distance} positions before them{described(distance)}"
                return Result("shift", "rows", length, False, worst, MIN_EQUAL, tested, where)
    return Result("shift", "rows", length, True, worst, MIN_EQUAL, tested)


def equal_share(inputs: Tensor, targets: Tensor, distance: int) -> Tensor:
    """Share of the targets of each row that equal the input `distance` positions before, (B,); 0 for too few."""
    size = targets.shape[1]
    asked = targets[:, max(distance, 0) : size + min(distance, 0)]
    given = inputs[:, max(-distance, 0) : size - max(distance, 0)]
    compared = (asked >= 0).sum(1)
    share = ((asked == given) & (asked >= 0)).sum(1) / compared.clamp(min=1)
    return share * (compared >= MIN_COMPARED)


def check_overlap(train: Tensor | None, validation: Tensor | None) -> Result:
    """At most 1 % of the validation tokens lie in a passage of n tokens that occurs in the training text.

    n is 50, and less for a validation text of less than 3,200 tokens. Passages are compared by hashes of 64 bits, of
    which 10^7 validation and 10^8 training tokens have 5e-5 expected collisions.

    Args:
        train, validation: token ids (N,).

    Raises:
        ValueError: one of them is missing, is empty, or has another type or shape.
    """
    train, validation = checked_text("train", train), checked_text("validation", validation)
    size = min(PASSAGE_TOKENS, max(MIN_PASSAGE_TOKENS, len(validation) // 64), len(validation))
    hashes, known = (passage_hashes(text.cpu().numpy(), size) for text in (validation, train))
    starts = np.isin(hashes, known)  # (N - n + 1,)
    changes = np.zeros(len(validation) + 1, np.int64)
    changes[: len(starts)] += starts
    changes[size : size + len(starts)] -= starts
    share = float((np.cumsum(changes)[:-1] > 0).mean())
    where = ""
    if share > MAX_SHARE:
        what = f"{100 * share:.1f} % of the validation tokens lie in passages of {size} tokens of the training text"
        where = f"{what}; the first one starts at token {int(starts.argmax())} of the validation text"
    return Result("overlap", f"n={size}", len(validation), not where, share, MAX_SHARE, len(validation), where)


def checked_text(name: str, text: Tensor | None) -> Tensor:
    """The text. Raises ValueError unless it is (N,) token ids."""
    if not isinstance(text, Tensor) or text.dim() != 1 or not len(text) or text.is_floating_point():
        found = tuple(text.shape) if isinstance(text, Tensor) else type(text).__name__
        raise ValueError(f"{name}={found} must be a tensor of token ids of shape (N,), N > 0; give both texts")
    return text


def passage_hashes(ids: np.ndarray, size: int) -> np.ndarray:
    """The hash of each passage of `size` ids, uint64 (N - n + 1,); empty if N < n.

    A passage of 2 k ids is hashed as a pair of passages of k; any other size as two that share ids.
    """
    if len(ids) < size:
        return np.empty(0, np.uint64)
    hashes, width = mixed(ids.astype(np.uint64)), 1
    while 2 * width <= size:
        hashes, width = joined(hashes[:-width], hashes[width:]), 2 * width
    rest = size - width
    return joined(hashes[:-rest], hashes[rest:]) if rest else hashes


def joined(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The hash of pairs of hashes; their order matters."""
    return mixed(first * np.uint64(0x9E3779B97F4A7C15) + second)


def mixed(values: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea and Flood 2014), a permutation of 64-bit integers."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
