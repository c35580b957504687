"""What an exported folder says of its model: README.md and certificate.json."""

import hashlib
from typing import Any

from torch import Tensor

from tril.model.generation.language_model import LanguageModel
from tril.model.runs import partial_validation

CERTIFICATE = "certificate.json"
MEASURED = {  # of summary.json: prefix -> the key with the step of these figures
    "final": "steps",
    "best": "best_step",
}


def certificate(tensors: dict[str, Tensor], causality: Any, comparison: dict[str, Any]) -> dict[str, Any]:
    """The content of certificate.json.

    Args:
        tensors: the exported weights.
        causality: the certificate that the checkpoint holds; None: none.
        comparison: `tril.model.binding.compare` of it with the checkpoint.
    """
    return {"causality": causality, "stored_certificate": comparison, "sha256": sha256_of(tensors)}


def sha256_of(tensors: dict[str, Tensor]) -> dict[str, str]:
    """sha256 of the float32 values of each tensor, in row-major order."""
    return {name: hashlib.sha256(x.float().contiguous().numpy().data).hexdigest() for name, x in tensors.items()}


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
    name: str,
    lm: LanguageModel,
    *,
    class_name: str,
    entry: dict[str, Any],
    step: int | None,
    summary: dict[str, Any],
    verdict: str,
    license: str | None,
) -> str:
    """README.md, a model card with the metadata of the Hugging Face hub.

    Args:
        entry: the "tril" entry of the checkpoint.
        step: of the weights; None: unknown.
        summary: summary.json of the run; {} for none.
        verdict: on the stored certificate, in words.
        license: identifier of the hub; None: not stated.
    """
    config = lm.config
    data = entry.get("data") if isinstance(entry.get("data"), dict) else {}
    rows = {
        "class": class_name,
        "parameters": f"{lm.model.n_parameters():,}",
        "context, tokens": f"{config.context_length:,}",
        "vocabulary": f"{config.vocab_size:,} rows, {lm.n_ids:,} ids",
        "optimizer steps": "unknown" if step is None else f"{step:,}",
        **{key: f"{value:.4f}" for key, value in figures(summary, step).items()},
        "data fingerprint": (data or {}).get("fingerprint", "unknown"),
        "causality certificate": verdict,
        "license": license or "not stated",
    }
    header = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags: [tril]"]
    header += [f"license: {license}"] if license else []
    table = ["| | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in rows.items())]
    loading = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        "```",
    ]
    text = f"In training, each text starts with the token `{_line(lm.eot)}`, which also ends it."
    return "\n".join(
        [*header, "---", "", f"# {_line(name)}", "", "Trained with Tril.", "", *table, "", text, "", *loading, ""]
    )


def _cell(value: Any) -> str:
    """A text for a cell of a Markdown table."""
    return _line(value).replace("|", "\\|")


def _line(value: Any) -> str:
    """A text in one line, without the marks of code."""
    text = "".join(character if character.isprintable() else " " for character in str(value))
    return text.replace("`", "'")[:300]
