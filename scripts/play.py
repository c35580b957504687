"""Serves a page to play with a trained model on this computer:  python scripts/play.py ckpt=latest other=CHECKPOINT

The page streams text and shows for each token what it was drawn from and what the model attended to. Heads can be
switched off, and two checkpoints compared. It needs pip install "tril[app]". The address goes to stdout, the rest to
stderr.
"""

import contextlib
import importlib.util
import socket
import sys
import webbrowser
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.data.settings import build, strict_settings
from tril.model.runs import find_checkpoint
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import pick_device, user_errors
from tril.scripts.cli.typed import Typed

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, config=strict_settings())
class Settings:
    """The keys of configs/play.yaml."""

    ckpt: str
    other: str | None
    prompt: str
    port: Annotated[int, Field(ge=0, le=65535)]
    open: bool
    device: str


@entry("play", ("ckpt", "other", "prompt"))
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():  # before torch, which takes a second to import
        settings = build(Settings, cfg)
        if not all(map(importlib.util.find_spec, ("starlette", "uvicorn"))):
            raise ValueError('the page needs starlette and uvicorn; pip install "tril[app]"')
        paths = [find_checkpoint(path) for path in (settings.ckpt, settings.other) if path is not None]
        listener = listen(settings.port)
    from tril.model.checkpoint import load
    from tril.scripts.playground.server import PlayModel, create_server

    with listener, contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the server
        with user_errors():
            device = pick_device(settings.device)
            models = [PlayModel(str(path), load(path, device)) for path in paths]
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/"
        print(url, flush=True)
        print(f"{' and '.join(map(str, paths))} on {device}; Ctrl-C ends the server", file=sys.stderr, flush=True)
        if settings.open:
            webbrowser.open(url)
        create_server(models, settings.prompt).run(sockets=[listener])


def listen(port: int) -> socket.socket:
    """A listening socket of the loopback interface. Raises OSError if the port is in use, or needs more rights."""
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        remedy = "choose another port, or port=0 for any free one"
        raise OSError(f"cannot listen on port={port}: {error.strerror}; {remedy}") from error


if __name__ == "__main__":
    main()
