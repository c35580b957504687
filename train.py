"""Trains a small causal language model:  python train.py [key=value ...]

python train.py                                    the standard library, a 2.6 M parameter model
python train.py experiment=NAME                    a complete recipe
python train.py data.path="notes/*.md"             your own text
python train.py model.n_heads=8 model.dim=256      any key below
python train.py -m model.n_heads=1,2,4 seed=0,1    a grid; the same command continues it
python train.py -m +ablation=heads seed=0,1,2      a ready grid; +tune=lr: with the best learning rate of each
python train.py resume=latest                      continue the last run
python train.py debug=true                         20 steps of everything, on little text
python train.py init_from=hf:FOLDER                start from other weights, see docs/weights.md
"""

import contextlib
import hashlib
import shutil
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tril.model.atomic_files import remove_leftovers, write_text
from tril.model.callable_module import make_callable
from tril.model.runs import BEST, CHECKPOINTS, SETTINGS, SUMMARY, remove_if_empty, run_folder
from tril.model.training.errors import RankFailed
from tril.model.training.gc_pause import gc_paused
from tril.scripts.ablation.sweep_job import check_single, in_sweep, run_job
from tril.scripts.common.arguments import RUN_TEXT_KEYS
from tril.scripts.common.build_trainer import callbacks_of, new_trainer, sweep_of, tracked
from tril.scripts.common.cli import UserError, check_writable, command, entry, plain, user_errors
from tril.scripts.common.equal_flops import with_max_flops
from tril.scripts.common.init_from import Start, check_start, resolve_init
from tril.scripts.common.locks import lock_run
from tril.scripts.common.python_api import python_api
from tril.scripts.common.ranks import process_rank, quiet_ranks
from tril.scripts.common.resume import Resumed, choose_folder, chosen_folder, resolve_resume, settings_text
from tril.scripts.common.resume_checks import checkpoint_payload, finished_results
from tril.scripts.common.run_config import RunConfig, check_config, choose_vocab_size, refuse_processes, refuse_unused
from tril.scripts.common.signals import REQUEUE, StoppedError, StopRequest, requeue, stop_on_signals
from tril.scripts.common.source_limit import with_source_limit
from tril.scripts.common.trained_run import METRICS

if TYPE_CHECKING:  # imported late, since settings are checked before anything expensive starts
    from tril.data.datamodule import TextDataModule
    from tril.model.gpt import GPT
    from tril.model.training.callbacks.metrics import Metrics
    from tril.model.training.module import TrainingModule

CONTINUED_FILES = (METRICS, "samples.txt", "windows_best.npz", f"{CHECKPOINTS}/{BEST}")

OmegaConf.register_new_resolver("run_folder", choose_folder, replace=True, use_cache=True)


@entry("train", RUN_TEXT_KEYS)
def main(cfg: DictConfig) -> float:
    if in_sweep():
        return run_job()
    folder = chosen_folder(cfg)
    quiet_ranks()
    try:
        with stop_on_signals() as stop:
            return train(cfg, stop)["val/loss"]  # a Hydra sweeper minimizes it
    except (UserError, OmegaConfBaseException):
        remove_if_empty(folder)  # Hydra created it before the settings were checked
        raise
    except RankFailed as error:
        print(f"error: {error}; continue with {command('train')} resume={folder}", file=sys.stderr, flush=True)
        sys.exit(1)
    except StoppedError as stopped:
        remove_if_empty(folder)
        text = stopped.describe(folder, f"{command('train')} resume={folder}")
        if process_rank() == 0:
            if REQUEUE is not None and stopped.status == 128 + REQUEUE:
                text += f"; {requeue()}"
            print(text, file=sys.stderr, flush=True)
        sys.exit(stopped.status)


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    metrics: "Metrics"
    trainer: Any  # lightning.Trainer
    data: "TextDataModule"
    model: "GPT"
    payload: dict[str, Any]  # the "tril" entry of its checkpoints


