"""What the causality certificate of a checkpoint belongs to, as sha256 digests of the weights, config, data and code.

    {"causality": {"passed": ..., "certified_at_step": step of the weights that were tested last, None: random weights,
                   "of": {"step", "weights", "config", "data", "code"}}, ...}

"of" describes the file. So the verdict is one of these very weights where both steps are equal, and else of earlier
ones. The digests show what was changed or mixed up since; they do not prevent forgery, since anyone can compute them.
"""

import functools
import hashlib
from pathlib import Path
from typing import Any

from tril.model.checkpoint import PREFIX, Checkpoint
from tril.model.digest import digest

PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = (  # what computes the logits and the loss, and what certifies them
    "model/*.py",
    "model/generation/*.py",
    "model/causality/*.py",
    "model/causality/grids/*.py",
    "model/training/module.py",
    "model/training/callbacks/causality_check.py",
)
DIFFERENCES = {
    "weights": "the weights differ",
    "config": "the config differs",
    "data": "the data differ",
    "code": "the code differs",
}


def describe(config: dict[str, Any], *, data: str | None, step: int | None = None) -> dict[str, Any]:
    """The entry "of" of a certificate, without the digest of the weights, which `write_state` adds.

    Args:
        config: all fields of the model's config.
        data: fingerprint of the training data; None: unknown.
        step: of the weights; None: unknown.
    """
    return {"step": step, "weights": None, "config": digest(config), "data": data, "code": sources_sha256(*SOURCES)}


def weights_digest(weights: dict[str, Any]) -> str:
    """The digest of the weights of a GPT, as in a checkpoint file."""
    return digest({PREFIX + name: tensor for name, tensor in weights.items()})


def compare(checkpoint: Checkpoint) -> dict[str, Any]:
    """Whether the certificate in a checkpoint belongs to its weights, config and data, and to the running code.

    Returns:
        "text": one line; "belongs"; "differs": what speaks against it, in words; "passed" and "certified_at_step": as
        stored; "of": what the file and the code are.
    """
    fingerprint = checkpoint.data.get("fingerprint")
    is_text = isinstance(fingerprint, str)
    found = describe(checkpoint.config.to_dict(), data=fingerprint if is_text else None, step=checkpoint.step)
    found["weights"] = weights_digest(checkpoint.weights)
    certificate = checkpoint.certificate
    if certificate is None or not isinstance(certificate.get("passed"), bool):
        text = "none" if certificate is None else "none that can be read"
        verdict = {"text": text, "belongs": False, "differs": [text], "passed": None, "certified_at_step": None}
        return verdict | {"of": found}
    step, of = certificate.get("certified_at_step"), certificate.get("of")
    of = of if isinstance(of, dict) else {}
    differs = [words for name, words in DIFFERENCES.items() if of.get(name) != found[name]]
    if type(step) is not int or step != of.get("step"):
        differs.append(f"the weights are of step {ascii(of.get('step'))}, which it did not test")
    text = "passed" if certificate["passed"] else "FAILED"
    text += f" at step {step}" if type(step) is int else " before training, with random weights"
    end = f"does not belong to this file: {'; '.join(differs)}" if differs else "belongs to these weights, config, data"
    return {
        "text": f"{text}; {end}" if differs else f"{text}; {end} and code",
        "belongs": not differs,
        "differs": differs,
        "passed": certificate["passed"],
        "certified_at_step": step if type(step) is int else None,
        "of": found,
    }


@functools.cache
def sources_sha256(*patterns: str) -> str:
    """sha256 of the source files that match glob patterns relative to the package, with their paths."""
    content = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in PACKAGE.glob(pattern)}):
        content.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()
