"""Trains a model: python train.py [experiment=NAME] [key=value ...]

`train(cfg)` composes the parts and fits. Whatever a user can get wrong is checked before anything expensive begins, so torch,
Lightning and the data are imported where they are first needed.
"""

import gc
import hashlib
import inspect
import logging
import time
import warnings
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from tril.model.runs import ROOTS, find_checkpoint, moved, new_folder, run_folder
from tril.scripts.ablation.run_process import check_single, in_sweep, run_cell
from tril.scripts.common.cli import UserError, check_writable, entry, nearest, plain, task_overrides, user_errors
from tril.scripts.common.run_config import Plan, check, vocabulary

TEXTS = (
    "resume",
    "data.path",
    "data.val_path",
    "data.repo",
    "callbacks.samples.prompt",
)  # keys whose value is text as it was typed
FREE_ON_RESUME = {"backend", "embd_dropout", "attn_dropout", "resid_dropout"}  # may differ between two halves of a run


def choose_folder(resume: str | None) -> str:
    """Hydra's run folder: a new outputs/DATE/TIME, or that of the run that is resumed."""
    if resume is not None:
        try:
            return str(run_folder(find_checkpoint(resume, prefer=("last",))))
        except FileNotFoundError:
            pass  # reported by train(), in one line
    return str(new_folder(ROOTS[0]))


OmegaConf.register_new_resolver("run_folder", choose_folder, replace=True, use_cache=True)


@entry("train", TEXTS)
def main(cfg: DictConfig) -> float:
    if in_sweep():
        return run_cell()
    try:
        check_single()
        return train(cfg)["val/loss"]  # what a Hydra sweeper would minimise
    except UserError:
        remove_if_empty(Path(cfg.output_dir))  # Hydra made it before anything was checked
        raise


def train(cfg: DictConfig) -> dict[str, float]:
    """One run from a composed configs/train.yaml. Returns its last metrics; everything else lies in `cfg.output_dir`.

    Raises UserError (a ValueError) for settings that cannot work, before the data are prepared and the model is built.
    """
    started = time.perf_counter()
    with user_errors():
        cfg, checkpoint = continued(cfg)
        plan = check(cfg)

    gc.disable()  # it would search all that is imported here again and again: a sixth of the time
    import torch

    from tril.data.datamodule import TextDataModule
    from tril.model.gpt import GPT
    from tril.model.training import attention_kernels as kernels
    from tril.model.training.callbacks.metrics import Metrics
    from tril.model.training.errors import RunRefused
    from tril.model.training.hardware import settle
    from tril.model.training.module import TrainingModule
    from tril.model.training.summary import describe, finish

    gc.enable()
    with user_errors():
        folder = Path(cfg.output_dir)
        check_writable(folder, "hydra.run.dir")
        metrics = Metrics(plan.tokens_per_step(), plan.hardware.peak_flops, started)
        trainer = build_trainer(cfg, plan, metrics)
        metrics.count_devices(trainer.world_size)
        data = TextDataModule(**vars(plan.data), context_length=plan.model.context_length, seed=cfg.seed)
        data.prepare_data()
        data.train_dataloader(), data.val_dataloader()  # refuse a text that is too short for them
        config = replace(plan.model, vocab_size=vocabulary(cfg.model.vocab_size, data.vocab_size))
        torch.manual_seed(stream(cfg.seed, "initialisation"))
        model = GPT(config)
        payload = checkpoint_payload(model, data, checkpoint)

    folder.mkdir(parents=True, exist_ok=True)
    before = read_if_there(folder / "config.yaml")
    OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
    torch.manual_seed(stream(cfg.seed, "dropout"))
    module = TrainingModule(
        model,
        plan.optim,
        total_steps=plan.steps,
        val_bytes_per_token=data.val_bytes_per_token,
        payload=payload,
        compile=plan.hardware.compile,
        document_eot=data.document_eot,
    )
    kernel_times = kernels.measure(config, data.batch_size, plan.hardware, documents=data.document_mask)
    print(
        describe(model, data.meta, plan.hardware, plan.steps, metrics.tokens_per_step, folder, kernel_times), flush=True
    )

    settle(plan.hardware.accelerator)
    with kernels.prefer(kernel_times):
        try:
            trainer.fit(module, data, ckpt_path=checkpoint)
        except RunRefused as error:
            if before is not None:  # the run that was to be resumed keeps the settings that it ran with
                (folder / "config.yaml").write_text(before, encoding="utf-8")
            raise UserError(str(error)) from error
        if (
            not metrics.val or metrics.val[-1]["step"] != trainer.global_step
        ):  # val_check_interval does not divide the steps
            trainer.validate(module, data, verbose=False)
            trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt")
            if metrics.val[-1] == metrics.best():
                trainer.save_checkpoint(folder / "checkpoints" / "best.ckpt")
    return finish(
        metrics,
        model,
        folder,
        hardware=plan.hardware,
        seed=cfg.seed,
        data=data.meta | {"val_bytes_per_token": data.val_bytes_per_token},
        seconds=metrics.wall_seconds(),
        causality=payload.get("causality"),
    )


