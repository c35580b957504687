"""Random damage to text files, and what reading them gives; imports no torch."""

import gzip
import json
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet

from tril.data.sources.files import Files

ROWS = [f"row {i} of the text, and some words" for i in range(50)]
JSON_LINES = "".join(json.dumps({"id": i, "text": row}) + "\n" for i, row in enumerate(ROWS)).encode()


def write(path):
    """Writes a valid file."""
    if path.name.endswith(".parquet"):
        table = pyarrow.table({"text": ROWS, "id": list(range(len(ROWS)))})
        pyarrow.parquet.write_table(table, path, row_group_size=20)
    else:
        content = JSON_LINES if "jsonl" in path.name else "\n".join(ROWS).encode()
        path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)


def damaged(content, random):
    """One to three changes: a byte, a part removed, bytes inserted, a part doubled, a bit among the last 900 bytes."""
    data = bytearray(content)
    for _ in range(random.integers(1, 4)):
        at, end = sorted(random.integers(0, len(data) + 1, 2))
        match random.integers(5):
            case 0:
                data[at : at + 1] = random.bytes(1)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = random.bytes(random.integers(1, 20))
            case 3:
                data += data[at:end]
            case _ if data:
                data[-1 - random.integers(min(len(data), 900))] ^= 1 << random.integers(8)
    return bytes(data)


def outcomes(path, seed, n):
    """How often reading the damaged file gave the "same" text, "other" text, or one "line"; other errors are raised."""
    random, counts = np.random.default_rng(seed), Counter()
    write(path)
    intact = path.read_bytes()
    texts = [[piece.text for piece in Files(str(path), val_fraction=0.3).pieces(split)] for split in ("train", "val")]
    for _ in range(n):
        path.write_bytes(damaged(intact, random))
        try:
            source = Files(str(path), val_fraction=0.3)
            same = [[piece.text for piece in source.pieces(split)] for split in ("train", "val")] == texts
            counts["same" if same else "other"] += 1
        except (ValueError, OSError) as error:
            assert "\n" not in str(error) and path.name in str(error), error
            counts["line"] += 1
    return counts
