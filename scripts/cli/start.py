"""What a run starts from: random weights, the checkpoint of a run that it continues, or another model (`init_from`)."""

import hashlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.data.cache import make_folder, resolve_cache_dir
from tril.data.settings import defaults
from tril.data.settings import typed as as_typed
from tril.model.atomic_files import write_text
from tril.model.runs import CHECKPOINTS, LAST, PREVIOUS, Run, find_checkpoint, run_folder
from tril.scripts.cli.compose import compose
from tril.scripts.cli.config import GROUPS, RunConfig, data_presets, flatten
from tril.scripts.cli.errors import command, user_errors
from tril.scripts.cli.folder import sweep_of
from tril.scripts.cli.process import RUN_FOLDER, process_rank
from tril.scripts.cli.saved import saved_settings
from tril.scripts.cli.typed import Typed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tril.model.checkpoint import Checkpoint
    from tril.model.config import GPTConfig
    from tril.model.generation.language_model import LanguageModel
    from tril.model.gpt import GPT

HF, NANOGPT = "hf:", "nanogpt:"  # before a folder or name of Hugging Face, and before a ckpt.pt of nanoGPT
ROWS = ("embed.weight", "head.weight")  # of the vocabulary; with tied embeddings one tensor of two names

# A resumed run may differ from its checkpoint in these without a word; in others only if they are typed.
FREE = (
    *("logger.", "checkpoint.", "data.", "callbacks.progress", "callbacks.samples", "callbacks.heads"),
    *("trainer.accelerator", "trainer.log_every_n_steps", "trainer.devices", "trainer.num_nodes", "trainer.strategy"),
)
OF_THE_WINDOWS = ("data.batch_size", "data.document_mask", "data.sources", "data.exhausted")  # these are compared too
OF_TRAINING = ("optimizer_states", "lr_schedulers", "loops", "callbacks", "global_step")  # entries of Lightning
OF_RESUMING = ("resume", "allow_targets", "hydra.run.dir")  # keys of a command that resumes, and of no run
# They make other weights or another order of the text, so they cannot change at all; a model's others neither.
FIXED = ("optim.kind", "optim.scale_with_width", "optim.base_width", "optim.base_head_dim", "data.sources")
FOR_TRAINING = ("backend", "checkpoint_activations", "embd_dropout", "attn_dropout", "resid_dropout")  # of a model


@dataclass(frozen=True)
class Start:
    """Where a run starts: from random weights, unless one of the first two attributes is set.

    Attributes:
        checkpoint: the run goes on from it.
        state: the content of the checkpoint, with Lightning's entries.
        lm: the run takes over its weights and its tokenizer.
        lineage: of `lm`: "source", its path or name; "weights", their sha256; "step", its optimizer steps or None.
        folder: that hydra.run.dir chooses for the run; None: a new one, or that of the resumed run.
        allowed_targets: that the command line names.
    """

    checkpoint: "Checkpoint | None" = None
    state: dict[str, Any] = field(default_factory=dict)
    lm: "LanguageModel | None" = None
    lineage: dict[str, Any] | None = None
    folder: str | None = None
    allowed_targets: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps that the run has made."""
        return 0 if self.checkpoint is None else self.checkpoint.step or 0

    @property
    def path(self) -> Path | None:
        """The checkpoint file that the run goes on from."""
        return None if self.checkpoint is None else self.checkpoint.path

    @property
    def run_folder(self) -> Path | None:
        """The folder of the run that goes on."""
        return None if self.path is None else run_folder(self.path)

    @property
    def n_read(self) -> int:
        """Training windows that the run has read."""
        if self.checkpoint is None:
            return 0
        [state] = self.state["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        return state["consumed"]

    @property
    def in_sweep(self) -> bool:
        """Whether the run is one of a sweep, in which a setting may have an effect in other runs only."""
        return self.folder is not None and sweep_of(Path(self.folder)) is not None

    @property
    def origin(self) -> dict[str, Any] | None:
        """The lineage of the run's weights, also of a run that goes on; None: random weights."""
        return self.lineage if self.checkpoint is None else self.checkpoint.lineage

    def load_into(self, model: "GPT") -> None:
        """Copies the weights of the source, if there is one."""
        if self.lm is not None and (line := load_weights(self.lm, model)) and process_rank() == 0:
            print(line, flush=True)

    def check(self, config: RunConfig, meta: Mapping[str, Any], typed: Typed) -> None:
        """Raises ValueError if a run that goes on differs from its checkpoint in what was not typed."""
        if self.checkpoint is not None:
            check_resumed(self.checkpoint, config, meta, typed)


