"""Reads the .wandb file of a run that stayed on disk: the log format of LevelDB, with records of protobuf."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace

BLOCK = 32768  # bytes; no header of a record crosses the end of a block


def read_wandb(folder: Path, number: int = -1) -> SimpleNamespace:
    """What a process logged below `folder`/wandb: the last one, or one by its number.

    Returns:
        `folder` of its files,
        `run` (the message that started it), `config` and `summary` by key, `history` (a dict per row), `artifacts`
        (their messages) and `exit_code`.
    """
    from wandb.proto import wandb_internal_pb2 as messages

    path = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)[number]
    found = SimpleNamespace(
        folder=path.parent, run=None, config={}, summary={}, history=[], artifacts=[], exit_code=None
    )
    for content in _records(path.read_bytes()):
        record = messages.Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.run = record.run
            found.config |= _values(record.run.config.update)
        elif kind in ("config", "summary"):
            getattr(found, kind).update(_values(getattr(record, kind).update))
        elif kind == "history":
            found.history.append(_values(record.history.item))
        elif kind == "request" and record.request.WhichOneof("request_type") == "partial_history":
            found.history.append(_values(record.request.partial_history.item))
        elif kind == "artifact":
            found.artifacts.append(record.artifact)
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def _values(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> list[bytes]:
    assert data[:4] == b":W&B"
    position, records, parts = 7, [], b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:  # padding
            position += BLOCK - position % BLOCK
            continue
        size, kind = struct.unpack_from("<HB", data, position + 4)  # after a CRC
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(parts)
            parts = b""
    return records
