"""`data.old_path=...`: the loss on the old text, at the start and at the end of a run with `init_from`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tril.scripts.common.ranks import process_rank
from tril.scripts.common.run_config import RunConfig

if TYPE_CHECKING:
    from tril.data.prepared import PreparedText
    from tril.model.generation.language_model import LanguageModel
    from tril.model.gpt import GPT
    from tril.scripts.common.init_from import Start

MAX_READ = 1 << 20  # tokens of the text from its beginning, so that it is prepared in seconds
MAX_SCORED = 1 << 16  # tokens of evenly spaced windows among them: seconds on a CPU
KEY = "data.old_path"


@dataclass(frozen=True)
class OldText:
    """A text in the tokens of the run, and how its loss is computed.

    Attributes:
        device: of the model while it scores.
        document_mask: as in training.
    """

    text: PreparedText
    path: str
    device: str
    document_mask: bool

    @classmethod
    def of(cls, config: RunConfig) -> OldText | None:
        """Reads the text of the setting; None without it.

        Raises:
            ValueError: it has fewer than 2 tokens.
            OSError: it cannot be read.
        """
        if config.data.old_path is None:
            return None
        from tril.data.prepare import prepare
        from tril.data.sources.files import Files
        from tril.data.sources.whole_text import WholeText

        assert config.hardware is not None
        budgets = {"token_budget": 1, "val_token_budget": MAX_READ}
        source = WholeText(Files(path=config.data.old_path))
        text = prepare(source, config.data.tokenizer, config.data.cache_dir, progress=False, **budgets)
        if len(tokens := text.tokens("val")) < 2:
            raise ValueError(f"{KEY}={config.data.old_path} has {len(tokens)} tokens, at least 2 are needed")
        return cls(text, config.data.old_path, config.hardware.accelerator, config.data.document_mask)

    def score(self, lm: LanguageModel) -> dict[str, Any]:
        """Loss in nats per token and bits per byte in non-overlapping windows, in float32, and what was scored.

        The model is on the CPU before and after.
        """
        from tril.model.evaluation.scored_text import ScoredText

        tokens, n_bytes = self.text.tokens("val"), self.text.meta["counts"]["val"]["bytes"]
        eot = lm.eot_id if self.document_mask else None
        lm.model.to(self.device)
        limit = max(2, MAX_SCORED // lm.config.context_length)
        scored = ScoredText.of(lm, tokens, n_bytes, limit=limit, document_eot=eot)
        lm.model.to("cpu")
        nats = float(scored.nll.sum(dtype="float64"))
        figures = {"loss": nats / len(scored.nll), "bpb": nats / math.log(2) / float(scored.bytes.sum())}
        return figures | {"targets": len(scored.nll), "text": self.text.meta["fingerprint"]}

    def check_resumed(self, lineage: dict[str, Any] | None) -> None:
        """Raises ValueError if the loss on this text at the start of a resumed run is unknown."""
        before = (lineage or {}).get("old_text")
        if before is None:
            raise ValueError(f"{KEY}={self.path} was not set when the run started from its source; leave it out")
        if before["text"] != self.text.meta["fingerprint"]:
            raise ValueError(f"{KEY}={self.path} has changed since the run started; restore it, or set {KEY}=null")

    def losses(self, lineage: dict[str, Any] | None, lm: LanguageModel | None) -> dict[str, float | None]:
        """The entries of summary.json: losses of the source of a run, and of its best model, if it did not diverge."""
        named = {"before": (lineage or {}).get("old_text") or {}, "after": {} if lm is None else self.score(lm)}
        return {f"old_{key}_{when}": scores.get(key) for key in ("loss", "bpb") for when, scores in named.items()}


def lineage_of(start: Start | None, old_text: OldText | None, model: GPT) -> dict[str, Any] | None:
    """The source of a run, with the scores of `model` before its first step; None without a source."""
    if start is None or old_text is None or process_rank() > 0:  # rank 0 writes the checkpoints
        return start and start.lineage
    from tril.model.generation.language_model import LanguageModel

    lm = LanguageModel(model, start.lm.tokenizer, start.lm.eot)
    return start.lineage | {"old_text": old_text.score(lm)}