def find_start(typed: Typed, config_dir: str | None = None) -> tuple[dict[str, Any], Start]:
    """The settings of a run as nested plain values, and where it starts.

    Args:
        typed: the settings of the command line.
        config_dir: a folder with more config files.

    Raises:
        UserError: settings that cannot be composed, that contradict the start, or a start that cannot be read.
    """
    with user_errors():
        resume = typed.get("resume")
        targets = tuple(parsed_list(typed, "allow_targets"))
        if resume not in (None, "null"):
            settings, checkpoint, state = find_resumed(resume, typed)
            return settings, Start(checkpoint, state, folder=typed.get("hydra.run.dir"), allowed_targets=targets)
        composed = compose("train", typed, config_dir)
        check_single(composed.hydra.sweeper.get("params") or {}, typed)
        settings = composed.settings
        if settings.get("allow_targets") is not None and "allow_targets" not in typed:
            raise ValueError("allow_targets must be typed, since a file may come from somebody else; remove it there")
        start = take_over(settings.get("init_from"), settings, typed)
        return start[0], replace(start[1], folder=typed.get("hydra.run.dir"), allowed_targets=targets)


def check_single(params: Mapping[str, Any], typed: Typed) -> None:
    """Raises ValueError for an ablation without -m, which would silently train its base configuration alone.

    Args:
        params: the grid of the composed settings, `hydra.sweeper.params`.
    """
    if params and not any(key in typed for key in params):
        remedy = f"run it with {command('train')} -m, or choose a value, such as {next(iter(params))}=..."
        raise ValueError(f"the ablation is a grid over {', '.join(params)}; {remedy}")
    for key in ("sweep.skip_invalid", "sweep.new"):
        if key in typed:
            remedy = "leave it out, or add -m for a grid"
            raise ValueError(f"{key}={typed.get(key)} has no effect on a single run; {remedy}")
    if "tune" in typed:
        raise ValueError(f"+tune=lr tunes the variants of a grid; run it with {command('train')} -m")


def parsed_list(typed: Typed, key: str) -> list[str]:
    """The value of a typed list of texts; [] if it was not typed."""
    values = [each.parsed() for each in typed if each.key == key]
    value = values[-1] if values else None
    if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        raise ValueError(f"{key}={typed.get(key)} must be a list, such as {key}=[package.module.Class]")
    return value or []


def find_resumed(resume: str, typed: Typed) -> "tuple[dict[str, Any], Checkpoint, dict[str, Any]]":
    """The settings of a run that goes on, its checkpoint, and the content of that.

    Raises:
        ValueError: a setting that a run cannot change, or a damaged config.yaml or checkpoint.
        OSError: no checkpoint or no config.yaml.
    """
    if "init_from" in typed:
        given = f"init_from={typed.get('init_from')} starts a new run, and resume continues one"
        raise ValueError(f"{given}; keep one of them")
    for override in typed:
        if override.is_group and override.key not in (*OF_RESUMING, "seed", "compile"):
            remedy = "change single settings, such as trainer.max_steps=2000"
            given = f"{override.key}={override.value}"
            raise ValueError(f"{given} cannot be combined with resume, which keeps the run's own settings; {remedy}")
    path = resumed_checkpoint(os.environ[RUN_FOLDER] if process_rank() > 0 and RUN_FOLDER in os.environ else resume)
    settings = saved_settings(path, typed.without(*OF_RESUMING))
    checkpoint, state = read_resumed(path, newest=resume == "latest")
    tokenizer = settings["data"].get("tokenizer", {})
    if tokenizer.get("kind") == "file" and not Path(str(tokenizer.get("path"))).is_file():
        tokenizer["path"] = str(kept(checkpoint.tokenizer, "json"))  # the checkpoint has it too
    return settings, checkpoint, state


