"""The models that `init_from` can start from: checkpoints of Tril and of nanoGPT, folders and names of Hugging Face."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from tril.model.runs import find_checkpoint
from tril.scripts.common.cli import plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tril.model.generation.language_model import LanguageModel

KEY = "init_from"
HF = "hf:"  # before the folder of Hugging Face transformers, or the name of a model on the hub
NANOGPT = "nanogpt:"  # before a ckpt.pt of nanoGPT
TOKENIZER = "data.tokenizer"


@dataclass(frozen=True)
class InitSource:
    """A model to start from.

    Attributes:
        lm: model and tokenizer.
        origin: its path, or its name on the hub with the commit.
        step: its optimizer steps; None: unknown.
        template: its chat template; None: it has none.
    """

    lm: "LanguageModel"
    origin: str
    step: int | None = None
    template: str | None = None


def load_source(source: str, cfg: DictConfig, typed: Mapping[str, str]) -> InitSource:
    """Loads the model that `init_from` names.

    Args:
        cfg: of the new run.
        typed: overrides of the command line by key.

    Raises:
        ValueError: a tokenizer that contradicts that of the source, or a source that cannot be read.
        OSError: there is no source.
    """
    if source.startswith(NANOGPT):
        from tril.model.interop.nanogpt import read_nanogpt

        checkpoint = read_nanogpt(Path(source.removeprefix(NANOGPT)).expanduser())
        origin = str(checkpoint.path.absolute())
        if checkpoint.meta is None:  # the user names the tokenizer
            return InitSource(checkpoint.language_model(*_chosen_tokenizer(cfg, source)), origin, checkpoint.step)
        _refuse_tokenizer(typed, source)
        return InitSource(checkpoint.language_model(), origin, checkpoint.step)
    _refuse_tokenizer(typed, source)
    return _load_hf(source.removeprefix(HF)) if source.startswith(HF) else _load_run(find_checkpoint(source))


def _load_run(path: Path) -> InitSource:
    from tril.model.checkpoint import language_model, read

    content = read(path, entries=("state_dict", "tril", "global_step"))
    data, step = content["tril"].get("data", {}).get("source", {}), content.get("global_step")
    template = data.get("chat_template") if isinstance(data, dict) else None
    return InitSource(
        language_model(path, content),
        str(path.absolute()),
        step if type(step) is int else None,
        template if isinstance(template, str) else None,
    )


def _load_hf(name: str) -> InitSource:
    from tril.model.interop.hf_download import download, is_hub_name
    from tril.model.interop.hf_folder import chat_template, read_hf

    if is_hub_name(name):
        folder, commit = download(name)
        return InitSource(read_hf(folder), f"{HF}{commit}", template=chat_template(folder))
    folder = Path(name).expanduser()
    return InitSource(read_hf(folder), str(folder.absolute()), template=chat_template(folder))


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
