"""The steps of a run that have errors of their own: its processes, folder, loggers, minutes and training.

Lightning starts the processes of trainer.devices=N itself; torchrun and Slurm's srun start them before train.py runs.
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tril.data.cache import PROGRESS
from tril.data.settings import flatten
from tril.model import runs
from tril.model.atomic_files import remove_leftovers, write_text
from tril.model.runs import CHECKPOINTS, LOCK, METRICS, SETTINGS, SUMMARY, Run
from tril.scripts.cli.config import FOLDER, RunConfig, is_given
from tril.scripts.cli.errors import UserError, message_of, shell_command, user_errors, writable

if TYPE_CHECKING:
    from lightning import Callback
    from lightning.pytorch.loggers import Logger

    from tril.data.datamodule import TextDataModule
    from tril.model.checkpoint import Checkpoint
    from tril.model.gpt import GPT
    from tril.model.training.hardware import Hardware
    from tril.model.training.module import TrainingModule
    from tril.model.training.time_budget import PlanSteps

OF_A_RUN = (SETTINGS, SUMMARY, CHECKPOINTS, METRICS)
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # of torchrun, Lightning and srun, in Lightning's order
RUN_FOLDER = "TRIL_RUN_FOLDER"  # the variable in which rank 0 tells the processes that Lightning starts its folder


def process_rank() -> int:
    """The rank of this process in its run; 0 in a run of one process."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def n_started() -> int:
    """The number of processes that torchrun or srun started, which know nothing of each other yet; 1: neither did."""
    return int(os.environ.get("WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_STEP_NUM_TASKS", 1))


def shared_folder() -> str | None:
    """The run's folder, in a process that Lightning starts after rank 0 has chosen it."""
    return os.environ.get(RUN_FOLDER) if process_rank() > 0 else None


def quiet_ranks() -> None:
    """Every rank but 0 prints errors only, for the rest of the process."""
    if process_rank() > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        PROGRESS["disable"] = True
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)


@contextlib.contextmanager
def open_run(chosen: str | None, checkpoint: "Checkpoint | None") -> Iterator[Run]:
    """Creates and locks the folder of a run for the block. A run that ends before it wrote anything leaves nothing.

    Args:
        chosen: hydra.run.dir; None: the folder of the run that goes on, or a new one below outputs/.
        checkpoint: of the run that goes on; None: it is a new run.

    Raises:
        UserError: the folder has a run, cannot be written to, or another process trains the run.
    """
    with contextlib.ExitStack() as stack:
        with user_errors():
            folder = Path(shared_folder() or choose_folder(chosen, checkpoint)).absolute()
            os.environ[RUN_FOLDER] = str(folder)
            stack.callback(os.environ.pop, RUN_FOLDER, None)
            run = Run(folder)
            if process_rank() == 0:
                stack.enter_context(run.lock())
                for each in (folder, folder / CHECKPOINTS, (folder / METRICS).parent):
                    remove_leftovers(each)
        try:
            yield run
        finally:
            if process_rank() == 0 and folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK}:
                (folder / LOCK).unlink(missing_ok=True)
                runs.remove_if_empty(folder)


def choose_folder(chosen: str | None, checkpoint: "Checkpoint | None") -> Path:
    """The folder of a run, which exists then; see `open_run`."""
    if checkpoint is not None:
        return runs.run_folder(Path(str(checkpoint.path)))
    if chosen is None and n_started() > 1:
        raise ValueError(f"torchrun and srun start processes that need one folder; add {FOLDER}=FOLDER")
    if chosen is None:
        return runs.new_folder(runs.ROOTS[0])
    # Rank 0 decides for all: another rank can come here when rank 0 has written its first file.
    if not chosen or process_rank() == 0 and any(Path(chosen, name).exists() for name in OF_A_RUN):
        remedy = f"continue it with resume={chosen}, or " if runs.is_resumable(Path(chosen)) else ""
        raise ValueError(f"{FOLDER}={chosen} must be a folder without a run; {remedy}choose another folder")
    return writable(chosen, FOLDER)


