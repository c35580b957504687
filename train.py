"""Trains a model: python train.py [experiment=NAME] [key=value ...]

Settings are checked before anything expensive starts, so torch, Lightning and the data are imported late.
"""

import gc
import hashlib
import sys
import time
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tril.model.atomic_files import write_text
from tril.model.runs import CHECKPOINTS, SWEEP
from tril.scripts.ablation.sweep_job import check_single, in_sweep, run_job
from tril.scripts.common.build_trainer import build_trainer, fit
from tril.scripts.common.cli import UserError, check_writable, command, entry, user_errors
from tril.scripts.common.equal_flops import with_equal_flops
from tril.scripts.common.resume import checkpoint_payload, choose_folder, resolve_resume
from tril.scripts.common.run_config import check_config, choose_vocab_size, refuse_unused
from tril.scripts.common.signals import StoppedError, stop_on_signals

# Keys whose value is free text.
TEXT_KEYS = ("resume", "data.path", "data.val_path", "data.repo", "callbacks.samples.prompt")

OmegaConf.register_new_resolver("run_folder", choose_folder, replace=True, use_cache=True)


@entry("train", TEXT_KEYS)
def main(cfg: DictConfig) -> float:
    if in_sweep():
        return run_job()
    folder = Path(cfg.output_dir)
    try:
        check_single()
        with stop_on_signals():
            return train(cfg)["val/loss"]  # a Hydra sweeper minimizes it
    except (UserError, OmegaConfBaseException):
        remove_if_empty(folder)  # Hydra created it before the settings were checked
        raise
    except StoppedError as stopped:
        remove_if_empty(folder)
        resumable = (folder / CHECKPOINTS / "last.ckpt").is_file()
        remedy = f"continue with {command('train')} resume={folder}" if resumable else "there is no checkpoint yet"
        print(f"stopped by {stopped.name} at step {stopped.step}; {remedy}", file=sys.stderr, flush=True)
        sys.exit(stopped.status)


def train(cfg: DictConfig) -> dict[str, float]:
    """One run from a composed configs/train.yaml. Its files are in `cfg.output_dir`.

    Returns:
        Last and best validation metrics.

    Raises:
        UserError: invalid settings, before the data are prepared and the model is built.
    """
    started = time.perf_counter()
    with user_errors():
        cfg, checkpoint = resolve_resume(cfg)
        config = check_config(cfg)
        # a sweep compares runs by their effective settings; its trials of +tune=lr are two folders deeper
        if not any((folder / SWEEP).is_file() for folder in Path(cfg.output_dir).parents[:3]):
            refuse_unused(config)
        check_writable(Path(cfg.output_dir), "hydra.run.dir")
        if checkpoint is None:  # a resumed run has its steps
            cfg, config = with_equal_flops(cfg, config)
    assert config.hardware is not None

    gc.disable()  # collections during the imports take a sixth of their time
    import torch

    from tril.data.datamodule import TextDataModule
    from tril.model.gpt import GPT
    from tril.model.training import attention_kernels as kernels
    from tril.model.training.callbacks.metrics import Metrics
    from tril.model.training.errors import RunRefused
    from tril.model.training.hardware import configure_torch
    from tril.model.training.module import TrainingModule
    from tril.model.training.summary import describe, finish
    from tril.model.training.width_scaling import scale_initial_values

    gc.enable()
    with user_errors():
        metrics = Metrics(config.tokens_per_step(), config.hardware.peak_flops, started)
        trainer = build_trainer(cfg, config, metrics)
        metrics.count_devices(trainer.world_size)
        data = TextDataModule(**vars(config.data), context_length=config.model.context_length, seed=cfg.seed)
        data.prepare_data()
        for loader in (data.train_dataloader, data.val_dataloader):
            loader()  # raises if the text is too short
        vocab_size = choose_vocab_size(cfg.model.vocab_size, data.vocab_size)
        torch.manual_seed(derive_seed(cfg.seed, "initialisation"))
        model = GPT(replace(config.model, vocab_size=vocab_size))
        if config.optim.scale_with_width:
            scale_initial_values(model, config.optim.base)
        payload = checkpoint_payload(model, data, checkpoint)

    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "config.yaml"
    before = settings.read_text(encoding="utf-8") if settings.is_file() else None
    write_text(settings, OmegaConf.to_yaml(cfg, resolve=True))
    torch.manual_seed(derive_seed(cfg.seed, "dropout"))
    module = TrainingModule(
        model,
        config.optim,
        total_steps=config.steps,
        val_bytes=data.val_bytes,
        val_documents=data.val_documents,
        payload=payload,
        compile=config.hardware.compile,
        document_eot=data.document_eot,
    )
    times = kernels.measure(model.config, data.batch_size, config.hardware, documents=data.document_mask)
    print(describe(model, data.meta, config.hardware, config.steps, metrics.tokens_per_step, folder, times), flush=True)

    configure_torch(config.hardware.accelerator)
    try:
        with kernels.prefer(times):
            fit(trainer, module, data, checkpoint, metrics)
    except RunRefused as error:
        if before is not None:  # a resumed run keeps its settings
            write_text(settings, before)
        raise UserError(str(error)) from error
    return finish(
        metrics,
        model,
        folder,
        hardware=config.hardware,
        seed=cfg.seed,
        data=data.meta | {"val_bytes_per_token": data.val_bytes_per_token},
        seconds=metrics.wall_seconds(),
        certificate=module.certificate,
    )


def derive_seed(seed: int, purpose: str) -> int:
    """A separate seed for each purpose, so that a change of one (such as dropout) does not affect the others."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:4], "big")


def remove_if_empty(folder: Path) -> None:
    """Removes the folder of a run, then the folder of its day, if they are empty."""
    for path in (folder, folder.parent):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


if __name__ == "__main__":
    main()
