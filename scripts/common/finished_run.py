"""A finished run and the validation text that it was measured on, for the scripts that measure again."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from tril.model.runs import run_folder
from tril.scripts.common.cli import plain


@dataclass(frozen=True)
class Run:
    checkpoint: Path
    settings: dict  # its config.yaml
    steps: int | None  # that the checkpoint has seen
    ours: dict  # the checkpoint's "tril" entry


def read_run(checkpoint: Path) -> Run:
    from tril.model.checkpoint import read

    path = run_folder(checkpoint) / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist, which says what {checkpoint} was trained on; name a run's folder"
        )
    content = read(checkpoint)
    return Run(checkpoint, plain(OmegaConf.load(path)), content.get("global_step"), content["tril"])


def validation_tokens(run: Run):
    """(number of tokens,) of the validation part; raises ValueError where the text is no longer what the run had."""
    from tril.data.config import parse
    from tril.data.prepare import prepare

    data = parse(run.settings["data"])
    budgets = {"token_budget": data.token_budget, "val_token_budget": data.val_token_budget}
    new, old = prepare(data.source, data.tokenizer, data.cache_dir, **budgets), run.ours["data"]["fingerprint"]
    if new.meta["fingerprint"] != old:
        changed = (
            f"the text has changed since the run (fingerprint {new.meta['fingerprint'][:12]} instead of {old[:12]})"
        )
        raise ValueError(f"{changed}; restore it, or train again")
    return new.tokens("val")


def spread(tokens, n: int, length: int):
    """n whole windows, evenly spread over the tokens: their numbers (n,), inputs and targets (n, T)."""
    import numpy as np

    from tril.data.batches import gather

    there = (len(tokens) - 1) // length
    if n > there:
        raise ValueError(
            f"windows={n} exceeds the {there} whole windows of {length} tokens in the validation part; lower it"
        )
    numbers = np.arange(n) * (there - 1) // (n - 1)
    return numbers, *gather(tokens, numbers, length)
