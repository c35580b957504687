"""What the heads of a trained model do, and how the loss changes without them:  python scripts/heads.py ckpt=latest

Removes every head alone and then one after another, scores what each attends to, and draws the attention maps of a
text. All keys: configs/heads.yaml. The tables go to stdout. heads.csv, removal.csv, heads.json, heads.png,
removal.png, attention.png and the page attention.html go to a folder.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.model.atomic_files import write_json, write_text
from tril.model.runs import find_checkpoint, run_folder
from tril.model.validation import strict_settings
from tril.scripts.common.cli import build, entry, flatten, pick_device, user_errors, writable
from tril.scripts.common.finished_run import Run, evenly_spaced_windows, read_run, validation_tokens
from tril.scripts.common.tables import csv_text, markdown_table

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from tril.model.generation.language_model import LanguageModel
    from tril.model.gpt import GPT
    from tril.model.heads.ablation import Ablation
    from tril.model.heads.attention_maps import TokenWindows
    from tril.model.heads.scores import HeadScores

TEXT_KEYS = ("ckpt", "prompt", "out")
FILES = "heads.json heads.csv heads.png removal.csv removal.png attention.png attention.html".split()
SHOWN_TOKENS = 48  # of the validation part, without a prompt
N_NEXT_TOKENS = 10  # most probable next tokens on the page


@dataclass(frozen=True, config=strict_settings())
class Settings:
    """The keys of configs/heads.yaml."""

    ckpt: str
    prompt: str | None
    windows: Annotated[int, Field(ge=2)]  # a confidence interval needs two
    out: str | None
    device: str
    seed: Annotated[int, Field(ge=0, lt=2**63)]


@entry("heads", TEXT_KEYS)
def main(cfg) -> None:
    with user_errors():  # before torch, which takes a second to import
        settings = build(Settings, cfg)
        checkpoint = find_checkpoint(settings.ckpt)
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    from tril.model.checkpoint import load
    from tril.model.heads.ablation import ablate
    from tril.model.heads.scores import score_heads
    from tril.model.training.hardware import keep_freed_memory

    with user_errors():
        device = pick_device(settings.device)
        run, lm = read_run(checkpoint), load(checkpoint, device)
        check_model(lm.model, checkpoint)
        tokens = validation_tokens(run)
        numbers, text = sample_windows(run, tokens, settings.windows, lm.eot_id)
        shown = prompt_ids(lm, tokens, settings.prompt)
        folder = writable(settings.out or run_folder(checkpoint) / "heads", "out")
    if device == "cpu":
        keep_freed_memory()
    log(f"{checkpoint} on {device}: removing heads, {len(text.ids)} windows of {text.ids.shape[1]} tokens")
    ablation = ablate(lm.model, text)
    log("scoring what each head attends to")
    scores = score_heads(lm.model, text, alphabet=alphabet(lm), seed=settings.seed)
    write_figures(folder, ablation, scores)
    write_maps(folder, lm, shown, text, str(checkpoint))
    write_json(folder / "heads.json", report(settings, run, device, numbers, lm, shown, ablation, scores))
    show(ablation, scores)
    print(f"\n{folder}: {', '.join(FILES)}", flush=True)


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_model(model: "GPT", checkpoint: Path) -> None:
    """Raises ValueError for a model without heads or without a finite loss."""
    if model.config.n_heads == 0:
        raise ValueError(f"{checkpoint} has model.n_heads=0, blocks without attention heads; name another run")
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise ValueError(f"{checkpoint} has weights that are not finite, as its run diverged; name another checkpoint")


def sample_windows(run: Run, tokens: "np.ndarray", n: int, eot_id: int) -> tuple["np.ndarray", "TokenWindows"]:
    """The numbers of n evenly spaced windows (n,), and the windows."""
    from tril.model.heads.attention_maps import TokenWindows

    numbers, ids, targets = evenly_spaced_windows(tokens, n, run.metadata["config"]["context_length"])
    return numbers, TokenWindows(ids, targets, eot_id if run.settings["data"].get("document_mask") else None)


def prompt_ids(lm: "LanguageModel", tokens: "np.ndarray", prompt: str | None) -> list[int]:
    """The ids of the text to show; by default, the start of the validation tokens."""
    limit = lm.config.context_length
    if prompt is None:
        return tokens[: min(SHOWN_TOKENS, limit)].tolist()
    ids = lm.encode(prompt)
    if len(ids) > limit:
        raise ValueError(f"prompt has {len(ids)} tokens, more than the model's context_length={limit}; shorten it")
    return ids


def alphabet(lm: "LanguageModel") -> "Tensor":
    """The ids to draw random sequences from: all tokens except end-of-text."""
    import torch

    ids = torch.tensor(sorted(lm.tokenizer.get_vocab().values()))  # may have gaps
    return ids[ids != lm.eot_id]


def write_figures(folder: Path, ablation: "Ablation", scores: "HeadScores") -> None:
    """Writes heads.csv, removal.csv and their figures."""
    from tril.model.heads.head_plots import plot_ablation, plot_removal

    rows = [flatten(row, "_") for row in head_rows(ablation, scores)]
    write_text(folder / "heads.csv", csv_text([*rows, {"head": "uniform", **scores.uniform}]))
    removal = [row for method in ablation.orders for row in removal_rows(ablation, method)]
    write_text(folder / "removal.csv", csv_text(removal))
    plot_ablation(folder / "heads.png", ablation)
    plot_removal(folder / "removal.png", ablation)


def write_maps(folder: Path, lm: "LanguageModel", ids: list[int], text: "TokenWindows", name: str) -> None:
    """Writes attention.png and attention.html of one sequence."""
    import torch

    from tril.model.generation.generate import inference
    from tril.model.heads.attention_maps import attention_maps, document_options
    from tril.model.heads.head_plots import plot_maps
    from tril.model.heads.page import write_page

    batch = torch.tensor([ids], device=lm.model.embed.weight.device)
    options = document_options(batch, text.document_eot)
    maps = attention_maps(lm.model, batch, **options)[:, 0].cpu()  # (L, H, T, T)
    with inference(list(lm.model.modules())):
        probabilities = lm.model(batch, **options)[0, :, : lm.n_ids].float().softmax(-1)  # (T, n_ids)
    top = probabilities.topk(min(N_NEXT_TOKENS, lm.n_ids))
    rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    after = [[(token_text(lm, token), p) for token, p in zip(*row, strict=True)] for row in rows]
    tokens = [token_text(lm, token) for token in ids]
    plot_maps(folder / "attention.png", maps, tokens)
    write_page(folder / "attention.html", tokens=tokens, maps=maps, probabilities=after, title=f"Attention of {name}")


def token_text(lm: "LanguageModel", token: int) -> str:
    return lm.tokenizer.decode([token], skip_special_tokens=False)


def head_rows(ablation: "Ablation", scores: "HeadScores") -> list[dict]:
    """One row per head: the change of the loss by method, and the scores."""
    from tril.model.heads.ablation import METHODS, head_name

    changes, rows = {method: ablation.changes(method) for method in METHODS}, []
    for layer, head in changes[METHODS[0]]:
        row: dict[str, Any] = {"head": head_name((layer, head))}
        for method in METHODS:
            change = changes[method][layer, head]
            interval, corrected = change.interval, change.corrected
            row[method] = {"change": interval.mean, "low": interval.low, "high": interval.high}
            row[method] |= {"corrected_low": corrected.low, "corrected_high": corrected.high, "verdict": change.verdict}
        rows.append(row | {name: values[layer, head].item() for name, values in scores.heads.items()})
    return rows


def removal_rows(ablation: "Ablation", method: str) -> list[dict]:
    """One row per number of removed heads, from 0 on."""
    from tril.model.heads.ablation import head_name

    names = [None, *map(head_name, ablation.orders[method])]
    steps = zip(names, ablation.removal[method].mean(1).tolist(), ablation.curve(method), strict=True)
    return [
        {"by": method, "n_removed": n, "removed_last": name, "loss": loss}
        | {"change": change.mean, "low": change.low, "high": change.high}
        for n, (name, loss, change) in enumerate(steps)
    ]


def report(
    settings: Settings,
    run: Run,
    device: str,
    numbers: "np.ndarray",
    lm: "LanguageModel",
    shown: list[int],
    ablation: "Ablation",
    scores: "HeadScores",
) -> dict:
    """The content of heads.json."""
    from tril.model.heads.ablation import CONFIDENCE
    from tril.model.heads.scores import N_REPEATS, SCORES

    method = f"nats per token, mean over windows; {CONFIDENCE:.0%} intervals by Student's t, paired by window"
    correction = f"corrected: for {len(ablation.orders['zero'])} heads at once (Bonferroni), which decides the verdict"
    return {
        "checkpoint": os.path.relpath(run.checkpoint),
        "steps": run.steps,
        "data_fingerprint": run.metadata["data"]["fingerprint"],
        "document_mask": bool(run.settings["data"].get("document_mask")),
        "settings": {"windows": settings.windows, "seed": settings.seed, "prompt": settings.prompt, "device": device},
        "windows": {"of": "the validation part", "length": lm.config.context_length, "numbers": numbers.tolist()},
        "changes": f"{method}; {correction}",
        "scores": SCORES | {"left out": "positions that see only one key"},
        "induction": {"sequences": N_REPEATS, "length": scores.induction_length, "copies": 2},
        "loss": ablation.whole.mean().item(),
        "heads": head_rows(ablation, scores),
        "uniform": scores.uniform,
        "removal": {method: removal_rows(ablation, method) for method in ablation.orders},
        "shown_tokens": [token_text(lm, token) for token in shown],
    }


def show(ablation: "Ablation", scores: "HeadScores") -> None:
    """Prints both tables to stdout."""
    from tril.model.heads.ablation import CONFIDENCE

    print(
        f"Loss of the whole model: {ablation.whole.mean():.4f} nats per token over {len(ablation.whole)} windows.\n"
        f"Rise of the loss without a head, with the {CONFIDENCE:.0%} interval paired by window. corrected: for all\n"
        f"{len(ablation.orders['zero'])} heads at once (Bonferroni), which decides what is distinguishable from 0:\n"
    )
    print(markdown_table(ablation.table()))
    print(f"\nWhat each head attends to (induction: on {scores.induction_length} random tokens, repeated):\n")
    print(markdown_table(scores.table()))


if __name__ == "__main__":
    main()
