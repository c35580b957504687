"""Writes any model for Hugging Face transformers:  tril export ckpt=latest to=hf out=FOLDER

The folder is for AutoModelForCausalLM and AutoTokenizer, with the causality certificate: a GPT-2, Llama or Qwen3 class
for a model that it expresses, else code that imports tril, for trust_remote_code=True. Before the folder gets its name,
`transformers` loads it, and its logits and token ids are compared with those of Tril. See docs/weights.md.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings, typed
from tril.model.formats import wrapped
from tril.model.generation.config import CKPT
from tril.model.runs import find_checkpoint
from tril.scripts.cli.app import Composed, command
from tril.scripts.cli.errors import check_writable, user_errors


@dataclass(frozen=True, config=strict_settings())
class ExportCommand:
    """What is written, and where."""

    ckpt: str = CKPT
    to: Literal["hf"] = setting("hf", "hf: a folder for `transformers`")
    out: str | None = setting(None, "a new or empty folder; required")

    def __post_init__(self) -> None:
        if not self.out:
            raise ValueError(f"out={typed(self.out)} must be a new folder")
        path = Path(os.path.expanduser(self.out))
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise ValueError(f"out={self.out} exists; name a new one")


@command("export", ExportCommand)
def main(settings: ExportCommand, composed: Composed) -> None:
    with user_errors():
        path, out = find_checkpoint(settings.ckpt), Path(os.path.expanduser(str(settings.out))).absolute()
        check_writable(out.parent, "out")
        # Importing torch takes a second, so wrong settings are reported before.
        from tril.model.checkpoint import Checkpoint
        from tril.model.interop.hf import OWN_CLASS, export_hf

        name = export_hf(out, Checkpoint.read(path))
    needs = "; load it with trust_remote_code=True where tril is installed" if name == OWN_CLASS else ""
    print(wrapped(f"{out}: {name}, equal to {path} in logits and token ids{needs}"), flush=True)


if __name__ == "__main__":
    main()
