"""Serves a page to play with a trained model on this computer:  tril play ckpt=latest other=CHECKPOINT

The page streams text and shows for each token what it was drawn from and what the model attended to. Heads can be
switched off, and two checkpoints compared. It needs pip install -e ".[app]". The address goes to stdout, the rest to
stderr.
"""

import contextlib
import importlib.util
import sys

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.model.generation.config import CKPT, DEVICE
from tril.model.runs import find_checkpoint
from tril.scripts.cli.app import Composed, command
from tril.scripts.cli.errors import user_errors
from tril.scripts.playground.server import LOOPBACK, PlayModel, create_server, listen


@dataclass(frozen=True, config=strict_settings())
class PlayCommand:
    """What the page shows, and where."""

    ckpt: str = CKPT
    other: str | None = setting(None, "a second checkpoint to compare side by side; null: none")
    prompt: str | None = setting(
        None, r"the text that the page starts with; \n is a line end; null: one that suits the run", escapes=True
    )
    port: int = setting(8000, "of 127.0.0.1, which only this computer reaches; 0: any free port", ge=0, le=65535)
    device: str = DEVICE


@command("play", PlayCommand)
def main(settings: PlayCommand, composed: Composed) -> None:
    with user_errors():  # before torch, which takes a second to import
        if not all(map(importlib.util.find_spec, ("starlette", "uvicorn"))):
            raise ValueError('the page needs starlette and uvicorn; pip install -e ".[app]"')
        paths = [find_checkpoint(path) for path in (settings.ckpt, settings.other) if path is not None]
        listener = listen(settings.port)
    from tril.model.checkpoint import Checkpoint
    from tril.model.training.hardware import use_device

    with listener, contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the server
        with user_errors():
            device = use_device(settings.device)
            checkpoints = [Checkpoint.read(path) for path in paths]
            models = [PlayModel(str(each.path), each.language_model(device)) for each in checkpoints]
            prompt = settings.prompt if settings.prompt is not None else str(checkpoints[0].data.get("prompt", ""))
        print(f"{' and '.join(map(str, paths))} on {device}; Ctrl-C ends the server", file=sys.stderr, flush=True)
        print(f"http://{LOOPBACK}:{listener.getsockname()[1]}/", flush=True)
        create_server(models, prompt).run(sockets=[listener])


if __name__ == "__main__":
    main()
