"""What a run records of its heads while it trains: heads.csv and head_maps.npz, in its folder.

Letters: L layers, H heads, T tokens. This module does not import torch.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tril.model.atomic_files import atomic_path, read_arrays, reading
from tril.model.config import GPTConfig

if TYPE_CHECKING:
    from pandas import DataFrame

Head = tuple[int, int]  # layer, head
HEAD_SCORES, HEAD_MAPS = "heads.csv", "head_maps.npz"
UNIFORM = "uniform"  # the head with uniform weights, the reference of the scores
COPY_LOSSES = ("first_copy_loss", "second_copy_loss")  # of repeated random sequences, see `HeadScores.copy_losses`
MAP_TOKENS = 48  # of the start of the validation part
REPEATED_TOKENS = 16  # of these follow once more, so that a head that continues repeated text shows
MAX_MAP_BYTES = 2_000_000  # of the compressed maps of a run
MAX_WEIGHTS = 1 << 28  # of all maps of a file, which zlib can compress to a thousandth


def head_name(head: Head) -> str:
    return "L{}H{}".format(*head)


def all_heads(config: GPTConfig) -> list[Head]:
    """The heads of a model, by layer. Raises ValueError if it has none."""
    if config.n_heads == 0:
        raise ValueError("model.n_heads=0: a model without attention has no heads; name another model")
    return [(layer, head) for layer in range(config.n_layers) for head in range(config.n_heads)]


def read_records(folder: Path) -> "DataFrame | None":
    """heads.csv with a row for each step and a column for each score (or loss) and head; None: the run has none.

    Raises:
        ValueError: the file is damaged.
    """
    import pandas as pd

    path = folder / HEAD_SCORES
    if not path.is_file():
        return None
    with reading(path):
        rows = pd.read_csv(path).astype({"step": int})
        table = rows.pivot(index="step", columns="head").astype(float)
        return table.reindex(columns=rows["head"].unique(), level="head")  # as in the file: L2H0 before L10H0


def map_text(tokens: Sequence[int], limit: int) -> list[int]:
    """The text of attention maps, at most `limit` tokens: the start of `tokens`, whose own start follows again."""
    start = list(tokens[: min(MAP_TOKENS, limit)])
    return [*start, *start[: min(REPEATED_TOKENS, limit - len(start))]]


def compress_maps(maps: np.ndarray) -> np.ndarray:
    """Weights (L, H, T, T) as bytes, uint8: the square root in steps of 1/255, so that small weights show.

    0 stays exactly 0, and what is above 0 stays above 0. The NaN of a diverged model become 0.
    """
    codes = np.rint(255 * np.sqrt(np.nan_to_num(maps))).astype(np.uint8)
    codes[(codes == 0) & (maps > 0)] = 1
    return np.frombuffer(zlib.compress(codes.tobytes()), np.uint8).copy()  # a writable array, as torch wants


def thin_out(maps: dict[int, np.ndarray], limit: int = MAX_MAP_BYTES) -> None:
    """Removes steps until the maps have at most `limit` bytes: those whose neighbors are the closest, by their ratio.

    The first and the last step stay.
    """
    while sum(len(each) for each in maps.values()) > limit and len(maps) > 2:
        steps = list(maps)
        triples = zip(steps, steps[1:], steps[2:], strict=False)
        del maps[min(triples, key=lambda triple: (triple[2] + 1) / (triple[0] + 1))[1]]


def save_maps(folder: Path, ids: Sequence[int], shape: Sequence[int], maps: Mapping[int, np.ndarray]) -> None:
    """Writes head_maps.npz.

    Args:
        ids: of the text, (T,).
        shape: (L, H, T, T).
        maps: step -> see `compress_maps`.
    """
    arrays: dict[str, Any] = {str(step): each for step, each in maps.items()}
    with atomic_path(folder / HEAD_MAPS) as part, part.open("wb") as file:
        np.savez(file, ids=ids, shape=shape, **arrays)


def read_maps(folder: Path) -> tuple[list[int], dict[int, np.ndarray]]:
    """The ids of the text and the codes (L, H, T, T) of each step; nothing if the run has none.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / HEAD_MAPS
    if not path.is_file():
        return [], {}
    arrays = read_arrays(path)
    with reading(path):
        ids, shape = arrays["ids"].tolist(), arrays["shape"].tolist()
        maps = {int(name): each.tobytes() for name, each in arrays.items() if name.isdecimal()}
        if shape[2:] != [len(ids)] * 2 or math.prod(shape) * len(maps) > MAX_WEIGHTS:
            raise ValueError(f"its maps have the shape {shape}")
        size = math.prod(shape) + 1  # one more, so that too long ones differ
        codes = {step: zlib.decompressobj().decompress(each, size) for step, each in maps.items()}
        return ids, {step: np.frombuffer(each, np.uint8).reshape(shape) for step, each in codes.items()}