def resumed_checkpoint(resume: str) -> Path:
    """The checkpoint that `resume` names: a file, the last one of a folder, or that of the newest run."""
    if resume != "latest":
        return find_checkpoint(resume, prefer=("last",))
    run = Run.find("latest")
    path = run.folder / CHECKPOINTS / LAST
    if not path.is_file():
        remedy = "start it again, or name the folder of another run"
        raise FileNotFoundError(f"the newest run, {run.folder}, has no checkpoint yet; {remedy}")
    return path


def read_resumed(path: Path, *, newest: bool) -> "tuple[Checkpoint, dict[str, Any]]":
    """A checkpoint and its whole content, verified; `newest`: where it is damaged, the one before takes its place."""
    from tril.model.checkpoint import Checkpoint, DamagedCheckpoint, read_state

    try:
        state = read_state(path)
    except DamagedCheckpoint as error:
        previous = path.with_name(PREVIOUS)
        if not newest or path.name != LAST or not previous.is_file():
            raise
        state = read_state(previous)
        logging.getLogger(__name__).warning("%s; continuing from %s", error, previous)
        path = previous
    if missing := [name for name in OF_TRAINING if name not in state]:
        cause = "it holds a model without the state of its training"
        raise ValueError(f"{path} has no {', '.join(missing)}: {cause}; name the checkpoint of a run")
    return Checkpoint.of(state, path), state


def check_resumed(checkpoint: "Checkpoint", config: RunConfig, meta: Mapping[str, Any], typed: Typed) -> None:
    """Compares a run with the checkpoint that it continues.

    Args:
        meta: of the prepared text.

    Raises:
        ValueError: the model, the text or a setting differs, and may not, or was not typed.
    """
    if meta["fingerprint"] != checkpoint.data["fingerprint"]:
        now, before = (each["fingerprint"][:12] for each in (meta, checkpoint.data))
        cause = "the text, its split or its tokenizer changed; restore them, or start a new run"
        raise ValueError(f"the data (fingerprint {now}) must be those of {checkpoint.path} ({before}): {cause}")
    new, old = resolved_settings(config), checkpoint.settings
    model, before = config.model.to_dict(), checkpoint.config.to_dict()
    for name, value in before.items():
        if name not in FOR_TRAINING and model[name] != value:
            given = f"model.{name}={as_typed(model[name])} must be {as_typed(value)}, as in {checkpoint.path}"
            raise ValueError(f"{given}; leave it out, or start a new run")
    for key in dict.fromkeys([*old, *new]):
        before, now = old.get(key), new.get(key)
        free = key.startswith(FREE) and key not in OF_THE_WINDOWS
        if free or now == before or key.startswith("model.") and key.partition(".")[2] not in FOR_TRAINING:
            continue
        given = f"{key}={as_typed(now)} must be {as_typed(before)}, as in {checkpoint.path}"
        if key in FIXED:
            raise ValueError(f"{given}; leave it out, or start a new run")
        if not any(key == each.key or key.startswith(f"{each.key}.") for each in typed):
            raise ValueError(f"{given}; to change it, type {key}={as_typed(now)}")
    if process_rank() == 0:
        for line in version_warnings(checkpoint):
            print(f"warning: {line}", file=sys.stderr, flush=True)