def train(cfg: DictConfig, stop: StopRequest | None = None, *, one_process: bool = False) -> dict[str, float]:
    """One run from a composed configs/train.yaml. Its files are in `cfg.output_dir`.

    Args:
        stop: asks it to stop at the end of a step; None: nothing does.
        one_process: refuse settings that start further processes.

    Returns:
        Last and best validation metrics.

    Raises:
        UserError: invalid settings, before the data are prepared and the model is built.
    """
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        with user_errors():
            check_single()
            cfg, resumed = resolve_resume(cfg)
            cfg, start = resolve_init(cfg)
            if start is not None:
                stack.callback(start.discard_unused)
            config = check_config(cfg)
            check_start(start, config)
            if one_process:
                refuse_processes(config)
            if sweep_of(Path(cfg.output_dir)) is None:  # a sweep compares runs by their effective settings
                refuse_unused(config)
            check_writable(Path(cfg.output_dir), "hydra.run.dir")
            if process_rank() == 0:
                stack.enter_context(lock_run(Path(cfg.output_dir)))
            if resumed is None:  # a resumed run has its steps
                cfg, config = with_max_flops(cfg, config)
            cfg, config, remark = with_source_limit(cfg, config, resumed)
            if remark:
                print(remark, flush=True)
            parts = build_parts(cfg, config, resumed, stop or StopRequest(), started, start)
            del start  # its weights are in the model
            if resumed and (results := finished_results(resumed, config, Path(cfg.output_dir), parts.trainer)):
                return results
        stack.enter_context(tracked(parts.trainer, Path(cfg.output_dir), cfg))
        return run(cfg, config, resumed, parts)


def build_parts(
    cfg: DictConfig,
    config: RunConfig,
    resumed: Resumed | None,
    stop: StopRequest,
    started: float,
    start: Start | None = None,
) -> Parts:
    """Prepares the text and builds the parts of a run.

    Raises:
        ValueError: settings that do not fit the text, or the checkpoint of a resumed run.
    """
    with gc_paused():  # collections during the imports take a sixth of their time
        import torch

        from tril.data.datamodule import TextDataModule
        from tril.model.gpt import GPT
        from tril.model.training.callbacks.metrics import Metrics
        from tril.model.training.errors import out_of_memory
        from tril.model.training.optim import base_of
        from tril.model.training.parallel import FSDP
        from tril.model.training.width_scaling import scale_initial_values

    assert config.hardware is not None
    trainer = new_trainer(cfg, config, stop, started, resumed)
    data = TextDataModule(config.data, context_length=config.model.context_length, seed=cfg.seed)
    data.prepare_data()
    for loader in (data.train_dataloader, data.val_dataloader):
        loader()  # raises if the text is too short
    vocab_size = choose_vocab_size(cfg.model.vocab_size, data.vocab_size)
    torch.manual_seed(derive_seed(cfg.seed, "initialisation"))
    sharded = isinstance(trainer.strategy, FSDP)  # each process fills its shards itself
    model_config = replace(config.model, vocab_size=vocab_size)
    with out_of_memory(**memory_settings(config)), torch.device("meta" if sharded else "cpu"):
        model = GPT(model_config)
    if config.optim.scale_with_width and not sharded:
        scale_initial_values(model, base_of(config.optim))
    if start is not None:
        start.load_into(model)
    allowed = OmegaConf.to_object(cfg.allow_changes) if OmegaConf.is_config(cfg.allow_changes) else cfg.allow_changes
    payload = checkpoint_payload(model, data, config, resumed, allowed, lineage=start and start.lineage)
    return Parts(Metrics.of(trainer), trainer, data, model, payload)