def continued(cfg: DictConfig) -> tuple[DictConfig, Path | None]:
    """With `resume`: the resumed run's own settings, with the keys of this command line on top, and its newest checkpoint."""
    if cfg.resume is None:
        return cfg, None
    checkpoint = find_checkpoint(cfg.resume, prefer=("last",))
    saved = OmegaConf.to_container(OmegaConf.load(run_folder(checkpoint) / "config.yaml"))
    saved = moved(saved, saved["output_dir"], cfg.output_dir)  # it may have been copied, or go on elsewhere
    saved = OmegaConf.merge({"causality": cfg.causality}, saved)  # which runs of an older version lack
    for override in task_overrides():
        key = override.split("=")[0].lstrip("+~")
        if "." not in key and key not in ("resume", "seed", "compile", "output_dir"):
            raise ValueError(
                f"resume goes on with the run's own settings, so {override} cannot be chosen; change single keys, such as trainer.max_steps=2000"
            )
        if override.startswith("~"):
            group, _, name = key.rpartition(".")
            OmegaConf.select(saved, group).pop(name, None)
        else:
            OmegaConf.update(saved, key, OmegaConf.select(cfg, key), force_add=True)
    return saved, checkpoint


def checkpoint_payload(model, data, checkpoint: Path | None) -> dict:
    """What checkpoints hold besides weights. Raises ValueError where a resumed run's model or data are not those of its checkpoint."""
    from tril.model.checkpoint import payload, read

    new = payload(model, data.tokenizer, eot=data.tokenizer_config.eot, data=data.meta)
    if checkpoint is None:
        return new
    old = read(checkpoint)["tril"]
    for name, value in old["config"].items():
        if name not in FREE_ON_RESUME and new["config"][name] != value:
            raise ValueError(
                f"model.{name}={new['config'][name]} does not fit {checkpoint}, which was trained with {value}; leave it, or start a new run"
            )
    if old["data"]["fingerprint"] != new["data"]["fingerprint"]:
        raise ValueError(
            f"the data are not those of {checkpoint} (fingerprint {new['data']['fingerprint'][:12]} instead of "
            f"{old['data']['fingerprint'][:12]}): the text, its split or its tokenizer changed; restore them, or start a new run"
        )
    return new


def build_trainer(cfg: DictConfig, plan: Plan, metrics):
    """The lightning.Trainer with all callbacks, `metrics` before the others, and the logger. Raises ValueError for what they refuse."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate
    from lightning import Trainer
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from tril.model.training.checkpointing import WholeFiles

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no advertisements between our lines
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # between torch 2.13 and Lightning 2.6
    warnings.filterwarnings("ignore", ".*exists and is not empty")  # a resumed run's folder is meant to be
    legal = inspect.signature(Trainer.__init__).parameters
    arguments = plain(cfg.trainer)
    for name in arguments:
        if name not in legal:
            raise ValueError(f"there is no setting trainer.{name}{nearest(name, legal, 'trainer.')}")
    arguments = (
        {"plugins": [WholeFiles()]}
        | arguments
        | {
            "accelerator": plan.hardware.accelerator,
            "precision": plan.hardware.precision,
            "default_root_dir": cfg.output_dir,
            "use_distributed_sampler": False,  # the data module gives each process its share
        }
    )
    try:
        callbacks = [callback for callback in instantiate(cfg.callbacks).values() if callback is not None]
        return Trainer(**arguments, callbacks=[metrics, *callbacks], logger=instantiate(cfg.logger))
    except InstantiationException as error:
        raise ValueError(f"callbacks or logger: {error.__cause__ or error}") from error
    except (MisconfigurationException, TypeError) as error:  # Lightning's words for a wrong argument
        raise ValueError(f"trainer: {error}") from error


def stream(seed: int, name: str) -> int:
    """A seed of its own for each purpose, so that changing one (say, dropout) leaves the others as they are."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big")


def read_if_there(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def remove_if_empty(folder: Path) -> None:
    """Removes a run's folder and that of its day, unless something is in them."""
    for path in (folder, folder.parent):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


if __name__ == "__main__":
    main()