def resolved_settings(config: RunConfig) -> dict[str, Any]:
    """The settings as dotted keys and plain values, with what "auto" became."""
    assert config.hardware is not None
    settings = {key: x for key, x in flatten(config.to_dict()).items() if not key.startswith("data.sources.")}
    settings |= {"data.sources": getattr(config.data.source, "shares", None)}  # of a mixture, as its windows have them
    return settings | {
        "compile": config.hardware.compile,
        "trainer.precision": config.hardware.precision,
        "trainer.accelerator": config.hardware.accelerator,
    }


def version_warnings(checkpoint: "Checkpoint") -> list[str]:
    """What differs between a checkpoint and this installation, and may change the results."""
    import torch

    from tril.model.checkpoint import code_sha256

    lines, code = [], code_sha256()
    old, new = (each.rpartition(".")[0] for each in (checkpoint.torch_version, str(torch.__version__)))
    if old != new:
        lines.append(f"torch {new} continues a run of torch {old}, so results may differ")
    if checkpoint.code not in (None, code):
        lines.append(f"the code of Tril ({code[:12]}) is not that of {checkpoint.path} ({checkpoint.code[:12]})")
    return lines


def take_over(source: str | None, settings: dict[str, Any], typed: Typed) -> tuple[dict[str, Any], Start]:
    """The settings of a new run with the model and the tokenizer of `init_from`, and the source.

    Args:
        settings: composed.

    Raises:
        ValueError: settings that contradict the source, or a source that cannot be read.
        OSError: there is no source.
    """
    if source is None:
        return settings, Start()
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
    data["tokenizer"] = {"kind": "file", "path": str(kept(lm.tokenizer.to_str(), "json")), "eot": lm.eot}
    if template is not None and data.get("format") == "chat" and data.get("chat_template") is None:
        data["chat_template"] = str(kept(template, "jinja"))
    from tril.model.checkpoint import digest

    lineage = {"source": origin, "weights": digest(dict(lm.model.state_dict())), "step": step}
    return settings | {"model": model, "data": data}, Start(lm=lm, lineage=lineage)


def kept(text: str, suffix: str) -> Path:
    """A file in the cache with this content, which names it."""
    folder = make_folder(resolve_cache_dir() / "taken_over")
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.{suffix}"
    if not path.is_file():
        write_text(path, text)
    return path


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

        checkpoint = read_nanogpt(Path(source.removeprefix(NANOGPT)).expanduser())
        if checkpoint.meta is None:  # the user names the tokenizer
            lm = checkpoint.language_model(*chosen_tokenizer(settings, source))
        else:
            refuse_tokenizer(typed, source)
            lm = checkpoint.language_model()
        return lm, str(checkpoint.path.absolute()), checkpoint.step, None
    refuse_tokenizer(typed, source)
    if source.startswith(HF):
        from tril.model.interop.hf_download import download, is_hub_name
        from tril.model.interop.hf_folder import chat_template, read_hf

        name = source.removeprefix(HF)
        folder, commit = download(name) if is_hub_name(name) else (Path(name).expanduser(), None)
        origin = f"{HF}{commit}" if commit else str(folder.absolute())
        return read_hf(folder), origin, None, chat_template(folder)
    from tril.model.checkpoint import Checkpoint

    checkpoint = Checkpoint.read(find_checkpoint(source))
    template = (checkpoint.data.get("source") or {}).get("chat_template")
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
        cause = f"init_from={source} has no meta.pkl, so its tokens are those of GPT-2"
        remedy = "data.tokenizer.kind=file data.tokenizer.path=tokenizer.json"
        raise ValueError(f"{cause}; name its tokenizer with {remedy}, or kind=hub path=openai-community/gpt2")
    return build(config, ()), config.eot


def model_settings(chosen: Mapping[str, Any], config: "GPTConfig", typed: Typed, source: str) -> dict[str, Any]:
    """The config of the source, with what may change: dropout, backends and a larger vocabulary.

    Args:
        chosen: the settings below `model:`. Those that differ from the defaults, or are typed, were chosen.

    Raises:
        ValueError: names the chosen settings with which it would be another model.
    """
    values, default, wrong = config.to_dict(), defaults(GROUPS["model"]), []
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
