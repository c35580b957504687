"""`init_from`: a new run from the weights, the config and the tokenizer of another model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.data.settings import defaults
from tril.data.settings import typed as as_typed
from tril.model.runs import find_checkpoint
from tril.scripts.cli.command_line import Typed
from tril.scripts.cli.config import data_presets
from tril.scripts.cli.start import FOR_TRAINING, Start, keep_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tril.model.config import GPTConfig
    from tril.model.generation.language_model import LanguageModel
    from tril.model.gpt import GPT

HF, NANOGPT = "hf:", "nanogpt:"  # before a folder or name of Hugging Face, and before a ckpt.pt of nanoGPT
ROWS = ("embed.weight", "head.weight")  # of the vocabulary; with tied embeddings one tensor of two names


def take_over(source: Any, settings: dict[str, Any], typed: Typed) -> tuple[dict[str, Any], Start]:
    """The settings of a new run with the model and the tokenizer of `init_from`, and its start.

    Args:
        settings: composed.

    Raises:
        ValueError: settings that contradict the source, or a source that cannot be read.
        OSError: there is no source.
    """
    if not isinstance(source, str) or not source:  # experiment=finetune has an empty one
        valid = f"must be a checkpoint, the folder of a run, {HF}FOLDER, {HF}ORG/NAME or {NANOGPT}FILE"
        raise ValueError(f"init_from={source} {valid}; add init_from=RUN")
    if settings["trainer"].get("strategy") == "model_parallel":
        raise ValueError("init_from needs whole weights in each process; use trainer=default or trainer=ddp")
    if settings["optim"].get("scale_with_width"):
        cause = "scales initial values, and the weights of the source are trained"
        raise ValueError(f"optim.scale_with_width=true {cause}; set it to false with init_from")
    lm, origin, step, template = read_source(source, settings, typed)
    model = model_settings(settings["model"], lm.config, typed, source)
    data = dict(settings["data"])
    data["tokenizer"] = {"kind": "file", "path": str(keep_file(lm.tokenizer.to_str(), "json")), "eot": lm.eot}
    if template is not None and data.get("format") == "chat" and data.get("chat_template") is None:
        data["chat_template"] = str(keep_file(template, "jinja"))
    from tril.model.checkpoint import digest

    lineage = {"source": origin, "weights": digest(dict(lm.model.state_dict())), "step": step}
    return settings | {"model": model, "data": data}, Start(lm=lm, lineage=lineage)


def read_source(
    source: str, settings: Mapping[str, Any], typed: Typed
) -> "tuple[LanguageModel, str, int | None, str | None]":
    """The model that `init_from` names, its path or name, its optimizer steps and its chat template, if known.

    Raises:
        ValueError: a tokenizer that contradicts that of the source, or a source that cannot be read.
        OSError: there is no source.
    """
    if source.startswith(NANOGPT):
        from tril.model.interop.nanogpt import read_nanogpt

        path = Path(source.removeprefix(NANOGPT)).expanduser()
        named = any(override.key.startswith("data.tokenizer") for override in typed)
        checkpoint = read_nanogpt(path, chosen_tokenizer(settings, source) if named else None)
        return checkpoint.language_model(), str(path.absolute()), checkpoint.step, None
    refuse_tokenizer(typed, source)
    if source.startswith(HF):
        from tril.model.interop.hf import download, is_hub_name, read_hf

        name = source.removeprefix(HF)
        folder, commit = download(name) if is_hub_name(name) else (Path(name).expanduser(), None)
        checkpoint, origin = read_hf(folder), f"{HF}{commit}" if commit else str(folder.absolute())
        return checkpoint.language_model(), origin, None, (checkpoint.data.get("source") or {}).get("chat_template")
    from tril.model.checkpoint import Checkpoint

    checkpoint = Checkpoint.read(find_checkpoint(source))
    sources = checkpoint.data.get("sources") or {"": {"source": {}}}
    template = next(iter(sources.values()))["source"].get("chat_template")
    assert checkpoint.path is not None
    origin = str(checkpoint.path.absolute())
    return checkpoint.language_model(), origin, checkpoint.step, template if isinstance(template, str) else None


def refuse_tokenizer(typed: Typed, source: str) -> None:
    for override in typed:
        if override.key == "data.tokenizer" or override.key.startswith("data.tokenizer."):
            contradicts = f"contradicts init_from={source}, whose tokenizer the run takes over"
            raise ValueError(f"{override.key}={override.value} {contradicts}; leave it out")


def chosen_tokenizer(settings: Mapping[str, Any], source: str) -> "tuple[Tokenizer, str]":
    """The tokenizer of data.tokenizer, and its end-of-text token; raises ValueError if the text would decide it."""
    from tril.data.config import parse
    from tril.data.tokenizer import build

    config = parse(settings["data"], data_presets()).tokenizer
    if config.kind not in ("file", "hub"):
        remedy = (
            "leave it out for the characters of meta.pkl, or name the tokenizer of its tokens with kind=file or hub"
        )
        raise ValueError(f"data.tokenizer.kind={config.kind} does not go with init_from={source}; {remedy}")
    return build(config, ()), config.eot


def model_settings(chosen: Mapping[str, Any], config: "GPTConfig", typed: Typed, source: str) -> dict[str, Any]:
    """The config of the source, with what may change: dropout, backends and a larger vocabulary.

    Args:
        chosen: the settings below `model:`. Those that differ from the defaults, or are typed, were chosen.

    Raises:
        ValueError: names the chosen settings with which it would be another model.
    """
    values, default, wrong = config.to_dict(), defaults(type(config)), []
    for name, value in chosen.items():
        if name not in values or value == default.get(name) and f"model.{name}" not in typed:
            continue
        larger = name == "vocab_size" and type(value) is int and value >= config.vocab_size
        if name in FOR_TRAINING or larger:
            values[name] = value
        elif name == "vocab_size" and type(value) is int:
            wrong.append(f"model.vocab_size={value} must be at least {config.vocab_size}")
        elif name != "vocab_size" and not _is_same(config, name, value):
            wrong.append(f"model.{name}={as_typed(value)} must be {as_typed(values[name])}")
    if wrong:
        raise ValueError(f"init_from={source} has another model: {'; '.join(wrong)}; leave them out")
    return values


def _is_same(config: "GPTConfig", name: str, value: Any) -> bool:
    """Whether the model of `config` stays the same with another value of a field."""
    try:
        return replace(config, **{name: value}).canonical() == config.canonical()
    except ValueError:
        return False


def load_weights(lm: "LanguageModel", model: "GPT") -> str | None:
    """Copies the weights. New rows of the embedding and of the head are the mean of the rows that tokens have.

    Thus the logit of a new row is the mean of the others, and its probability at most the mean probability; a row of
    random values could get most of it (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").

    Returns:
        What happened to new rows, in a line; None: there are none.
    """
    import torch

    state, n_ids = lm.model.state_dict(), lm.n_ids
    old, new = lm.model.embed.weight.shape[0], model.embed.weight.shape[0]
    if new > old:
        for name in ROWS:
            mean = state[name][:n_ids].mean(0, keepdim=True)  # (1, C)
            state[name] = torch.cat([state[name], mean.expand(new - old, -1)])  # (V, C)
    model.load_state_dict(state)
    if new == old:
        return None
    rows = f"{new - old:,} new rows are the mean of the {n_ids:,} rows of tokens"
    return f"model.vocab_size={new:,} from {old:,}: {rows}; no token uses them"
