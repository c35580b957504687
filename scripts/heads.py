"""What the heads of a trained model do, and how the loss changes without them:  python scripts/heads.py ckpt=latest

Removes every head alone and then one after another, scores what each attends to, and draws the attention maps of a
text. The tables go to stdout. heads.csv, removal.csv, heads.json, heads.png, removal.png, attention.png and the page
attention.html go to a folder.

All of that describes one trained model. For a configuration, name a sweep with several seeds:  python scripts/heads.py
dir=multirun/DATE/TIME  removes the heads of each run and averages over seeds what is comparable. heads.csv,
averages.csv, heads.json, layers.png, ranks.png and removal.png go to a folder.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.model.atomic_files import write_json, write_text
from tril.model.runs import find_checkpoint, find_sweep, run_folder
from tril.scripts.cli.command_line import CommandLine, Program, entry
from tril.scripts.cli.errors import pick_device, user_errors, writable
from tril.scripts.cli.finished_run import TrainedRun, read_run, sample_windows, validation_tokens
from tril.scripts.cli.formats import csv_text, markdown_table

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from tril.model.generation.language_model import LanguageModel
    from tril.model.heads.ablation import Ablation
    from tril.model.heads.attention_maps import TokenWindows
    from tril.model.heads.scores import HeadScores

FILES = "heads.json heads.csv heads.png removal.csv removal.png attention.png attention.html".split()
SCOPE = (
    "This describes one trained model on one text, not its configuration: another seed gives other heads. "
    "python scripts/heads.py dir=SWEEP averages over the seeds of a sweep."
)
SHOWN_TOKENS = 48  # of the validation part, without a prompt
NEWEST = "latest"  # the default of ckpt
N_NEXT_TOKENS = 10  # most probable next tokens on the page


@dataclass(frozen=True, config=strict_settings())
class HeadsCommand:
    """The heads of one model, or of all runs of a sweep."""

    ckpt: str = setting(
        "latest", "a checkpoint file, a run folder, or latest: the newest run below outputs/ and multirun/"
    )
    dir: str | None = setting(
        None,
        "instead of ckpt, all runs of a sweep: its folder, latest (the newest below multirun/), or a folder of runs",
    )
    prompt: str | None = setting(
        None,
        "with ckpt: a text to draw attention maps of; null: the start of the validation part; empty: end-of-text alone",
    )
    windows: int = setting(
        96, "evenly spaced windows of the validation part, to measure losses and scores on", ge=2
    )  # a confidence interval needs two
    out: str | None = setting(
        None, "folder for tables, figures and the page; null: heads/ in the folder of the run or the sweep"
    )
    device: str = setting("auto", "auto | cpu | cuda | mps")
    seed: int = setting(0, "with ckpt: seed of the repeated random sequences", ge=0, lt=2**63)

    def __post_init__(self) -> None:
        given = [f"ckpt={self.ckpt}"] * (self.ckpt != NEWEST) + [f"prompt={self.prompt}"] * (self.prompt is not None)
        if self.dir is not None and given:
            raise ValueError(f"{given[0]} is for one model, dir={self.dir} for all of a sweep; give one of them")


@entry(Program("heads", HeadsCommand))
def main(line: CommandLine[HeadsCommand]) -> None:
    settings = line.own
    with user_errors():  # before torch, which takes a second to import
        sweep = None if settings.dir is None else find_sweep(settings.dir)
        checkpoint = find_checkpoint(settings.ckpt) if sweep is None else None
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    from tril.model.training.hardware import keep_freed_memory

    with user_errors():
        device = pick_device(settings.device)
    if device == "cpu":
        keep_freed_memory()
    if checkpoint is not None:
        describe_model(settings, checkpoint, device)
    elif sweep is not None:
        from tril.scripts.experiments.head_averages import describe_sweep

        describe_sweep(sweep, settings.windows, settings.out, device, log)


def describe_model(settings: HeadsCommand, checkpoint: Path, device: str) -> None:
    """Writes everything about the heads of one model."""
    from tril.model.heads.ablation import ablate, obstacle
    from tril.model.heads.scores import score_heads

    with user_errors():
        run = read_run(checkpoint)
        lm = run.checkpoint.language_model(device)
        if (problem := obstacle(lm.model)) is not None:
            raise ValueError(f"{checkpoint} {problem}; name another run")
        texts = validation_tokens(run)
        numbers, text, clusters = sample_windows(run, texts, settings.windows)
        shown = prompt_ids(lm, texts[0], settings.prompt)
        folder = writable(settings.out or run_folder(checkpoint) / "heads", "out")
    log(f"{checkpoint} on {device}: removing heads, {len(text.ids)} windows of {text.ids.shape[1]} tokens")
    ablation = ablate(lm.model, text, clusters)
    log("scoring what each head attends to")
    scores = score_heads(lm.model, text, alphabet=alphabet(lm), seed=settings.seed)
    write_figures(folder, ablation, scores)
    write_maps(folder, lm, shown, text, str(checkpoint), scores)
    write_json(folder / "heads.json", report(settings, run, device, numbers, lm, shown, ablation, scores))
    show(ablation, scores, len(text.ids))
    print(f"\n{folder}: {', '.join(FILES)}", flush=True)


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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

    counts = ablation.clusters.counts()
    rows = [row | counts for row in scored_rows(ablation, scores)]
    write_text(folder / "heads.csv", csv_text([*rows, {"head": "uniform", **scores.uniform}]))
    write_text(folder / "removal.csv", csv_text([row | counts for row in ablation.removal_rows()]))
    plot_ablation(folder / "heads.png", ablation)
    plot_removal(folder / "removal.png", ablation)


def write_maps(
    folder: Path, lm: "LanguageModel", ids: list[int], text: "TokenWindows", name: str, scores: "HeadScores"
) -> None:
    """Writes attention.png and attention.html of one sequence."""
    import torch

    from tril.model.generation.generate import inference
    from tril.model.heads.attention_maps import attention_maps, document_options
    from tril.model.heads.head_plots import plot_maps
    from tril.model.heads.page import write_page
    from tril.model.heads.scores import SCORES

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
    explained = {
        name.replace("_", " "): (f"{SCORES[name]}; mean over the validation windows", values)
        for name, values in scores.heads.items()
    }
    title = f"Attention of {name}"
    write_page(folder / "attention.html", tokens=tokens, maps=maps, probabilities=after, title=title, scores=explained)


def token_text(lm: "LanguageModel", token: int) -> str:
    return lm.tokenizer.decode([token], skip_special_tokens=False)


def scored_rows(ablation: "Ablation", scores: "HeadScores") -> list[dict]:
    """One row per head: the change of the loss without it, and the scores."""
    return [
        row | {name: values[head].item() for name, values in scores.heads.items()}
        for head, row in zip(sorted(ablation.order), ablation.head_rows(), strict=True)
    ]


def report(
    settings: HeadsCommand,
    run: TrainedRun,
    device: str,
    numbers: "np.ndarray",
    lm: "LanguageModel",
    shown: list[int],
    ablation: "Ablation",
    scores: "HeadScores",
) -> dict:
    """The content of heads.json."""
    from tril.model.heads.scores import N_REPEATS, SCORES

    checkpoint, clusters = run.checkpoint, ablation.clusters
    return {
        "describes": SCOPE,
        "checkpoint": os.path.relpath(checkpoint.path or ""),
        "steps": checkpoint.step,
        "data_fingerprint": checkpoint.data["fingerprint"],
        "document_mask": bool(run.data.get("document_mask")),
        "settings": {"windows": settings.windows, "seed": settings.seed, "prompt": settings.prompt, "device": device},
        "windows": {"of": "the validation part", "length": lm.config.context_length, "numbers": numbers.tolist()},
        "observations": {"unit": clusters.unit} | clusters.counts(),
        "changes": f"nats per token; 95 % intervals of all heads together, over {clusters.unit}, paired",
        "scores": SCORES | {"left out": "positions that see only one key"},
        "induction": {"sequences": N_REPEATS, "length": scores.induction_length, "copies": 2},
        "loss": ablation.loss,
        "heads": scored_rows(ablation, scores),
        "uniform": scores.uniform,
        "removal": ablation.removal_rows(),
        "shown_tokens": [token_text(lm, token) for token in shown],
    }


def show(ablation: "Ablation", scores: "HeadScores", n_windows: int) -> None:
    """Prints both tables to stdout."""
    print(
        f"{SCOPE}\n\n"
        f"Loss of the whole model: {ablation.loss:.4f} nats per token over {n_windows} windows.\n"
        f"Change of the loss without a head, with an interval over {ablation.clusters.describe()};\n"
        f"the intervals of all {len(ablation.order)} heads hold together in 95 %:\n"
    )
    print(markdown_table(ablation.table()))
    print(f"\nWhat each head attends to (induction: on {scores.induction_length} random tokens, repeated):\n")
    print(markdown_table(scores.table()))


if __name__ == "__main__":
    main()
