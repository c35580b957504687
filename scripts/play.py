"""Serves a page to play with a trained model on this computer:  python scripts/play.py ckpt=latest other=CHECKPOINT

The page streams text and shows for each token what it was drawn from and what the model attended to. Heads can be
switched off, and two checkpoints compared. It needs pip install "tril[app]". The address goes to stdout, the rest to
stderr.
"""

import contextlib
import importlib.util
import os
import socket
import sys
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.data.settings import build, strict_settings
from tril.model.runs import find_checkpoint
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import pick_device, user_errors
from tril.scripts.cli.typed import Typed

TEXT_KEYS = ("ckpt", "other", "prompt")
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


@entry("play", TEXT_KEYS)
def main(cfg: dict, typed: Typed) -> None:
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the server
        serve(cfg)


def serve(cfg: dict) -> None:
    """Serves the page until Ctrl-C."""
    with user_errors():  # before torch, which takes a second to import
        settings = build(Settings, cfg)
        check_libraries()
        paths = [find_checkpoint(path) for path in (settings.ckpt, settings.other) if path is not None]
        listener = listen(settings.port)
    from tril.model.checkpoint import load
    from tril.scripts.playground.server import PlayModel, create_server

    with listener:
        with user_errors():
            device = pick_device(settings.device)
            models = [PlayModel(str(path), load(path, device)) for path in paths]
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/"
        print(url, flush=True)
        print(f"{' and '.join(map(str, paths))} on {device}; Ctrl-C ends the server", file=sys.stderr, flush=True)
        if settings.open:
            import webbrowser

            webbrowser.open(url)
        create_server(models, settings.prompt).run(sockets=[listener])


def check_libraries() -> None:
    """Raises ValueError if the libraries of the server are not installed."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f'the page needs {" and ".join(missing)}; pip install "tril[app]"')


def listen(port: int) -> socket.socket:
    """A listening socket of the loopback interface.

    Raises:
        OSError: the port is in use, or needs more rights.
    """
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # strerror of create_server is longer
        raise OSError(
            f"cannot listen on port={port}: {reason}; choose another port, or port=0 for any free one"
        ) from error


if __name__ == "__main__":
    main()
