"""What the heads of one trained model do, as files and tables: their removal, their scores, and attention maps.

Letters: L layers, H heads, T tokens.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tril.model.atomic_files import write_json
from tril.model.generation.generate import inference
from tril.model.generation.language_model import LanguageModel
from tril.model.heads.ablation import Ablation, ablate, head_name
from tril.model.heads.attention_maps import TokenWindows, attention_maps
from tril.model.heads.head_plots import plot_ablation, plot_maps, plot_removal
from tril.model.heads.page import write_page
from tril.model.heads.records import UNIFORM
from tril.model.heads.scores import N_REPEATS, SCORES, HeadScores, alphabet_of, score_heads
from tril.model.masks import document_options
from tril.model.text_clusters import TextClusters

SHOWN_TOKENS = 48  # of the validation part, without a prompt
N_NEXT_TOKENS = 10  # most probable next tokens on the page
Rows = list[dict[str, Any]]


class HeadDescription:
    """The heads of a model, measured on windows of a text.

    Args:
        clusters: of the targets of `text`.
        shown: ids of the text whose attention maps are drawn.
        seed: of the repeated random sequences.
    """

    def __init__(self, lm: LanguageModel, text: TokenWindows, clusters: TextClusters, shown: list[int], seed: int):
        self.lm, self.text, self.shown = lm, text, shown
        self.ablation: Ablation = ablate(lm.model, text, clusters)
        self.scores: HeadScores = score_heads(lm.model, text, alphabet=alphabet_of(lm.tokenizer, lm.eot_id), seed=seed)

    def csv_rows(self) -> tuple[Rows, Rows]:
        """The rows of heads.csv, a head each and uniform weights, and those of removal.csv."""
        counts = self.ablation.clusters.counts()
        heads = [row | counts for row in self.scored_rows()]
        return [*heads, {"head": UNIFORM, **self.scores.uniform}], [
            row | counts for row in self.ablation.removal_rows()
        ]

    def scored_rows(self) -> Rows:
        """One row per head: the change of the loss without it, and the scores."""
        return [
            row | {name: values[head].item() for name, values in self.scores.heads.items()}
            for head, row in zip(sorted(self.ablation.order), self.ablation.head_rows(), strict=True)
        ]

    def write(
        self, folder: Path, name: str, about: Mapping[str, Any], earlier: Mapping[int, np.ndarray] | None = None
    ) -> None:
        """Writes heads.json, the figures and the page of attention maps.

        Args:
            name: of the model, for the reader.
            about: more entries of heads.json.
            earlier: maps of the shown text at earlier steps, see `write_page`.
        """
        clusters = self.ablation.clusters
        content = {
            **about,
            "observations": {"unit": clusters.unit} | clusters.counts(),
            "changes": f"nats per token; 95 % intervals of all heads together, over {clusters.unit}, paired",
            "scores": SCORES | {"left out": "positions that see only one key"},
            "induction": {"sequences": N_REPEATS, "length": self.scores.induction_length, "copies": 2},
            "loss": self.ablation.loss,
            "heads": self.scored_rows(),
            "uniform": self.scores.uniform,
            "removal": self.ablation.removal_rows(),
            "shown_tokens": [token_text(self.lm, token) for token in self.shown],
        }
        write_json(folder / "heads.json", content)
        plot_ablation(folder / "heads.png", self.ablation)
        plot_removal(folder / "removal.png", self.ablation)
        write_maps(folder, self.lm, self.shown, self.text, name, self.scores, earlier)

    def table(self) -> list[list[str]]:
        """A row for each head, the most important one first: the change of the loss without it, and its scores."""
        ablation, scores = self.ablation, self.scores
        lines = [["head", "change of the loss", "the model is then", *SCORES]]
        for head, change in sorted(ablation.changes().items(), key=lambda item: -item[1].difference.mean):
            effect = f"{change.difference.mean:+.4f} ± {change.difference.half_width:.4f}"
            lines.append(
                [head_name(head), effect, change.verdict, *(f"{scores.heads[name][head]:.3f}" for name in SCORES)]
            )
        return [*lines, ["uniform", "", "", *(f"{scores.uniform[name]:.3f}" for name in SCORES)]]


def prompt_ids(lm: LanguageModel, tokens: np.ndarray, prompt: str | None) -> list[int]:
    """The ids of the text to show; by default, the start of the validation tokens."""
    limit = lm.config.context_length
    if prompt is None:
        return tokens[: min(SHOWN_TOKENS, limit)].tolist()
    ids = lm.encode(prompt)
    if len(ids) > limit:
        raise ValueError(f"prompt has {len(ids)} tokens, more than the model's context_length={limit}; shorten it")
    return ids


def write_maps(
    folder: Path,
    lm: LanguageModel,
    ids: Sequence[int],
    text: TokenWindows,
    name: str,
    scores: HeadScores,
    earlier: Mapping[int, np.ndarray] | None = None,
) -> None:
    """Writes attention.png and attention.html of one sequence."""
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
    page = {"title": f"Attention of {name}", "scores": explained, "earlier": earlier}
    write_page(folder / "attention.html", tokens=tokens, maps=maps, probabilities=after, **page)


def token_text(lm: LanguageModel, token: int) -> str:
    return lm.tokenizer.decode([token], skip_special_tokens=False)
