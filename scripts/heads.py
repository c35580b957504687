"""What the heads of a trained model do, and what it loses without them:  python scripts/heads.py ckpt=latest

Removes every head in turn and then one after another, scores what each attends to, and draws the attention maps of a text. All keys:
configs/heads.yaml. The tables go to stdout; heads.csv, removal.csv and heads.json, the pictures heads.png, removal.png and attention.png,
and the page attention.html go into a folder.
"""

import csv
import json
import math
import os
import sys
import warnings
from pathlib import Path

from tril.model.runs import find_checkpoint, run_folder
from tril.scripts.common.cli import entry, pick_device, plain, user_errors, writable
from tril.scripts.common.finished_run import Run, read_run, spread, validation_tokens

TEXTS = ("ckpt", "prompt", "out")  # keys whose value is text as it was typed
SHOWN_TOKENS = 48  # of the validation part, where there is no prompt
MOST_PROBABLE = 10  # next tokens on the page


@entry("heads", TEXTS)
def main(cfg) -> None:
    cfg = plain(cfg)
    with user_errors():
        check(cfg)
        checkpoint = find_checkpoint(str(cfg["ckpt"]))
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # on a CPU, for its result
    from tril.model.checkpoint import load
    from tril.model.heads.ablation import ablate  # importing torch takes a second: what is wrong above is said at once
    from tril.model.heads.scores import score_heads
    from tril.model.training.hardware import keep_freed_memory

    with user_errors():
        device = pick_device(cfg["device"])
        run, lm = read_run(checkpoint), load(checkpoint, device)
        check_model(lm.model, checkpoint)
        tokens = validation_tokens(run)
        numbers, text = windows_of(run, tokens, cfg["windows"], lm.tokenizer.token_to_id(lm.eot))
        shown = prompt_ids(lm, tokens, cfg["prompt"])
        folder = writable(cfg["out"] or run_folder(checkpoint) / "heads", "out")
    if device == "cpu":
        keep_freed_memory()
    say(f"{checkpoint} on {device}: removing heads, {len(text.ids)} windows of {text.ids.shape[1]} tokens")
    ablation = ablate(lm.model, text)
    say("scoring what each head attends to")
    scores = score_heads(lm.model, text, alphabet=alphabet(lm), seed=cfg["seed"])
    files = write_figures(folder, ablation, scores) + write_maps(folder, lm, shown, text, str(checkpoint))
    (folder / "heads.json").write_text(
        json.dumps(report(cfg, run, device, numbers, lm, shown, ablation, scores), indent=2) + "\n"
    )
    show(ablation, scores)
    print(f"\n{folder}: {', '.join(['heads.json', *files])}", flush=True)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check(cfg: dict) -> None:
    """Raises ValueError for values that no run could make right."""
    if not isinstance(cfg["windows"], int) or cfg["windows"] < 2:
        raise ValueError(f"windows={cfg['windows']} must be a whole number, at least 2: an interval needs two")
    if not isinstance(cfg["seed"], int) or not 0 <= cfg["seed"] < 2**63:
        raise ValueError(f"seed={cfg['seed']} must be a whole number from 0 to 2**63 - 1")
    if cfg["prompt"] is not None and not isinstance(cfg["prompt"], str):
        raise ValueError(f"prompt={cfg['prompt']} must be a text, not a list; write it in one piece")


def check_model(model, checkpoint: Path) -> None:
    """Raises ValueError for a model that has no heads to look at, or no loss."""
    if model.config.n_heads == 0:
        raise ValueError(
            f"{checkpoint} has model.n_heads=0, blocks without attention: there is no head to look at; name another run"
        )
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise ValueError(f"{checkpoint} has weights that are not finite: its run has diverged; name another checkpoint")


def windows_of(run: Run, tokens, n: int, eot_id: int):
    """The numbers of the windows (n,), and the text that they are."""
    from tril.model.heads.attention_maps import Text

    numbers, ids, targets = spread(tokens, n, run.ours["config"]["context_length"])
    return numbers, Text(ids, targets, eot_id if run.settings["data"].get("document_mask") else None)


def prompt_ids(lm, tokens, prompt: str | None) -> list[int]:
    limit = lm.config.context_length
    if prompt is None:
        return tokens[: min(SHOWN_TOKENS, limit)].tolist()
    ids = lm.encode(prompt)
    if len(ids) > limit:
        raise ValueError(f"prompt has {len(ids)} tokens, more than the model's context_length={limit}; shorten it")
    return ids


def alphabet(lm):
    """The ids that random sequences are drawn from: every token but the one that ends a text."""
    import torch

    ids = torch.tensor(sorted(lm.tokenizer.get_vocab().values()))  # which may have gaps
    return ids[ids != lm.tokenizer.token_to_id(lm.eot)]


def write_figures(folder: Path, ablation, scores) -> list[str]:
    """heads.csv, removal.csv and their pictures."""
    from tril.model.heads.head_plots import plot_ablation, plot_removal

    write_csv(
        folder / "heads.csv",
        [flat(row) for row in head_rows(ablation, scores)] + [{"head": "uniform", **scores.uniform}],
    )
    write_csv(folder / "removal.csv", [row for way in ablation.orders for row in removal_rows(ablation, way)])
    plot_ablation(folder / "heads.png", ablation)
    plot_removal(folder / "removal.png", ablation)
    return ["heads.csv", "heads.png", "removal.csv", "removal.png"]


