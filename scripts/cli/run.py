"""The steps of a run: its text, its model, what trains it, and its end. Imports torch and Lightning in functions."""

import sys
from typing import TYPE_CHECKING

import yaml

from tril.model.atomic_files import write_text
from tril.model.runs import SETTINGS, Run
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.errors import UserError, command
from tril.scripts.cli.folder import take_files
from tril.scripts.cli.process import StoppedError, StopRequest
from tril.scripts.cli.start import Start, resolved_settings
from tril.scripts.cli.typed import Typed

if TYPE_CHECKING:
    from lightning import Trainer

    from tril.data.datamodule import TextDataModule
    from tril.model.gpt import GPT
    from tril.model.training.module import TrainingModule


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


def build_model(config: RunConfig, start: Start) -> "GPT":
    """The model with random weights, or with those of the source. A model that will be sharded has no weights yet."""
    import torch

    from tril.model.gpt import GPT
    from tril.model.training.width_scaling import scale_initial_values

    torch.manual_seed(config.seed_for("initialisation"))
    sharded = config.trainer.strategy == "model_parallel"
    with torch.device("meta" if sharded else "cpu"):
        model = GPT(config.model)
    if config.optim.scale_with_width and not sharded:
        scale_initial_values(model, config.optim)
    start.load_into(model)
    return model


def build_training(
    config: RunConfig,
    run: Run,
    model: "GPT",
    data: "TextDataModule",
    start: Start,
    *,
    added: tuple[list, list],
    stop: StopRequest,
    started: float,
) -> "tuple[Trainer, TrainingModule]":
    """The Trainer and the LightningModule; afterwards, dropout has a stream of its own on each rank.

    Args:
        added: callbacks and loggers that the command line adds.
        stop: asks the run to stop at the end of a step.
        started: time.perf_counter() at the start of the process.

    Raises:
        ValueError: the package of a logger is missing.
    """
    import torch

    from tril.model.checkpoint import Checkpoint, code_sha256
    from tril.model.training.module import TrainingModule
    from tril.scripts.cli.trainer import new_trainer

    hardware = config.hardware
    assert hardware is not None
    step = None if start.checkpoint is None else start.step
    total = config.steps * config.tokens_per_step() * config.devices
    passes = total / data.meta["counts"]["train"]["tokens"]
    trainer = new_trainer(config, run.folder, stop, passes=passes, started=started, step=step, added=added)
    rank = trainer.global_rank
    torch.manual_seed(config.seed_for(f"dropout/{rank}" if rank else "dropout"))
    entry = Checkpoint(
        model.config,
        weights={},  # the module adds them
        tokenizer=data.tokenizer.to_str(),
        eot=data.config.tokenizer.eot,
        data=data.meta,
        lineage=start.origin,
        settings=resolved_settings(config),
        code=code_sha256(),
    )
    module = TrainingModule(
        model,
        config.optim,
        total_steps=config.steps,
        val_bytes=data.val_bytes,
        val_documents=data.val_documents,
        payload=entry.entry(),
        compile=hardware.compile,
        document_eot=data.document_eot,
    )
    return trainer, module


def is_finished(start: Start, config: RunConfig, trainer: "Trainer", run: Run, typed: Typed) -> bool:
    """Whether a resumed run has no step left, and a summary; says so.

    Raises:
        ValueError: no step is left, and a setting was typed that would need one.
    """
    from tril.model.training.trainer import no_step_left

    if start.checkpoint is None:
        return False
    end, remedy = f"finished its {start.step:,} steps", "raise trainer.max_steps"
    if start.step < config.steps:
        if (limit := no_step_left(trainer, start.state)) is None:
            return False
        end, remedy = f"stopped at step {start.step:,} by {limit}", f"raise {limit}"
    if changed := [each.key for each in typed if each.key not in ("resume", "allow_targets")]:
        done = f"{run.folder} has {end} without {changed[0]}"
        raise ValueError(f"{done}; {remedy} to continue it, or start a new run")
    if run.state != "finished" or run.summary.get("diverged"):  # the process ended before it was written
        return False
    print(f"{run.folder} has {end}; it is unchanged", flush=True)
    return True


def run_training(
    trainer: "Trainer", module: "TrainingModule", data: "TextDataModule", config: RunConfig, run: Run, start: Start
) -> Run:
    """Trains, and writes the summary.

    Raises:
        UserError: the model sees the future, memory does not suffice, or a loss is not finite.
    """
    from tril.model.training.errors import NonFiniteError, RunRefused
    from tril.model.training.summary import code_version, describe
    from tril.model.training.trainer import fit

    first, path = trainer.is_global_zero, run.folder / SETTINGS
    settings = config.to_dict() | {"code": code_version()}
    before = path.read_text(encoding="utf-8") if first and path.is_file() else None
    if first:
        take_files(run, start.path, work_left=start.step < config.steps)
        write_text(path, yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))
    print(describe(trainer, module, data), flush=True)
    try:
        fit(trainer, module, data, checkpoint=start.path, settings=settings, sample=command("sample"))
    except RunRefused as error:
        if before is not None:  # a resumed run keeps its settings
            write_text(path, before)
        raise UserError(str(error)) from error
    except MemoryError as error:
        raise UserError(str(error)) from None
    except StoppedError as stopped:
        stopped.step = trainer.global_step
        raise
    except NonFiniteError as error:  # of all processes
        if not first:
            sys.exit(2)
        raise UserError(str(error)) from error
    return run
