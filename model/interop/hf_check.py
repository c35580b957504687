"""Loads a folder with `transformers` and compares it with the model that was written there."""

import logging
from pathlib import Path
from typing import Any

import torch

from tril.model.generation.language_model import LanguageModel

LIMIT = 1e-4  # on the difference of logits in float32
RELATIVE_LIMIT = 1e-5  # of the largest logit, where that is more: rounding grows with it
NEW_TOKENS = 32


def require_transformers() -> None:
    """Raises ValueError if `transformers` is not installed."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        cause = "the folder is loaded and compared before it gets its name"
        raise ValueError(f"to=hf needs the library transformers: {cause}; pip install transformers") from error


@torch.no_grad()
def difference(folder: Path, lm: LanguageModel) -> str | None:
    """What `transformers` computes differently from `lm`, in words; None: nothing.

    Compared are the names of the weights, the logits at several lengths, the ids of a text, and the greedy text.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    loading = options | {"dtype": torch.float32, "output_loading_info": True, "use_safetensors": True}
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **options)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **loading)  # pyright: ignore[reportGeneralTypeIssues] # a pair with output_loading_info
    except Exception as error:  # transformers raises many kinds, with many lines
        return f"the folder cannot be loaded ({' '.join(str(error).split())[:200]})"
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            return f"the folder has {kind} {', '.join(sorted(map(str, info[kind])))}"
    longest, generator = lm.config.context_length, torch.Generator().manual_seed(0)
    ids, device = torch.randint(lm.n_ids, (2, longest), generator=generator), lm.model.embed.weight.device  # (B, T)
    for length in sorted({1, min(2, longest), (longest + 1) // 2, longest}):
        ours = lm.model(ids[:, :length].to(device)).cpu()  # (B, T, V)
        error = (ours - model.eval()(ids[:, :length]).logits).abs().max().item()
        if not error <= max(LIMIT, RELATIVE_LIMIT * ours.abs().max().item()):  # a NaN fails as well
            return f"its logits differ by {error:.3g} at a length of {length} tokens, limit {LIMIT:g}"
    text = lm.tokenizer.decode(torch.randperm(lm.n_ids, generator=generator).tolist(), skip_special_tokens=False)
    if tokenizer(text, add_special_tokens=False).input_ids != lm.tokenizer.encode(text, add_special_tokens=False).ids:
        return "its tokenizer gives other ids for the same text"
    if (n_new := min(NEW_TOKENS, longest - 1)) < 1:
        return None
    start = torch.tensor([[lm.eot_id]])
    generated = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=n_new)
    theirs, ours = tokenizer.decode(generated[0, 1:], skip_special_tokens=True), lm.generate("", n_new, temperature=0.0)
    return None if theirs == ours else f"its greedy text is {theirs!r}, and ours is {ours!r}"