def write_maps(folder: Path, lm, ids: list[int], text, name: str) -> list[str]:
    """attention.png and attention.html of one sequence."""
    import torch

    from tril.model.generation.generate import inference
    from tril.model.heads.attention_maps import attention_maps, within_documents
    from tril.model.heads.head_plots import plot_maps
    from tril.model.heads.page import write_page

    batch = torch.tensor([ids], device=lm.model.embed.weight.device)
    options = within_documents(batch, text.document_eot)
    maps = attention_maps(lm.model, batch, **options)[:, 0].cpu()  # (L, H, T, T)
    with inference(list(lm.model.modules())):
        probabilities = lm.model(batch, **options)[0, :, : lm.n_ids].float().softmax(-1)  # (T, n_ids)
    top = probabilities.topk(min(MOST_PROBABLE, lm.n_ids))
    after = [
        [(piece(lm, token), p) for token, p in zip(*row)] for row in zip(top.indices.tolist(), top.values.tolist())
    ]
    tokens = [piece(lm, token) for token in ids]
    plot_maps(folder / "attention.png", maps, tokens)
    write_page(folder / "attention.html", tokens=tokens, maps=maps, probabilities=after, title=f"Attention of {name}")
    return ["attention.png", "attention.html"]


def piece(lm, token: int) -> str:
    return lm.tokenizer.decode([token], skip_special_tokens=False)


def head_rows(ablation, scores) -> list[dict]:
    """What is known of each head, layer by layer."""
    from tril.model.heads.ablation import WAYS, head_name

    changes, rows = {way: ablation.changes(way) for way in WAYS}, []
    for layer, head in changes[WAYS[0]]:
        row = {"head": head_name((layer, head))}
        for way in WAYS:
            change = changes[way][layer, head]
            row[way] = {
                "change": change.interval.mean,
                "low": change.interval.low,
                "high": change.interval.high,
                "corrected_low": change.corrected.low,
                "corrected_high": change.corrected.high,
                "verdict": change.verdict,
            }
        rows.append(row | {name: values[layer, head].item() for name, values in scores.heads.items()})
    return rows


def removal_rows(ablation, way: str) -> list[dict]:
    from tril.model.heads.ablation import head_name

    removed = [None, *map(head_name, ablation.orders[way])]
    losses = [loss.mean().item() for loss in ablation.removal[way]]
    return [
        {
            "by": way,
            "n_removed": n,
            "removed_last": name,
            "loss": loss,
            "change": change.mean,
            "low": change.low,
            "high": change.high,
        }
        for n, (name, loss, change) in enumerate(zip(removed, losses, ablation.curve(way)))
    ]


def flat(row: dict) -> dict:
    """{"zero": {"low": 1}} -> {"zero_low": 1}"""
    found = {}
    for key, value in row.items():
        found |= {f"{key}_{name}": its for name, its in value.items()} if isinstance(value, dict) else {key: value}
    return found


def write_csv(path: Path, rows: list[dict]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def report(cfg: dict, run: Run, device: str, numbers, lm, shown: list[int], ablation, scores) -> dict:
    """All of it for heads.json; a score that does not exist is null."""
    from tril.model.heads.ablation import CONFIDENCE
    from tril.model.heads.scores import N_REPEATS, SCORES

    masked = bool(run.settings["data"].get("document_mask"))
    of_loss = f"nats per token, the mean over windows; {CONFIDENCE:.0%} intervals by Student's t, paired by window"
    return without_nan(
        {
            "checkpoint": os.path.relpath(run.checkpoint),
            "steps": run.steps,
            "data_fingerprint": run.ours["data"]["fingerprint"],
            "document_mask": masked,
            "settings": {key: cfg[key] for key in ("windows", "seed", "prompt")} | {"device": device},
            "windows": {"of": "the validation part", "length": lm.config.context_length, "numbers": numbers.tolist()},
            "changes": f"{of_loss}; corrected: for {len(ablation.orders['zero'])} heads at once, by Bonferroni, which decides the verdict",
            "scores": SCORES | {"left out": "positions that may see one key alone"},
            "induction": {"sequences": N_REPEATS, "length": scores.induction_length, "copies": 2},
            "loss": ablation.whole.mean().item(),
            "heads": head_rows(ablation, scores),
            "uniform": scores.uniform,
            "removal": {way: removal_rows(ablation, way) for way in ablation.orders},
            "shown_tokens": [piece(lm, token) for token in shown],
        }
    )


def without_nan(value):
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: without_nan(its) for key, its in value.items()}
    if isinstance(value, list):
        return [without_nan(its) for its in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def show(ablation, scores) -> None:
    """Both tables to stdout."""
    from tril.model.heads.ablation import CONFIDENCE, markdown

    print(f"Loss of the whole model: {ablation.whole.mean():.4f} nats per token over {len(ablation.whole)} windows.")
    print(f"What it rises by without a head, with the {CONFIDENCE:.0%} interval paired by window; corrected: for all")
    print(
        f"{len(ablation.orders['zero'])} heads at once (Bonferroni), which decides what is distinguishable from nothing:\n"
    )
    print(markdown(ablation.cells()))
    print(f"\nWhat each head attends to (induction: on {scores.induction_length} random tokens, repeated):\n")
    print(markdown(scores.cells()))


if __name__ == "__main__":
    main()
