"""The steps of a run that have errors of their own: its folder, its loggers, its minutes and its training."""

import contextlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tril.data.cache import keep_compiled_code
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
from tril.scripts.cli.config import FOLDER, RunConfig, flatten, is_given
from tril.scripts.cli.errors import UserError, check_writable, message_of, shell_command, user_errors
from tril.scripts.cli.process import n_started, process_rank, shared_folder

if TYPE_CHECKING:
    from lightning import Callback, Trainer
    from lightning.pytorch.loggers import Logger

    from tril.data.datamodule import TextDataModule
    from tril.model.checkpoint import Checkpoint
    from tril.model.gpt import GPT
    from tril.model.training.hardware import Hardware
    from tril.model.training.module import TrainingModule
    from tril.model.training.time_budget import PlanSteps

OF_A_RUN = (SETTINGS, SUMMARY, CHECKPOINTS, METRICS)


@contextlib.contextmanager
def open_run(chosen: str | None, checkpoint: "Checkpoint | None") -> Iterator[Run]:
    """Creates and locks the folder of a run for the block. A run that ends before it wrote anything leaves nothing.

    Args:
        chosen: hydra.run.dir; None: the folder of the run that goes on, or a new one below outputs/.
        checkpoint: of the run that goes on; None: it is a new run.

    Raises:
        UserError: the folder has a run, cannot be written to, or another process trains the run.
    """

    def create() -> Path:
        if checkpoint is not None:
            return run_folder(Path(str(checkpoint.path)))
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
            if process_rank() == 0 and folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK}:
                (folder / LOCK).unlink(missing_ok=True)
                remove_if_empty(folder)


def choose_hardware(config: RunConfig, *, one_process: bool = False) -> "Hardware":
    """The hardware that the settings of a run choose; imports torch.

    Args:
        one_process: the run cannot start further processes.

    Raises:
        ValueError: this machine lacks what they need.
    """
    keep_compiled_code()  # before torch looks for a compiler
    from tril.model.gpt import check_memory
    from tril.model.training.hardware import select_hardware

    check_memory(config.model)
    trainer = config.trainer
    hardware = select_hardware(trainer.accelerator, trainer.precision, config.top.compile)
    most = max(8, os.cpu_count() or 1)  # more processes than cores are for tests
    if hardware.accelerator == "cpu" and trainer.devices != "auto" and trainer.devices > most:
        raise ValueError(f"trainer.devices={trainer.devices} must be at most {most} on this machine's CPU")
    if trainer.is_distributed and one_process:
        chosen = f"trainer.strategy={trainer.strategy} with trainer.devices={trainer.devices}"
        raise ValueError(f"{chosen} starts processes; use tril train in a terminal, or trainer=default")
    started, nodes, devices = n_started(), trainer.num_nodes, replace(config, hardware=hardware).devices
    if devices != started and (started > 1 or nodes > 1):
        product = f"trainer.devices={devices // nodes} * trainer.num_nodes={nodes}"
        number = "the number of processes that torchrun or srun started"
        raise ValueError(f"{product} must be {started}, {number}; change one of them")
    return hardware


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
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise ValueError(f"{given}: {message_of(cause)}") from error
        if not isinstance(built, kind):
            raise ValueError(f"{given} is no {kind.__name__.lower()} of Lightning; correct it")
        made.append(built)
    return callbacks, loggers


def plan_minutes(
    config: RunConfig, data: "TextDataModule", end: float, fixed: Collection[str], run: Run
) -> "tuple[RunConfig, PlanSteps]":
    """The settings of a run that ends in time, and the callback that plans its steps once more.

    Args:
        end: time.perf_counter() at the end of the run.
        fixed: settings and groups that keep their configured values; "experiment": all of them.

    Raises:
        ValueError: the time is too short.
    """
    from tril.model.training.time_budget import STARTUP, PlanSteps, plan_time

    assert config.hardware is not None
    counts = data.meta["counts"]
    val_tokens = counts["val"]["tokens"]
    if limit := config.trainer.limit_val_batches:
        val_tokens = min(val_tokens, limit * data.val_batch_size * data.context_length)
    plan = plan_time(
        config.model,
        config.optim,
        config.trainer,
        config.hardware,
        end=end - STARTUP,
        windows=config.data.batch_size * config.trainer.accumulate_grad_batches,
        train_tokens=counts["train"]["tokens"],
        val_tokens=val_tokens,
        lengths=config.window_lengths,
        keeps=lambda key: "experiment" in fixed or is_given(fixed, key),
    )

    def record(steps: int) -> None:
        settings = run.settings
        settings["trainer"]["max_steps"] = steps
        write_settings(run, settings)

    trainer = replace(config.trainer, max_steps=plan.steps, val_check_interval=plan.val_check_interval)
    print(plan.reasons, flush=True)
    return replace(config, model=plan.model, trainer=trainer), PlanSteps(plan, config.optim.schedule, record)


def build_module(
    config: RunConfig, model: "GPT", data: "TextDataModule", lineage: dict[str, Any] | None
) -> "TrainingModule":
    """The LightningModule, with what its checkpoints hold besides the weights.

    Args:
        lineage: where the initial weights come from; None: they are random.
    """
    from tril.model.checkpoint import Checkpoint, code_sha256
    from tril.model.training.module import TrainingModule

    assert config.hardware is not None
    entry = Checkpoint(
        model.config,
        weights={},  # the module adds them
        tokenizer=data.tokenizer.to_str(),
        eot=data.config.tokenizer.eot,
        data=data.meta | {"prompt": data.prompt},
        lineage=lineage,
        settings=flatten(config.to_dict()),
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


def fit_run(
    trainer: "Trainer",
    module: "TrainingModule",
    data: "TextDataModule",
    config: RunConfig,
    run: Run,
    checkpoint: "Checkpoint | None",
) -> None:
    """Trains, and writes config.yaml and the summary.

    Args:
        checkpoint: that the run goes on from; None: it is a new run.

    Raises:
        UserError: the model sees the future, memory does not suffice, a loss is not finite, or a file of the run cannot
            be written.
    """
    from tril.model.checkpoint import one_line
    from tril.model.training.callbacks.metrics import NonFiniteError
    from tril.model.training.settings import RunRefused
    from tril.model.training.summary import code_version, describe
    from tril.model.training.trainer import fit

    before = run.settings if checkpoint is not None else None
    settings = config.to_dict()
    if trainer.is_global_zero:
        write_settings(run, settings)
        (run.folder / SUMMARY).unlink(missing_ok=True)  # which marks a finished run
    print(describe(trainer, module, data), flush=True)
    try:
        settings |= {"code": code_version()}
        fit(
            trainer,
            module,
            data,
            checkpoint=None if checkpoint is None else checkpoint.path,
            settings=settings,
            sample=shell_command("sample"),
        )
    except BrokenPipeError:
        raise
    except OSError as error:
        remedy = f"continue with resume={run.folder}" if is_resumable(run.folder) else "start again"
        raise UserError(f"{one_line(str(error))}; mend the cause, such as a full disk, and {remedy}") from error
    except (RunRefused, MemoryError, NonFiniteError) as error:
        if isinstance(error, RunRefused) and before is not None:  # a resumed run keeps its settings
            write_settings(run, before)
        if isinstance(error, NonFiniteError) and not trainer.is_global_zero:  # all processes raise it, one says so
            sys.exit()  # Lightning kills rank 0 when another rank ends with another status
        raise UserError(str(error)) from error


def write_settings(run: Run, settings: Mapping[str, Any]) -> None:
    """Writes config.yaml."""
    write_text(run.folder / SETTINGS, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
