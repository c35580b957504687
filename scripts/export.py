"""Writes a model for other programs:  python scripts/export.py ckpt=latest to=hf out=FOLDER   or  to=gguf out=FILE.gguf

The folder is for AutoModelForCausalLM and AutoTokenizer: a GPT-2, Llama or Qwen3 class, without custom code, and the
causality certificate. Before it gets its name, `transformers` loads it, and its logits and token ids are compared with
those of Tril. The file is for llama.cpp, of a Llama or Qwen3; it needs pip install -e ".[gguf]".
"""

from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.model.runs import CKPT, find_checkpoint
from tril.scripts.cli.app import CommandLine, entry
from tril.scripts.cli.errors import user_errors


@dataclass(frozen=True, config=strict_settings())
class ExportCommand:
    """What is written, and where."""

    ckpt: str = CKPT
    to: Literal["hf", "gguf"] = setting("hf", "hf: a folder for `transformers`; gguf: a file for llama.cpp")
    out: str | None = setting(None, "a new or empty folder, or a new file FILE.gguf; required")

    def __post_init__(self) -> None:
        if self.out is None or (self.to == "gguf") != self.out.endswith(".gguf"):
            new = "a new file FILE.gguf" if self.to == "gguf" else "a new folder"
            raise ValueError(f"out={self.out or 'null'} must be {new}")
        path = Path(self.out).expanduser()
        if path.exists() and not (self.to == "hf" and path.is_dir() and not any(path.iterdir())):
            raise ValueError(f"out={self.out} exists; name a new one")


@entry("export", ExportCommand)
def main(line: CommandLine[ExportCommand]) -> None:
    settings = line.own
    with user_errors():
        path, out = find_checkpoint(settings.ckpt), Path(str(settings.out)).expanduser().absolute()
        # Importing torch takes a second, so wrong settings are reported before.
        from tril.model.checkpoint import Checkpoint

        checkpoint = Checkpoint.read(path)
        if settings.to == "gguf":
            from tril.model.interop.gguf_file import write_gguf

            write_gguf(out, checkpoint.language_model())
            written = f"GGUF in float32 of {path}"
        else:
            from tril.model.interop.hf_export import export_hf

            written = f"{export_hf(out, checkpoint)}, equal to {path} in logits and token ids"
    print(f"{out}: {written}", flush=True)


if __name__ == "__main__":
    main()
