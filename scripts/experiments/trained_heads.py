"""The heads of a trained run, and of every run of a sweep with averages over the seeds of each variant.

Letters: L layers, H heads, T tokens.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tril.model.atomic_files import write_text
from tril.model.checkpoint import Checkpoint
from tril.model.evaluation.evaluate import text_of_run
from tril.model.formats import csv_text, markdown_table, plural, shell_command
from tril.model.generation.generate import inference
from tril.model.generation.language_model import LanguageModel
from tril.model.heads.ablation import ablate, average, change_row, remove_in_turn
from tril.model.heads.attention_maps import TokenWindows, attention_maps
from tril.model.heads.head_plots import plot_heads
from tril.model.heads.page import write_page
from tril.model.heads.records import (
    COPY_LOSSES,
    HEAD_SCORES,
    UNIFORM,
    all_heads,
    head_name,
    map_text,
    read_maps,
    read_records,
)
from tril.model.heads.scores import SCORES, alphabet_of, in_words, score_heads
from tril.model.intervals import spread
from tril.model.masks import document_options
from tril.model.runs import find_checkpoint, run_folder
from tril.model.text_clusters import TextClusters
from tril.model.training.hardware import use_device
from tril.scripts.cli.errors import UserError, check_writable, printed_too, user_errors, writable
from tril.scripts.experiments.sweep import Run, read_sweep

N_NEXT_TOKENS = 10  # most probable next tokens on the page
SCOPE = "This describes one trained model on one text, not its configuration: another seed gives other heads."
EXPLAINED = (
    "Change of the loss in nats per token without a head: the sum over the heads of a layer, each removed alone, and "
    "the largest (rank 1), second largest, ... of a model; noise raises the first ranks and lowers the last ones. "
    "Means over seeds, with intervals over seeds and text that hold together in 95% for the rows of a variant. They "
    "do not test whether two variants differ."
)


def describe_model(path: Path, windows: int, prompt: str | None, seed: int, out: str | None, device: str) -> None:
    """Writes everything about the heads of one model, and prints its table.

    Args:
        path: of the checkpoint.
        windows: of the validation part, to measure on.
        prompt: the text whose attention maps are drawn; None: the start of the validation part.
        seed: of the repeated random sequences.
        out: the folder for the files; None: heads/ in the run's folder.
    """
    with user_errors():
        device, run_path = use_device(device), run_folder(path)
        checkpoint = Checkpoint.read(path)
        lm = checkpoint.language_model(device)
        lm.check_finite(path)
        names = all_heads(lm.config)
        text, clusters, tokens = sample_windows(checkpoint, windows)
        shown = prompt_ids(lm, tokens, prompt)
        records, (recorded, earlier) = read_records(run_path), read_maps(run_path)
        drawn = {(score, head) for score in (*SCORES, *COPY_LOSSES) for head in (*map(head_name, names), UNIFORM)}
        if records is not None and drawn != {*records.columns}:
            raise ValueError(f"{run_path / HEAD_SCORES} has other heads or scores than {path}; move it away")
        folder = writable(out or run_path / "heads", "out")
    print(f"{path} on {device}: {len(text.ids)} windows of {text.ids.shape[1]} tokens", file=sys.stderr, flush=True)
    ablation = ablate(lm.model, text, clusters)
    scores = score_heads(lm.model, text, alphabet=alphabet_of(lm.tokenizer, lm.eot_id), seed=seed)
    removal = remove_in_turn(lm.model, text, ablation)
    heads, counts = ablation.rows(), clusters.counts()
    for row, head in zip(heads, names, strict=True):
        row.update({name: values[head].item() for name, values in scores.heads.items()})
    uniform = {"head": UNIFORM, **scores.uniform}
    files = "heads.png, attention.html, heads.csv, removal.csv"
    lines = [["head", "change of the loss", "the model is then", *SCORES]]
    for row in sorted(heads, key=lambda row: -row["change"]):
        effect = f"{row['change']:+.4f} ± {row['high'] - row['change']:.4f}"
        lines.append([row["head"], effect, row["verdict"], *(f"{row[name]:.3f}" for name in SCORES)])
    lines.append([UNIFORM, "", "", *(f"{uniform[name]:.3f}" for name in SCORES)])
    explained = (
        f"On {windows} windows, the whole model has a loss of {ablation.loss:.4f} nats per token. The table shows how "
        f"much the loss rises without each head, with an interval over {clusters.describe()}. All {len(heads)} "
        f"intervals hold together with 95% confidence; more windows make them narrower. The other columns score the "
        f"attention of the head; the score of induction comes from {scores.induction_length} random tokens, repeated."
    )
    scope = f"{SCOPE} For averages over seeds:  {shell_command('heads', 'dir=SWEEP')}"
    parts = [in_words(heads, scores.uniform), explained, markdown_table(lines, (0, 2)), scope, f"{folder}: {files}"]
    with printed_too("\n\n".join(parts)):
        write_text(folder / "heads.csv", csv_text([*(row | counts for row in heads), uniform]))
        write_text(folder / "removal.csv", csv_text(row | counts for row in removal))
        plot_heads(folder / "heads.png", ablation, removal, records)
        ids = torch.tensor([shown], device=lm.model.embed.weight.device)  # (1, T)
        options = document_options(ids, text.document_eot)
        maps = attention_maps(lm.model, ids, **options)[:, 0].cpu()  # (L, H, T, T)
        write_page(
            folder / "attention.html",
            tokens=[lm.token_text(token) for token in shown],
            maps=maps,
            probabilities=next_tokens(lm, ids, options),
            title=f"Attention of {path}",
            scores={
                name.replace("_", " "): (f"{SCORES[name]}; mean over the validation windows", values)
                for name, values in scores.heads.items()
            },
            earlier=earlier if recorded == shown else {},
        )


def sample_windows(checkpoint: Checkpoint, n: int) -> tuple[TokenWindows, TextClusters, np.ndarray]:
    """Picks n whole windows of the validation part of a run, evenly spaced from the first one to the last one.

    Args:
        n: number of windows N, at least 2.

    Returns:
        The windows; the documents in them; and all ids of the validation part.

    Raises:
        ValueError: there are fewer than n whole windows, or the text has changed since the run.
    """
    tokens = text_of_run(checkpoint).tokens("val")
    length, eot = checkpoint.config.context_length, checkpoint.data["eot_id"]  # T
    n_whole = (len(tokens) - 1) // length
    if n > n_whole:
        limit = f"the {n_whole} whole windows of {length} tokens in the validation part"
        raise ValueError(f"windows={n} exceeds {limit}; lower it")
    numbers = np.arange(n) * (n_whole - 1) // (n - 1)
    positions = length * numbers[:, None] + np.arange(length + 1)  # (N, T + 1)
    ids = torch.from_numpy(tokens[positions].astype(np.int64))
    opens = tokens == eot  # a document opens with the end-of-text token
    documents = torch.from_numpy(np.cumsum(opens)[positions[:, :-1]])  # (N, T)
    windows = TokenWindows(ids[:, :-1], ids[:, 1:], eot if checkpoint.settings.get("data.document_mask") else None)
    return windows, TextClusters.of(documents, windows.targets), tokens


def prompt_ids(lm: LanguageModel, tokens: np.ndarray, prompt: str | None) -> list[int]:
    """The ids of the text to show; without a prompt, those that a run records, from its validation tokens."""
    limit = lm.config.context_length
    if prompt is None:
        return map_text(tokens[:limit].tolist(), limit)
    ids = lm.encode(prompt)
    if len(ids) > limit:
        raise ValueError(f"prompt has {len(ids)} tokens, more than the model's context_length={limit}; shorten it")
    return ids


def next_tokens(lm: LanguageModel, ids: Tensor, options: dict[str, Tensor]) -> list[list[tuple[str, float]]]:
    """After each of the ids (1, T), the most probable tokens with their probabilities; the options are of `GPT`."""
    with inference(lm.model):
        probabilities = lm.model(ids, **options)[0, :, : lm.n_ids].float().softmax(-1)  # (T, n_ids)
    top = probabilities.topk(min(N_NEXT_TOKENS, lm.n_ids))
    rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [[(lm.token_text(token), p) for token, p in zip(*row, strict=True)] for row in rows]


def describe_sweep(path: Path, windows: int, out: str | None, device: str) -> None:
    """Removes the heads of every run of a sweep; writes heads.csv and averages.csv, prints the averages.

    Args:
        path: of the sweep.
        windows: of the validation part, to measure losses on.
        out: the folder for the files; None: heads/ in the sweep's folder.
    """
    with user_errors():
        device, sweep = use_device(device), read_sweep(path)
        check_writable(folder := Path(out or path / "heads"), "out")
    rows, measured, left_out = [], {}, []
    for variant, run in ((each, run) for each in sweep.variants for run in each.runs):
        try:
            lm, text, clusters = subject_of(run, windows, device)
        except (OSError, ValueError) as error:
            left_out.append(f"{variant.label}, seed {run.seed}, {error}: left out.")
            continue
        print(f"{variant.label}, seed {run.seed}, on {device}", file=sys.stderr, flush=True)
        ablation = ablate(lm.model, text, clusters)
        measured.setdefault(variant.label, []).append(ablation)
        name = {"variant": variant.label, **variant.values, "seed": run.seed, "loss": ablation.loss}
        rows += [name | row | clusters.counts() for row in ablation.rows()]
    if not measured:
        raise UserError(f"{path} has no run whose heads can be removed. {' '.join(left_out)}")
    averages = {label: average(ablations) for label, ablations in measured.items()}
    values = {variant.label: variant.values for variant in sweep.variants}
    lines, average_rows = [["variant", "without", "change of the loss", "the model is then"]], []
    for label, quantity, change in ((label, *item) for label, group in averages.items() for item in group.items()):
        row = {"variant": label, **values[label], "quantity": quantity}
        average_rows.append(row | change_row(change) | {"seeds": change.seeds})
        lines.append([label, quantity, spread(change.difference, "+"), change.verdict])
    n_runs = plural(sum(map(len, measured.values())), "run")
    head = f"{n_runs} of {plural(len(averages), 'variant')}, {windows} windows each.\n{EXPLAINED}"
    files = f"{folder}: heads.csv, averages.csv"
    parts = [head, markdown_table(lines, (0, 1)), *["\n".join(left_out)] * bool(left_out), files]
    with printed_too("\n\n".join(parts)):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "heads.csv", csv_text(rows))
        write_text(folder / "averages.csv", csv_text(average_rows))


def subject_of(run: Run, windows: int, device: str) -> tuple[LanguageModel, TokenWindows, TextClusters]:
    """The model of a run and the text to measure it on.

    Raises:
        OSError: it has no checkpoint.
        ValueError: it is not finished, its heads cannot be removed, the text has changed, or it has fewer windows.
    """
    if run.state != "finished" or run.diverged:
        raise ValueError("diverged" if run.state == "finished" else f"is {run.state}")
    checkpoint = Checkpoint.read(find_checkpoint(run.folder))
    lm = checkpoint.language_model(device)
    lm.check_finite(checkpoint.path)
    all_heads(lm.config)
    text, clusters, _ = sample_windows(checkpoint, windows)
    return lm, text, clusters