def choose_hardware(config: RunConfig, *, one_process: bool = False) -> "Hardware":
    """The hardware that the settings of a run choose; imports torch.

    Args:
        one_process: the run cannot start further processes.

    Raises:
        ValueError: this machine lacks what they need.
    """
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
    return parent if (parent / runs.SWEEP).is_file() else None


def instantiate(targets: Mapping[str, Mapping[str, Any]], folder: Path) -> "tuple[list[Callback], list[Logger]]":
    """The callbacks and the loggers that the command line or configs/ name by a `_target_`.

    Args:
        targets: dotted key -> `_target_` and arguments.
        folder: of the run, in which loggers save.

    Raises:
        ValueError: one that cannot be imported, that is no callback or logger, or that raises an error.
    """
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
        lengths=data.lengths,
        keeps=lambda key: "experiment" in fixed or is_given(fixed, key),
    )

    def record(steps: int) -> None:
        settings = run.settings
        settings["trainer"]["max_steps"] = steps
        write_settings(run, settings)

    trainer = replace(config.trainer, max_steps=plan.steps, val_check_interval=plan.val_check_interval)
    print(plan.reasons, flush=True)
    planned = replace(config, model=plan.model, optim=plan.optim, trainer=trainer)
    return planned, PlanSteps(plan, config.optim.schedule, record)


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
        eot=data.source.tokenizer.eot,
        data=data.meta | {"prompt": data.source.prompt},
        lineage=lineage,
        settings=flatten(config.to_dict()),
        code=code_sha256(),
    )
    return TrainingModule(
        model,
        config.optim,
        total_steps=config.trainer.max_steps,
        val_bytes=data.text.val_bytes,
        val_documents=lambda n: data.text.documents("val")[:n],
        payload=entry.entry(),
        compile=config.hardware.compile,
        document_eot=data.meta["eot_id"] if config.data.document_mask else None,
    )


@contextlib.contextmanager
def ending(run: Run, before: Mapping[str, Any] | None, *, in_process: bool) -> Iterator[None]:
    """Says in one line why training ends before its last step.

    Args:
        before: settings that config.yaml keeps if the run does not start; None: it is a new run.
        in_process: raise KeyboardInterrupt after a signal, and not SystemExit.

    Raises:
        UserError: the model sees the future, memory does not suffice, a loss is not finite, or a file of the run cannot
            be written.
    """
    from tril.model.training.callbacks.metrics import NonFiniteError
    from tril.model.training.checkpoints import Stopped
    from tril.model.training.settings import RunRefused

    try:
        yield
    except Stopped as stopped:
        if in_process:
            raise KeyboardInterrupt(stopped.describe(f'train("resume={run.folder}")')) from None
        if process_rank() == 0:
            print(stopped.describe(shell_command("train", f"resume={run.folder}")), file=sys.stderr, flush=True)
        raise
    except BrokenPipeError:
        raise
    except OSError as error:
        remedy = f"continue with resume={run.folder}" if runs.is_resumable(run.folder) else "start again"
        raise UserError(f"{message_of(error)}; mend the cause, such as a full disk, and {remedy}") from error
    except (RunRefused, MemoryError, NonFiniteError) as error:
        if isinstance(error, RunRefused) and before is not None:
            write_settings(run, before)
        if isinstance(error, NonFiniteError) and process_rank() > 0:  # all processes raise it, one says so
            sys.exit()  # Lightning kills rank 0 when another rank ends with another status
        raise UserError(str(error)) from error


def start_run(run: Run, settings: Mapping[str, Any]) -> None:
    """Marks the run as one that trains, with these settings."""
    if process_rank() == 0:
        (run.folder / SUMMARY).unlink(missing_ok=True)  # which marks a finished run
        write_settings(run, settings)


def write_settings(run: Run, settings: Mapping[str, Any]) -> None:
    """Writes config.yaml."""
    write_text(run.folder / SETTINGS, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