def run(cfg: DictConfig, config: RunConfig, resumed: Resumed | None, parts: Parts) -> dict[str, float]:
    """Trains the model and writes the summary."""
    from tril.model.training.errors import NonFiniteError, OutOfMemory, RunRefused, out_of_memory
    from tril.model.training.hardware import configure_torch
    from tril.model.training.summary import code_version, describe, finish
    from tril.model.training.trainer import fit

    hardware, data, model, metrics = config.hardware, parts.data, parts.model, parts.metrics
    assert hardware is not None
    folder, first = Path(cfg.output_dir), parts.trainer.is_global_zero
    before = start_folder(folder, cfg, config, resumed) if first else None
    module = build_module(cfg, config, parts)
    description = describe(
        model,
        data.meta,
        hardware,
        steps=config.steps,
        tokens_per_step=config.tokens_per_step() * parts.trainer.world_size,
        schedule=config.optim.schedule,
        early_stop=None if sweep_of(folder) else callbacks_of(cfg).early_stop,
        folder=folder,
    )
    print(description, flush=True)
    configure_torch(hardware.accelerator)
    diverged = None
    try:
        with out_of_memory(**memory_settings(config)):
            settings = plain(cfg) | {"code": code_version()}
            fit(parts.trainer, module, data, checkpoint=None if resumed is None else resumed.path, settings=settings)
    except RunRefused as error:
        if before is not None:  # a resumed run keeps its settings
            write_text(folder / SETTINGS, before)
        raise UserError(str(error)) from error
    except OutOfMemory as error:
        raise UserError(str(error)) from None
    except StoppedError as stopped:
        stopped.step = parts.trainer.global_step
        raise
    except NonFiniteError as error:  # of all processes
        if not first:
            sys.exit(2)
        diverged = error
    if not first:
        return {"val/loss": metrics.val[-1]["loss"]}
    lineage = parts.payload.get("init_from")
    results = finish(
        parts.trainer,
        module,
        data.meta | {"val_bytes_per_token": data.val_bytes_per_token},
        folder,
        hardware=hardware,
        seed=cfg.seed,
        sample=command("sample"),
        diverged=diverged,
        lineage=lineage,
    )
    if diverged is not None:  # after the summary, by which a sweep sees a diverged run
        raise UserError(str(diverged)) from diverged
    return results


def build_module(cfg: DictConfig, config: RunConfig, parts: Parts) -> "TrainingModule":
    """The LightningModule, after which dropout draws from its own stream, another one on each data rank."""
    import torch

    from tril.model.training.module import TrainingModule

    assert config.hardware is not None
    rank = parts.trainer.global_rank
    torch.manual_seed(derive_seed(cfg.seed, f"dropout/{rank}" if rank else "dropout"))
    return TrainingModule(
        parts.model,
        config.optim,
        total_steps=config.steps,
        val_bytes=parts.data.val_bytes,
        val_documents=parts.data.val_documents,
        payload=parts.payload,
        compile=config.hardware.compile,
        document_eot=parts.data.document_eot,
    )


def start_folder(folder: Path, cfg: DictConfig, config: RunConfig, resumed: Resumed | None) -> str | None:
    """Writes config.yaml and removes what a killed process left; a run that goes on in a new folder takes its files.

    Returns:
        The config.yaml before; None without one.
    """
    for place in (folder, folder / CHECKPOINTS, (folder / METRICS).parent):
        remove_leftovers(place)
    if resumed is not None:
        source = run_folder(resumed.path)
        for name in CONTINUED_FILES if source.resolve() != folder.resolve() else ():
            if (source / name).is_file() and not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, folder / name)
        if resumed.step < config.steps:
            (folder / SUMMARY).unlink(missing_ok=True)  # it marks a finished run
    settings = folder / SETTINGS
    before = settings.read_text(encoding="utf-8") if settings.is_file() else None
    write_text(settings, settings_text(cfg))
    return before


def memory_settings(config: RunConfig) -> dict[str, int]:
    """The settings to lower where memory does not suffice."""
    model = config.model
    return {"batch_size": config.data.batch_size, "context_length": model.context_length, "dim": model.dim}


def derive_seed(seed: int, purpose: str) -> int:
    """A separate seed for each purpose, so that a change of one (such as dropout) does not affect the others."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:4], "big")


if __name__ == "__main__":
    main()
else:  # `from tril import train` gives this module
    make_callable(__name__, python_api(partial(train, one_process=True)))
