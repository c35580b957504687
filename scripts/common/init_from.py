"""`init_from=...`: a new run that starts from the weights, the config and the tokenizer of another model."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from tril.model.atomic_files import write_text
from tril.model.runs import SETTINGS, find_checkpoint
from tril.scripts.common.cli import plain, task_overrides
from tril.scripts.common.resume import literal
from tril.scripts.common.run_config import RunConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tril.model.config import GPTConfig
    from tril.model.generation.language_model import LanguageModel

KEY = "init_from"
HF = "hf:"  # before the folder of Hugging Face transformers, or the name of a model on the hub
NANOGPT = "nanogpt:"  # before a ckpt.pt of nanoGPT
FREE = ("embd_dropout", "attn_dropout", "resid_dropout", "backend", "checkpoint_activations")  # for training only
TOKENIZER = "data.tokenizer"


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        lm: model and tokenizer of the source.
        lineage: "source", the path or hf:ORG/NAME@COMMIT; "weights", their sha256 as in the certificate of a
            checkpoint; "step", the optimizer steps of the source, None: unknown.
        tokenizer: the file in the run's folder.
        is_new: whether this process created that file.
    """

    lm: "LanguageModel"
    lineage: dict[str, Any]
    tokenizer: Path
    is_new: bool

    def discard_unused(self) -> None:
        """Removes the tokenizer of a run that was refused before it wrote its settings."""
        if self.is_new and not (self.tokenizer.parent / SETTINGS).is_file():
            self.tokenizer.unlink(missing_ok=True)


def resolve_init(cfg: DictConfig) -> tuple[DictConfig, Start | None]:
    """The settings with the source's model and tokenizer in them and without `init_from`, and the source.

    Raises:
        ValueError: settings that contradict the source, or a source that cannot be read.
        OSError: there is no source, or the run's folder cannot be written.
    """
    source = cfg.get(KEY)
    if source is None:
        return cfg, None
    if not isinstance(source, str) or not source:
        raise ValueError(
            f"{KEY}={source} must be a checkpoint, the folder of a run, {HF}FOLDER, {HF}ORG/NAME or {NANOGPT}FILE"
        )
    typed = {override.partition("=")[0].lstrip("+~"): override for override in task_overrides()}
    lm, origin, step = _load(source, cfg, typed)
    values = _model_values(plain(cfg.model), lm.config, typed, source)
    text = lm.tokenizer.to_str(pretty=True)
    name = f"tokenizer-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"  # never another one's
    file = Path(cfg.output_dir) / name
    start = Start(lm, _lineage(lm, origin, step), file, is_new=not file.exists())
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text)
    changes = {"model": values, KEY: None}
    merged = OmegaConf.merge(cfg, changes, {"data": {"tokenizer": {"kind": "file"}}})
    assert isinstance(merged, DictConfig)
    for key, value in (("path", str(file)), ("eot", lm.eot)):
        OmegaConf.update(merged, f"{TOKENIZER}.{key}", literal(value), force_add=True)
    return merged, start


def check_start(start: Start | None, config: RunConfig) -> None:
    """Raises ValueError for settings of training that do not go with a source."""
    if start is None:
        return
    if config.trainer.strategy == "model_parallel":
        raise ValueError(f"{KEY} needs whole weights in each process; use trainer=default or trainer=ddp")
    if config.optim.scale_with_width:
        cause = "scales initial values, and the weights of the source are trained"
        raise ValueError(f"optim.scale_with_width=true {cause}; set it to false with {KEY}")


def _load(source: str, cfg: DictConfig, typed: Mapping[str, str]) -> tuple["LanguageModel", str, int | None]:
    """The source, its path or its name on the hub, and its optimizer steps."""
    if source.startswith(NANOGPT):
        from tril.model.interop.nanogpt import read_nanogpt

        checkpoint = read_nanogpt(Path(source.removeprefix(NANOGPT)).expanduser())
        origin = str(checkpoint.path.absolute())
        if checkpoint.meta is None:  # the user names the tokenizer
            return checkpoint.language_model(*_chosen_tokenizer(cfg, source)), origin, checkpoint.step
        _refuse_tokenizer(typed, source)
        return checkpoint.language_model(), origin, checkpoint.step
    _refuse_tokenizer(typed, source)
    if source.startswith(HF):
        return _load_hf(source.removeprefix(HF))
    path = find_checkpoint(source)
    from tril.model.checkpoint import language_model, read

    content = read(path, entries=("state_dict", "tril", "global_step"))
    step = content.get("global_step")
    return language_model(path, content), str(path.absolute()), step if type(step) is int else None


def _load_hf(name: str) -> tuple["LanguageModel", str, None]:
    from tril.model.interop.hf_download import download, is_hub_name
    from tril.model.interop.hf_folder import read_hf

    if is_hub_name(name):
        folder, commit = download(name)
        return read_hf(folder), f"{HF}{commit}", None
    folder = Path(name).expanduser()
    return read_hf(folder), str(folder.absolute()), None


def _refuse_tokenizer(typed: Mapping[str, str], source: str) -> None:
    for key, override in typed.items():
        if key == TOKENIZER or key.startswith(f"{TOKENIZER}."):
            raise ValueError(f"{override} contradicts {KEY}={source}, whose tokenizer the run takes over; leave it out")


def _chosen_tokenizer(cfg: DictConfig, source: str) -> tuple["Tokenizer", str]:
    """The tokenizer of data.tokenizer, and its end-of-text token.

    Raises:
        ValueError: it would be trained on the new text.
        OSError: it cannot be read.
    """
    from tril.data.tokenizer import TokenizerConfig, build

    settings = TokenizerConfig(**plain(cfg.data.tokenizer))
    if settings.kind not in ("file", "hub"):
        cause = f"{KEY}={source} has no meta.pkl, so its tokens are those of GPT-2"
        remedy = f"{TOKENIZER}.kind=file {TOKENIZER}.path=tokenizer.json"
        raise ValueError(f"{cause}; name its tokenizer with {remedy}, or kind=hub path=openai-community/gpt2")
    return build(settings, ()), settings.eot


def _lineage(lm: "LanguageModel", origin: str, step: int | None) -> dict[str, Any]:
    from tril.model.binding import weights_sha256
    from tril.model.checksums import checksums
    from tril.model.stored_model import PREFIX

    state = {PREFIX + name: tensor for name, tensor in lm.model.state_dict().items()}
    digest = weights_sha256(state, checksums({"state_dict": state})["tensors"])
    return {"source": origin, "weights": digest, "step": step}


def _model_values(
    chosen: Mapping[str, Any], config: "GPTConfig", typed: Mapping[str, str], source: str
) -> dict[str, Any]:
    """The source's config, with what the user chose of FREE.

    Args:
        chosen: the keys below `model:`. Those that differ from the defaults, or are typed, were chosen.

    Raises:
        ValueError: names the chosen keys with which it would be another model.
    """
    values = config.to_dict()
    defaults = {name: field.default for name, field in config.__dataclass_fields__.items()}
    wrong = []
    for name, value in chosen.items():
        is_chosen = f"model.{name}" in typed or value != defaults.get(name)
        if name not in values or not is_chosen or (name == "vocab_size" and value is None):
            continue
        if name in FREE:
            values[name] = value
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
