"""What the causality certificate of a checkpoint belongs to, as sha256 hashes of the weights, config, data and code.

    {"causality": {"passed": ..., "certified_at_step": step of the weights that were tested last, None: random weights,
                   "of": {"step", "weights", "config", "data", "code", "version", "settings"}}, ...}

"of" describes the file. So the verdict is one of these very weights where both steps are equal, and else of earlier
ones. The hashes show what was changed or mixed up since; they do not prevent forgery, since anyone can compute them.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor

from tril.model.checksums import checksums

PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = (  # what computes the logits and the loss, and what certifies them
    "model/*.py",
    "model/generation/*.py",
    "model/causality/*.py",
    "model/causality/grids/*.py",
    "model/training/module.py",
    "model/training/callbacks/causality_check.py",
)
DIFFERENCES = {"weights": "the weights differ", "data": "the data differ", "code": "the code differs"}


def describe(
    config: dict[str, Any], *, data: str | None, step: int | None = None, weights: str | None = None
) -> dict[str, Any]:
    """The entry "of" of a certificate.

    Args:
        config: all fields of the model's config.
        data: fingerprint of the training data; None: unknown.
        step: of the weights; None: unknown.
        weights: see `weights_sha256`; None: `add_weights` adds it.
    """
    values = json.dumps(config, sort_keys=True)
    installed = None
    with contextlib.suppress(PackageNotFoundError):  # a checkout that is not installed
        installed = version("tril")
    return {
        "step": step,
        "weights": weights,
        "config": hashlib.sha256(values.encode()).hexdigest(),
        "data": data,
        "code": sources_sha256(*SOURCES),
        "version": installed,
        "settings": json.loads(values),
    }


def add_weights(content: dict[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    """The content of a checkpoint, in which a certificate without the hash of the weights has it.

    A hash that is there stays: a file with other weights and an old certificate must not look certified.

    Args:
        digests: sha256 of each tensor by its path, see `tril.model.checksums.checksums`.
    """
    match content.get("tril"):
        case {"causality": {"of": {"weights": None} as of} as certificate} as entry:
            of = of | {"weights": weights_sha256(content["state_dict"], digests)}
            return content | {"tril": entry | {"causality": certificate | {"of": of}}}
    return content


def weights_sha256(state: Mapping[str, Tensor], digests: Mapping[str, str]) -> str:
    """One hash of all weights: of the name, dtype, shape and sha256 of each tensor, sorted by name."""
    lines = [f"{name} {x.dtype} {tuple(x.shape)} {digests[f'state_dict/{name}']}" for name, x in state.items()]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


@functools.cache
def sources_sha256(*patterns: str) -> str:
    """sha256 of the source files that match glob patterns relative to the package, with their paths."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in PACKAGE.glob(pattern)}):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def describe_checkpoint(content: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """`describe` for the content of a checkpoint that was read and built.

    Args:
        config: of the built model, which has the fields that older checkpoints lack.
    """
    state, data, step = content["state_dict"], content["tril"].get("data"), content.get("global_step")
    fingerprint = data.get("fingerprint") if isinstance(data, dict) else None
    return describe(
        config,
        data=fingerprint if isinstance(fingerprint, str) else None,
        step=step if type(step) is int else None,
        weights=weights_sha256(state, checksums({"state_dict": state})["tensors"]),
    )


def compare(certificate: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Whether a stored certificate belongs to a checkpoint.

    Args:
        certificate: the entry "causality" of the file, which may hold anything; None: it has none.
        found: what the file and the running code are, from `describe`.

    Returns:
        "text": one line; "belongs": whether it tested these weights, with this config, data and code; "differs": what
        speaks against that, in words; "passed" and "certified_at_step": as stored.
    """
    if not isinstance(certificate, dict) or not isinstance(certificate.get("passed"), bool):
        text = "none" if certificate is None else "none that can be read"
        return {"text": text, "belongs": False, "differs": [text], "passed": None, "certified_at_step": None}
    step, of = certificate.get("certified_at_step"), certificate.get("of")
    step = step if type(step) is int else None
    verdict = "passed" if certificate["passed"] else "FAILED"
    if not isinstance(of, dict):
        differs, end = ["no hashes stored"], "no hashes stored, so it may be of other weights, config, data or code"
    else:
        of = {key: value for key, value in of.items() if isinstance(value, str | int | dict)}  # may be anything
        verdict += f" at step {step}" if step is not None else " before training, with random weights"
        differs = _differences(of, found)
        if step is None or step != of.get("step"):
            differs.append(f"the weights are of step {of.get('step')}, which it did not test")
        all_equal = "belongs to these weights, config, data and code"
        end = f"does not belong to this file: {'; '.join(differs)}" if differs else all_equal
    return {
        "text": f"{verdict}; {end}",
        "belongs": not differs,
        "differs": differs,
        "passed": certificate["passed"],
        "certified_at_step": step,
    }


def _differences(of: dict[Any, Any], found: dict[str, Any]) -> list[str]:
    """What differs between a stored description and the found one, in words."""
    stored, settings = of.get("settings"), found["settings"]
    stored = stored if isinstance(stored, dict) else {}
    differs = [
        f"model.{name}={_shown(settings, name)} was {_shown(stored, name)}"
        for name in dict.fromkeys([*settings, *stored])
        if _shown(settings, name) != _shown(stored, name)
    ]
    if not differs and of.get("config") != found["config"]:
        differs = ["the config differs"]
    for name, difference in DIFFERENCES.items():
        if of.get(name) is None and found[name] is not None:
            differs.append(f"no hash of the {name} is stored")
        elif of.get(name) != found[name]:
            differs.append(difference)
    if "the code differs" in differs and of.get("version") != found["version"]:
        differs.append(f"Tril {found['version']} was {of.get('version')}")
    return differs


def _shown(settings: dict[Any, Any], name: Any) -> str:
    return ascii(settings[name]) if name in settings else "missing"
