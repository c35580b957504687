"""What a run records of its heads while it trains: heads.csv and head_maps.npz, in its folder.

Letters: N recorded steps, L layers, H heads, T tokens. This module does not import torch.
"""

import csv
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tril.model.atomic_files import atomic_path

HEAD_SCORES, HEAD_MAPS = "heads.csv", "head_maps.npz"
UNIFORM = "uniform"  # the head with uniform weights, the reference of the scores
COPY_LOSSES = ("first_copy_loss", "second_copy_loss")  # of repeated random sequences, see `HeadScores.copy_losses`
MAX_MAP_BYTES = 2_000_000  # of the compressed maps of a run


@dataclass(frozen=True)
class HeadRecords:
    """The content of heads.csv.

    Attributes:
        steps: (N,).
        heads: names, with UNIFORM as the last.
        scores: for each name in `scores.SCORES`, (N, number of `heads`).
        losses: (N, 2), see COPY_LOSSES.
    """

    steps: np.ndarray
    heads: list[str]
    scores: dict[str, np.ndarray]
    losses: np.ndarray


def read_records(folder: Path) -> HeadRecords | None:
    """The records of a run; None: it has none. Raises ValueError for a damaged file."""
    path = folder / HEAD_SCORES
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        heads = list(dict.fromkeys(row.pop("head") for row in rows))
        columns = {name: np.array([float(row[name] or "nan") for row in rows]) for name in rows[0]}
        values = {name: column.reshape(-1, len(heads)) for name, column in columns.items()}
        losses = np.stack([values.pop(name)[:, 0] for name in COPY_LOSSES], 1)
        return HeadRecords(values.pop("step")[:, 0].astype(int), heads, values, losses)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); restore it, or move it away") from error


def compress_maps(maps: np.ndarray) -> np.ndarray:
    """Weights (L, H, T, T) as bytes, uint8: the square root in steps of 1/255, so that small weights show.

    0 stays exactly 0, and what is above 0 stays above 0.
    """
    codes = np.rint(255 * np.sqrt(maps)).astype(np.uint8)
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
    try:
        with np.load(path) as arrays:
            shape = arrays["shape"]
            steps = {int(name): arrays[name] for name in arrays.files if name.isdecimal()}
            codes = {
                step: np.frombuffer(zlib.decompress(each.tobytes()), np.uint8).reshape(shape)
                for step, each in steps.items()
            }
            return arrays["ids"].tolist(), codes
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); restore it, or move it away") from error
