"""Loads a folder with `transformers` and compares it with the model that was written there."""

from pathlib import Path
from typing import Any

import torch

from tril.model.causality.grids.transformers_loading import quiet
from tril.model.generation.language_model import LanguageModel

LIMIT = 1e-4  # on the difference of logits in float32
RELATIVE_LIMIT = 1e-5  # of the largest logit, where that is more: rounding grows with it
N_ROWS = 2
N_PROBES = 200  # tokens of a random text
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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet()
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    loading = options | {"dtype": torch.float32, "output_loading_info": True, "use_safetensors": True}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
        model, info = AutoModelForCausalLM.from_pretrained(folder, **loading)  # pyright: ignore[reportGeneralTypeIssues] # a pair with output_loading_info
    except Exception as error:  # transformers raises many kinds, with many lines
        return f"the folder cannot be loaded ({' '.join(str(error).split())[:200]})"
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            return f"the folder has {kind} {', '.join(sorted(map(str, info[kind])))}"
    return _difference_of_logits(model, lm) or _difference_of_texts(model, tokenizer, lm)


def _difference_of_logits(model: Any, lm: LanguageModel) -> str | None:
    longest, generator = lm.config.context_length, torch.Generator().manual_seed(0)
    ids = torch.randint(lm.n_ids, (N_ROWS, longest), generator=generator)  # (B, T)
    device = lm.model.embed.weight.device
    for length in sorted({1, min(2, longest), (longest + 1) // 2, longest}):
        ours = lm.model(ids[:, :length].to(device)).cpu()  # (B, T, V)
        theirs = model.eval()(ids[:, :length]).logits
        largest, error = ours.abs().max().item(), (ours - theirs).abs().max().item()
        if not error <= max(LIMIT, RELATIVE_LIMIT * largest):  # a NaN fails as well
            return f"its logits differ by {error:.3g} at a length of {length} tokens, limit {LIMIT:g}"
    return None


def _difference_of_texts(model: Any, tokenizer: Any, lm: LanguageModel) -> str | None:
    longest, generator = lm.config.context_length, torch.Generator().manual_seed(1)
    ids = torch.randint(lm.n_ids, (N_PROBES,), generator=generator).tolist()
    text = lm.tokenizer.decode(ids, skip_special_tokens=False)
    expected = lm.tokenizer.encode(text, add_special_tokens=False).ids
    if tokenizer(text, add_special_tokens=False).input_ids != expected:
        return "its tokenizer gives other ids for the same text"
    n_new = min(NEW_TOKENS, longest - 1)
    if n_new < 1:
        return None
    start = torch.tensor([[lm.eot_id]])
    generated = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=n_new)
    theirs = tokenizer.decode(generated[0, 1:], skip_special_tokens=True)
    ours = lm.generate("", n_new, temperature=0.0)
    return None if theirs == ours else f"its greedy text is {theirs!r}, and ours is {ours!r}"
