"""A user's mistake is one line: value, limit, remedy; exit status 2. Names of programs and settings in such lines."""

import contextlib
import os
import sys
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from pathlib import Path

from tril.data.settings import explain, nearest

# Names of nanoGPT, litgpt, transformers and Lightning for settings of Tril.
OTHER_NAMES = {
    "model.context_length": "block_size context_size seq_len max_seq_len max_seq_length n_ctx n_positions",
    "model.dim": "n_embd d_model hidden_size embed_dim width",
    "model.n_layers": "n_layer num_layers num_hidden_layers n_blocks depth layers",
    "model.n_heads": "n_head num_heads num_attention_heads heads",
    "model.n_kv_heads": "n_kv_head num_kv_heads num_key_value_heads n_query_groups",
    "model.mlp_hidden": "intermediate_size ffn_dim d_ff",
    "model.resid_dropout": "dropout resid_pdrop hidden_dropout",
    "model.window": "sliding_window attention_window",
    "model.checkpoint_activations": "gradient_checkpointing activation_checkpointing",
    "data": "dataset dataset_name",
    "data.batch_size": "batch_size micro_batch_size per_device_train_batch_size bs",
    "data.path": "path input_file train_file data_dir data_path",
    "optim": "optimizer optimizer_type",
    "optim.lr": "learning_rate lr max_lr",
    "optim.schedule.warmup_steps": "warmup_iters warmup lr_warmup_steps num_warmup_steps",
    "optim.schedule.min_lr_ratio": "min_lr min_lr_rate",
    "trainer.max_steps": "max_iters steps iterations num_train_steps epochs max_epochs num_epochs num_train_epochs",
    "trainer.accumulate_grad_batches": "gradient_accumulation_steps gradient_accumulation_iters grad_accum_steps",
    "trainer.gradient_clip_val": "grad_clip max_grad_norm max_norm",
    "trainer.val_check_interval": "eval_interval eval_steps eval_every",
    "trainer.accelerator": "device",
    "trainer.precision": "dtype bf16 fp16 amp",
    "checkpoint.every_n_steps": "save_steps save_interval",
    "hydra.run.dir": "out_dir out output_dir save_dir log_dir",
    "debug": "fast_dev_run overfit_batches",
    "logger": "use_wandb wandb_log report_to",
    "resume": "resume_from resume_from_checkpoint ckpt ckpt_path",
    "init_from": "pretrained from_pretrained model_name_or_path",
}
MEANT = {name: key for key, names in OTHER_NAMES.items() for name in names.split()}


CALLED: ContextVar[str | None] = ContextVar("program that Python code calls", default=None)


class UserError(ValueError):
    """A mistake in what the user typed. Its message is one line: value, limit, remedy. Notes list parts of a grid."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns a ValueError or OSError of the block into a UserError. Wrap only code that reads the user's input."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(message_of(error)) from error


def message_of(error: Exception) -> str:
    """The error in one line."""
    from pydantic import ValidationError

    return explain(error) if isinstance(error, ValidationError) else " ".join(str(error).split())


def unknown_setting(key: str, known: Collection[str]) -> ValueError:
    """The error for a key that does not exist, with the setting that was probably meant.

    Args:
        known: dotted names of those that exist.
    """
    last = key.rpartition(".")[2].replace("-", "_").lower()
    same_name = [name for name in known if name.rpartition(".")[2] == last]
    meant = MEANT.get(last) if MEANT.get(last) in known else same_name[0] if len(same_name) == 1 else None
    text = f"; did you mean {meant}?" if meant else nearest(key, known)
    if "; choose" in text:
        text = f"; see {program()} --help"
    return ValueError(f"there is no setting {key}{text}")


def fail(message: object, status: int = 2) -> None:
    """Prints the error in one line, its notes in lines of their own, and exits."""
    print(f"error: {printable(' '.join(str(message).splitlines()))}", file=sys.stderr)
    for note in getattr(message, "__notes__", ()):
        print(printable(note), file=sys.stderr)
    sys.exit(status)


def printable(text: str) -> str:
    """The text with escapes for line ends and control characters."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def command(script: str) -> str:
    """How the user starts a script: `tril report` from the console command, else `python scripts/report.py`."""
    if sys.argv[0].startswith("tril "):
        return f"tril {script}"
    return "python train.py" if script == "train" else f"python scripts/{script}.py"


def program() -> str:
    """The running program as typed: `tril report`, or `python PATH/report.py`; `tril train` in a call from Python."""
    if (called := CALLED.get()) is not None:
        return called
    return sys.argv[0] if sys.argv[0].startswith("tril ") else f"python {sys.argv[0]}"


def check_writable(folder: Path, key: str) -> None:
    """Raises OSError if `folder`, which need not exist, cannot be written to; the setting `key` chooses it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise OSError(f"cannot write to {folder}; choose another folder with {key}=FOLDER")


def writable(folder: str | Path, key: str) -> Path:
    """Creates the folder that the setting `key` chooses, before anything is computed for it.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder = Path(folder)
    check_writable(folder, key)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def drop_output() -> None:
    """Discards further output. Without this, Python's flush at exit fails when the reader of stdout is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def pick_device(name: str) -> str:
    """`name`, or the fastest available kind of device for "auto"."""
    import torch

    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    usable = [kind for kind in available if available[kind]]
    if name != "auto" and name not in usable:
        raise ValueError(f"device={name} is not available; use auto, {', '.join(usable)}")
    return usable[0] if name == "auto" else name
