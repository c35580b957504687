"""The steps of a run: its folder, its text, its model, what trains it, and its end. Imports torch in functions."""

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tril.model.atomic_files import remove_leftovers, write_text
from tril.model.runs import (
    CHECKPOINTS,
    LOCK,
    METRICS,
    ROOTS,
    SETTINGS,
    SUMMARY,
    SWEEP,
    Run,
    is_resumable,
    new_folder,
    remove_if_empty,
    run_folder,
)
from tril.scripts.cli.app import CommandLine
from tril.scripts.cli.config import FOLDER, RunConfig, TrainCommand, is_given, known_settings
from tril.scripts.cli.errors import UserError, check_writable, command, message_of, user_errors
from tril.scripts.cli.process import StoppedError, n_started, process_rank, shared_folder
from tril.scripts.cli.start import Start, resolved_settings, tell

if TYPE_CHECKING:
    from lightning import Callback, Trainer
    from lightning.pytorch.loggers import Logger

    from tril.data.datamodule import TextDataModule
    from tril.model.gpt import GPT
    from tril.model.training.module import TrainingModule
    from tril.model.training.time_budget import PlanSteps

OF_A_RUN = (SETTINGS, SUMMARY, CHECKPOINTS, METRICS)


@contextlib.contextmanager
def open_run(chosen: str | None, start: Start) -> Iterator[Run]:
    """Creates and locks the folder of a run for the block. A run that ends before it wrote anything leaves nothing.

    Args:
        chosen: hydra.run.dir; None: the folder of the run that goes on, or a new one below outputs/.

    Raises:
        UserError: the folder has a run, cannot be written to, or another process trains the run.
    """

    def create() -> Path:
        if start.path is not None:
            return run_folder(start.path)
        if chosen is None and n_started() > 1:
            raise UserError(f"torchrun and srun start processes that need one folder; add {FOLDER}=FOLDER")
        if chosen is None:
            return new_folder(ROOTS[0])
        if not chosen:
            raise UserError(f"{FOLDER}='' is no folder; name one, or leave it out")
        folder = Path(chosen)
        check_writable(folder, FOLDER)
        # Rank 0 decides for all: another rank can come here when rank 0 has written its first file.
        if process_rank() == 0 and any((folder / name).exists() for name in OF_A_RUN):
            remedy = f"continue it with resume={folder}"
            if not is_resumable(folder):
                remedy = "it has no checkpoint, so remove it"
            raise UserError(f"{FOLDER}={folder} has a run; {remedy}, or choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    with contextlib.ExitStack() as stack:
        with user_errors():
            folder = stack.enter_context(shared_folder(create))
            run = Run(folder.absolute())
            if process_rank() == 0:
                stack.enter_context(run.lock())
                for place in (folder, folder / CHECKPOINTS, (folder / METRICS).parent):
                    remove_leftovers(place)
        try:
            yield run
        finally:
            if process_rank() == 0 and {path.name for path in folder.iterdir()} <= {LOCK}:
                (folder / LOCK).unlink(missing_ok=True)
                remove_if_empty(folder)


def sweep_of(folder: str | Path) -> Path | None:
    """The folder of the sweep that a run belongs to."""
    parent = Path(folder).absolute().parent
    return parent if (parent / SWEEP).is_file() else None


def instantiate(targets: Mapping[str, Mapping[str, Any]], folder: Path) -> "tuple[list[Callback], list[Logger]]":
    """The callbacks and the loggers that the command line or configs/ name by a `_target_`.

    Args:
        targets: dotted key -> `_target_` and arguments.
        folder: of the run, in which loggers save.

    Raises:
        ValueError: one that cannot be imported, that is no callback or logger, or that raises an error.
    """
    if not targets:
        return [], []
    import hydra
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger

    callbacks, loggers = [], []
    for key, node in targets.items():
        kind, made = (Callback, callbacks) if key.startswith("callbacks.") else (Logger, loggers)
        given = f"{key}._target_={node['_target_']}"
        try:
            built = hydra.utils.instantiate(({"save_dir": str(folder)} if kind is Logger else {}) | dict(node))
        except Exception as error:  # whatever the constructor raises is about its arguments
            raise ValueError(f"{given}: {message_of(error.__cause__ or error)}") from error
        if not isinstance(built, kind):
            raise ValueError(f"{given} is no {kind.__name__.lower()} of Lightning; correct it")
        made.append(built)
    return callbacks, loggers


def prepare_text(config: RunConfig) -> "TextDataModule":
    """The text in tokens, from the cache if it is there.

    Raises:
        ValueError: the text is too short for the windows, or cannot be read.
        OSError: it does not exist.
    """
    from tril.data.datamodule import TextDataModule

    data = TextDataModule(config.data, context_length=config.model.context_length, seed=config.top.seed)
    data.prepare_data()
    for loader in (data.train_dataloader, data.val_dataloader):
        loader()  # raises if the text is too short
    return data


def check_minutes(config: RunConfig, line: CommandLine[TrainCommand]) -> None:
    """Raises UserError for settings that `minutes` excludes."""
    if line.own.minutes is None:
        return
    for key in ("trainer.max_steps", "trainer.max_time", "debug"):
        if key in line.given:
            raise UserError(f"{key}={line.given[key]} excludes minutes, which decide the steps; leave one out")
    if config.trainer.is_distributed:
        raise UserError("minutes need a single process, whose steps are timed; leave them out, or use trainer=default")


def plan_minutes(
    config: RunConfig, data: "TextDataModule", line: CommandLine[TrainCommand], started: float, run: Run, start: Start
) -> "tuple[RunConfig, PlanSteps | None]":
    """The settings of a run that ends in time, and the callback that plans its steps once more; without `minutes`, the
    same settings.

    Settings that are given, the settings of an experiment, and the model of other weights are kept.

    Args:
        started: time.perf_counter() at the start of the run.

    Raises:
        ValueError: the time is too short.
    """
    if line.own.minutes is None:
        return config, None
    from tril.model.training.time_budget import STARTUP, PlanSteps, plan_time

    assert config.hardware is not None

    def keeps(key: str) -> bool:
        from_weights = start.lm is not None and key.startswith("model.")
        return from_weights or "experiment" in line.given or is_given(line.given, key)

    counts = data.meta["counts"]
    plan = plan_time(
        config.model,
        config.optim,
        config.trainer,
        config.hardware,
        end=started + 60 * line.own.minutes - STARTUP,
        windows=config.data.batch_size * config.accumulate,
        val_batch_size=data.val_batch_size,
        train_tokens=counts["train"]["tokens"],
        val_tokens=counts["val"]["tokens"],
        lengths=config.window_lengths,
        keeps=keeps,
    )
    intervals = {"val_check_interval": plan.val_check_interval, "limit_val_batches": plan.val_batches}
    trainer = replace(config.trainer, max_steps=plan.steps, **intervals)
    print(plan.reasons, flush=True)
    planner = PlanSteps(plan, config.optim.schedule, functools.partial(record_steps, run))
    return replace(config, model=plan.model, trainer=trainer), planner


def build_model(config: RunConfig, start: Start) -> "GPT":
    """The model with random weights, or with those of the source."""
    import torch

    from tril.model.gpt import GPT

    torch.manual_seed(config.seed_for("initialisation"))
    model = GPT(config.model)
    if start.lm is not None:
        from tril.scripts.cli.init_from import load_weights

        if line := load_weights(start.lm, model):
            tell(line)
    return model


def build_module(config: RunConfig, model: "GPT", data: "TextDataModule", start: Start, rank: int) -> "TrainingModule":
    """The LightningModule; afterwards, dropout has a stream of its own on each rank."""
    import torch

    from tril.model.checkpoint import Checkpoint, code_sha256
    from tril.model.training.module import TrainingModule

    assert config.hardware is not None
    torch.manual_seed(config.seed_for(f"dropout/{rank}" if rank else "dropout"))
    entry = Checkpoint(
        model.config,
        weights={},  # the module adds them
        tokenizer=data.tokenizer.to_str(),
        eot=data.config.tokenizer.eot,
        data=data.meta | {"prompt": data.prompt},
        lineage=start.lineage,
        settings=resolved_settings(config),
        code=code_sha256(),
    )
    return TrainingModule(
        model,
        config.optim,
        total_steps=config.trainer.max_steps,
        val_bytes=data.val_bytes,
        val_documents=data.val_documents,
        payload=entry.entry(),
        compile=config.hardware.compile,
        document_eot=data.document_eot,
    )


def passes_over(data: "TextDataModule", config: RunConfig) -> float:
    """How often the run reads its training text."""
    tokens = config.steps * config.tokens_per_step() * config.devices
    return tokens / data.meta["counts"]["train"]["tokens"]


def record_steps(run: Run, steps: int) -> None:
    """Writes a new trainer.max_steps into config.yaml."""
    settings = run.settings
    settings["trainer"]["max_steps"] = steps
    write_text(run.folder / SETTINGS, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def is_finished(start: Start, config: RunConfig, run: Run, given: Mapping[str, str]) -> bool:
    """Whether a resumed run has a summary and no step left; says so.

    Raises:
        ValueError: no step is left, and a setting is given that would need one.
    """
    if start.checkpoint is None or not (run.folder / SUMMARY).is_file() or run.summary.get("diverged"):
        return False
    end, limit = f"finished its {start.step:,} steps", "trainer.max_steps"
    if start.step < config.steps:
        limit = str(run.summary.get("stopped_early")).rpartition(" by ")[2]  # a setting, or "a callback"
        if limit not in known_settings() or is_given(given, limit):
            return False
        end = f"stopped at step {start.step:,} by {limit}"
    if changed := [key for key in given if key != "resume"]:
        remedy = f"raise {limit} to continue it, or start a new run"
        raise ValueError(f"{run.folder} has {end} without {changed[0]}; {remedy}")
    print(f"{run.folder} has {end}; it is unchanged", flush=True)
    return True


def fit_run(
    trainer: "Trainer", module: "TrainingModule", data: "TextDataModule", config: RunConfig, run: Run, start: Start
) -> None:
    """Trains, and writes the summary.

    Raises:
        UserError: the model sees the future, memory does not suffice, a loss is not finite, or a file of the run cannot
            be written.
    """
    from tril.model.checkpoint import one_line
    from tril.model.training.errors import NonFiniteError, RunRefused
    from tril.model.training.summary import code_version, describe
    from tril.model.training.trainer import fit

    first, path = trainer.is_global_zero, run.folder / SETTINGS
    settings = config.to_dict()
    before = path.read_text(encoding="utf-8") if first and path.is_file() else None
    if first:
        write_text(path, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        if start.step < config.steps:  # summary.json marks a finished run
            (run.folder / SUMMARY).unlink(missing_ok=True)
    print(describe(trainer, module, data), flush=True)
    try:
        settings |= {"code": code_version()}
        fit(trainer, module, data, checkpoint=start.path, settings=settings, sample=command("sample"))
    except StoppedError as stopped:
        stopped.step = trainer.global_step
        raise
    except OSError as error:
        remedy = f"continue with resume={run.folder}" if is_resumable(run.folder) else "start again"
        raise UserError(f"{one_line(str(error))}; mend the cause, such as a full disk, and {remedy}") from error
    except (RunRefused, MemoryError, NonFiniteError) as error:
        if isinstance(error, RunRefused) and before is not None:  # a resumed run keeps its settings
            write_text(path, before)
        if isinstance(error, NonFiniteError) and not first:  # all processes raise it, and rank 0 says so
            sys.exit()  # Lightning kills rank 0 when another rank ends with another status
        raise UserError(str(error)) from error
