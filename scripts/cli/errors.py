"""A user's mistake is one line: value, limit, remedy; exit status 2. Names of programs and settings in such lines."""

import contextlib
import os
import shlex
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from tril.data.settings import explain, nearest, printable

# What users of nanoGPT, litgpt and Lightning type, for settings of Tril.
OTHER_NAMES = {
    "model.context_length": "block_size seq_len max_seq_length",
    "model.dim": "n_embd d_model hidden_size",
    "model.n_layers": "n_layer num_layers num_hidden_layers",
    "model.n_heads": "n_head num_heads num_attention_heads",
    "model.n_kv_heads": "n_query_groups num_key_value_heads",
    "model.resid_dropout": "dropout",
    "data": "dataset",
    "data.batch_size": "micro_batch_size bs",
    "data.tokenizer.vocab_size": "vocab_size",
    "optim": "optimizer",
    "optim.lr_scale": "learning_rate",
    "optim.schedule.warmup_steps": "warmup_iters warmup",
    "optim.schedule.min_lr_ratio": "min_lr",
    "trainer.max_steps": "max_iters max_epochs epochs num_epochs steps",
    "trainer.accumulate_grad_batches": "gradient_accumulation_steps gradient_accumulation_iters",
    "trainer.gradient_clip_val": "grad_clip",
    "trainer.val_check_interval": "eval_interval",
    "trainer.accelerator": "device",
    "trainer.precision": "dtype",
    "hydra.run.dir": "out_dir output_dir default_root_dir",
    "debug": "fast_dev_run",
    "logger": "wandb_log",
    "resume": "ckpt_path",
}
MEANT = {name: key for key, names in OTHER_NAMES.items() for name in names.split()}
# What more to say of a setting that was meant.
REMARKS = {
    "optim.lr_scale": " It multiplies all rates; AdamW alone, with a rate of your own, is optim=adamw optim.lr=RATE"
}


CONSOLE = "TRIL_CONSOLE"  # the variable that is set where the `tril` command started the program


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


def unknown_setting(key: str, known: Collection[str]) -> str:
    """The message for a key that does not exist, with the setting that was probably meant.

    Args:
        known: dotted names of those that exist.
    """
    last = key.rpartition(".")[2].replace("-", "_").lower()
    same_name = [name for name in known if name.rpartition(".")[2] == last]
    meant = MEANT.get(last) if MEANT.get(last) in known else same_name[0] if len(same_name) == 1 else None
    text = f"; did you mean {meant}?{REMARKS.get(meant, '')}" if meant else nearest(key, known)
    return f"there is no setting {key}{text if 'did you mean' in text else '; --help=all lists all'}"


def fail(message: object, status: int = 2) -> None:
    """Prints the error in one line, its notes in lines of their own, and exits."""
    print(f"error: {printable(' '.join(str(message).splitlines()))}", file=sys.stderr)
    for note in getattr(message, "__notes__", ()):
        print(printable(note), file=sys.stderr)
    sys.exit(status)


def command(script: str, *settings: str) -> str:
    """How the user starts a script: `tril report` from the console command, else `python scripts/report.py`.

    Args:
        settings: key=value; those with spaces or other characters of the shell are quoted.
    """
    if CONSOLE in os.environ:
        program = f"tril {script}"
    else:
        program = "python train.py" if script == "train" else f"python scripts/{script}.py"
    return " ".join([program, *map(shlex.quote, settings)])


def check_writable(folder: Path, key: str) -> None:
    """Raises OSError if `folder`, which need not exist, cannot be written to; the setting `key` chooses it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise OSError(f"cannot write to {folder}; choose another folder with {key}=FOLDER")


def writable(folder: str | Path, key: str) -> Path:
    """Creates the folder that the setting `key` chooses, before anything is computed for it; see `check_writable`."""
    check_writable(folder := Path(folder), key)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
