"""`init_from=...`: a new run that starts from the weights, the config and the tokenizer of another model."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from tril.data.settings import defaults
from tril.model.atomic_files import write_text
from tril.model.runs import SETTINGS
from tril.scripts.common.cli import plain, task_overrides
from tril.scripts.common.init_sources import HF, KEY, NANOGPT, TOKENIZER, load_source
from tril.scripts.common.ranks import process_rank
from tril.scripts.common.resume import literal
from tril.scripts.common.run_config import RunConfig

if TYPE_CHECKING:
    from tril.model.config import GPTConfig
    from tril.model.generation.language_model import LanguageModel
    from tril.model.gpt import GPT

FREE = ("embd_dropout", "attn_dropout", "resid_dropout", "backend", "checkpoint_activations")  # for training only
TEMPLATE = "data.chat_template"
ROWS = ("embed.weight", "head.weight")  # of the vocabulary; with tied embeddings one tensor of two names


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        lm: model and tokenizer of the source.
        lineage: "source", the path or hf:ORG/NAME@COMMIT; "weights", their sha256 as in the certificate of a
            checkpoint; "step", the optimizer steps of the source, None: unknown.
        new_files: those that this process created in the run's folder.
    """

    lm: "LanguageModel"
    lineage: dict[str, Any]
    new_files: list[Path]

    def discard_unused(self) -> None:
        """Removes the files of a run that was refused before it wrote its settings."""
        for file in self.new_files:
            if not (file.parent / SETTINGS).is_file():
                file.unlink(missing_ok=True)

    def keep(self, folder: str, name: str, suffix: str, text: str) -> str:
        """Writes `text` into the run's folder, so that resuming needs no source, and returns the path."""
        # the name is that of the content: never another one's
        file = Path(folder) / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.{suffix}"
        if not file.exists():
            self.new_files.append(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
        return str(file)

    def load_into(self, model: "GPT") -> None:
        """Copies the weights. New rows of the embedding and of the head are the mean of the rows that tokens have.

        Thus the logit of a new row is the mean of the others, and its probability at most the mean probability; a row
        of random values could get most of it (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language
        Models").
        """
        import torch

        state, n_ids = self.lm.model.state_dict(), self.lm.n_ids
        old, new = self.lm.config.vocab_size, model.config.vocab_size
        if new > old:
            for name in ROWS:
                mean = state[name][:n_ids].mean(0, keepdim=True)  # (1, C)
                state[name] = torch.cat([state[name], mean.expand(new - old, -1)])  # (V, C)
            if process_rank() == 0:
                rows = f"{new - old:,} new rows are the mean of the {n_ids:,} rows of tokens"
                print(f"model.vocab_size={new:,} from {old:,}: {rows}; no token uses them")
        model.load_state_dict(state)


def resolve_init(cfg: DictConfig) -> tuple[DictConfig, Start | None]:
    """The settings with the source's model and tokenizer in them and without `init_from`, and the source.

    Raises:
        ValueError: settings that contradict the source, or a source that cannot be read.
        OSError: there is no source, or the run's folder cannot be written.
    """
    source = cfg.get(KEY)
    if source is None:
        return cfg, None
    if not isinstance(source, str) or not source:  # experiment=finetune has an empty one
        valid = f"must be a checkpoint, the folder of a run, {HF}FOLDER, {HF}ORG/NAME or {NANOGPT}FILE"
        raise ValueError(f"{KEY}={source} {valid}; add {KEY}=RUN")
    typed = {override.partition("=")[0].lstrip("+~"): override for override in task_overrides()}
    found = load_source(source, cfg, typed)
    lm, template = found.lm, found.template
    values = _model_values(plain(cfg.model), lm.config, typed, source)
    start = Start(lm, _lineage(lm, found.origin, found.step), [])
    tokenizer = start.keep(cfg.output_dir, "tokenizer", "json", lm.tokenizer.to_str(pretty=True))
    changes = {"model": values, KEY: None}
    merged = OmegaConf.merge(cfg, changes, {"data": {"tokenizer": {"kind": "file"}}})
    assert isinstance(merged, DictConfig)
    chosen = {f"{TOKENIZER}.path": tokenizer, f"{TOKENIZER}.eot": lm.eot}
    if template is not None and cfg.data.get("format") == "chat" and cfg.data.get("chat_template") is None:
        chosen[TEMPLATE] = start.keep(cfg.output_dir, "chat", "jinja", template)
    for key, value in chosen.items():
        OmegaConf.update(merged, key, literal(value), force_add=True)
    return merged, start


def check_start(start: Start | None, config: RunConfig) -> None:
    """Raises ValueError for settings that do not go with a source."""
    if start is None:
        return
    if config.trainer.strategy == "model_parallel":
        raise ValueError(f"{KEY} needs whole weights in each process; use trainer=default or trainer=ddp")
    if config.optim.scale_with_width:
        cause = "scales initial values, and the weights of the source are trained"
        raise ValueError(f"optim.scale_with_width=true {cause}; set it to false with {KEY}")


def _lineage(lm: "LanguageModel", origin: str, step: int | None) -> dict[str, Any]:
    from tril.model.binding import weights_digest

    return {"source": origin, "weights": weights_digest(lm.model.state_dict()), "step": step}


def _model_values(
    chosen: Mapping[str, Any], config: "GPTConfig", typed: Mapping[str, str], source: str
) -> dict[str, Any]:
    """The source's config, with what the user chose of FREE.

    Args:
        chosen: the keys below `model:`. Those that differ from the defaults, or are typed, were chosen.

    Raises:
        ValueError: names the chosen keys with which it would be another model.
    """
    values, default = config.to_dict(), defaults(type(config))
    wrong = []
    for name, value in chosen.items():
        is_chosen = f"model.{name}" in typed or value != default.get(name)
        if name not in values or not is_chosen or (name == "vocab_size" and value is None):
            continue
        if name in FREE:
            values[name] = value
        elif name == "vocab_size" and type(value) is int and value > config.vocab_size:
            values[name] = value
        elif name == "vocab_size" and type(value) is int and value < config.vocab_size:
            wrong.append(f"model.vocab_size={value} must be at least {config.vocab_size}")
        elif not _is_same(config, name, value):
            wrong.append(f"model.{name}={value} must be {values[name]}")
    if wrong:
        raise ValueError(f"{KEY}={source} has another model: {'; '.join(wrong)}; leave them out")
    return values


def _is_same(config: "GPTConfig", name: str, value: Any) -> bool:
    """Whether the model of `config` stays the same with another value of a field."""
    try:
        return replace(config, **{name: value}).canonical() == config.canonical()
    except ValueError:
        return False
