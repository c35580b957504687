"""What an exported folder says of its model: README.md and certificate.json."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from tril.model.checkpoint import Checkpoint
from tril.model.generation.language_model import LanguageModel
from tril.model.interop.architectures import ARCHITECTURES, model_type
from tril.model.runs import partial_validation

CERTIFICATE = "certificate.json"
MEASURED = {"final": "steps", "best": "best_step"}  # of summary.json: prefix -> the key with the step of these figures
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [tril]{metadata}
---

# {name}

Trained with Tril.

| | |
|---|---|
{rows}

In training, each text starts with the token `{eot}`, which also ends it.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```
"""


def sha256_of(tensors: dict[str, Tensor]) -> dict[str, str]:
    """sha256 of the float32 values of each tensor, in row-major order."""
    flat = {name: x.detach().float().contiguous().view(-1).view(torch.uint8) for name, x in tensors.items()}
    return {name: hashlib.sha256(x.numpy().data).hexdigest() for name, x in flat.items()}


def figures(summary: dict[str, Any], step: int | None) -> dict[str, float]:
    """Validation loss and bits per byte of the weights of a step, from the summary.json of their run; {} if unknown."""
    for prefix, key in MEASURED.items():
        loss, bits = (summary.get(f"{prefix}_val_{name}") for name in ("loss", "bpb"))
        if step is not None and summary.get(key) == step and isinstance(loss, float) and isinstance(bits, float):
            part = partial_validation(summary.get("val_windows"))
            where = f" (on {part} of the validation part)" if part else ""
            return {f"validation loss, nats per token{where}": loss, f"bits per byte{where}": bits}
    return {}


def model_card(
    name: str, lm: LanguageModel, *, checkpoint: Checkpoint, summary: dict[str, Any], verdict: str, license: str | None
) -> str:
    """README.md, a model card with the metadata of the Hugging Face hub.

    Args:
        checkpoint: of the model, whose other entries it states.
        summary: summary.json of the run; {} for none.
        verdict: on the stored certificate, in words.
        license: identifier of the hub; None: not stated.
    """
    rows = {
        "class": ARCHITECTURES[model_type(lm.config)].class_name,
        "parameters": f"{lm.model.n_parameters():,}",
        "context, tokens": f"{lm.config.context_length:,}",
        "vocabulary": f"{lm.config.vocab_size:,} rows, {lm.n_ids:,} ids",
        "optimizer steps": "unknown" if checkpoint.step is None else f"{checkpoint.step:,}",
        **{key: f"{value:.4f}" for key, value in figures(summary, checkpoint.step).items()},
        "data fingerprint": checkpoint.data.get("fingerprint", "unknown"),
        "causality certificate": verdict,
        "license": license or "not stated",
    }
    cells = {key: _line(value).replace("|", "\\|") for key, value in rows.items()}
    metadata = f"\nlicense: {license}" if license else ""
    return CARD.format(
        name=_line(name),
        eot=_line(lm.eot),
        rows="\n".join(f"| {k} | {v} |" for k, v in cells.items()),
        metadata=metadata,
    )


def _line(value: Any) -> str:
    """A text in one line, without the marks of code."""
    return "".join(character if character.isprintable() else " " for character in str(value)).replace("`", "'")[:300]
