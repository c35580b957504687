"""The HTTP server of play.py: the page, the models, and one streamed answer per generation.

    GET  /           the page and the files that it needs
    GET  /models     JSON: the models and the prompt to start with
    POST /generate   JSON of `Generation` -> one line of JSON with the prompt's tokens, then one per new token

It answers programs of this computer only. Other pages in the same browser are refused: by the Host header, which a
rebound DNS name cannot fake, and by the Origin header, which browsers send with every POST of another page.
"""

import base64
import itertools
import json
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
from pydantic import Field

from tril.data.settings import build, printable, strict_settings
from tril.model.atomic_files import without_nan
from tril.scripts.cli.errors import message_of

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from tril.model.generation.language_model import LanguageModel
    from tril.model.heads.live import LiveToken

LOOPBACK = "127.0.0.1"
HOSTS = [LOOPBACK, "localhost"]
PAGE, SHARED = Path(__file__).parent / "page", Path(__file__).resolve().parents[2] / "model" / "heads"
FILES = {"/": PAGE / "play.html"}
FILES |= {f"/{name}": PAGE / name for name in ("play.css", "pane.js", "play.js")}
FILES |= {f"/{name}": SHARED / name for name in ("attention.css", "common.js")}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
MAX_PROMPT = 20_000  # characters
MAX_BODY = 1 << 20  # bytes of a request
SAMPLING = ("max_new_tokens", "seed", "temperature", "top_k", "top_p")


@pydantic.dataclasses.dataclass(frozen=True, config=strict_settings())
class Generation:
    """What the page asks for. `live_tokens` checks the values further.

    Attributes:
        model: number of the model, in the order of the command line.
        remove_heads: names of heads, such as "L0H3".
    """

    model: Annotated[int, Field(ge=0)]
    prompt: str
    max_new_tokens: Annotated[int, Field(ge=1, le=500)]
    temperature: Annotated[float, Field(ge=0, le=10)]
    top_k: int | None
    top_p: float | None
    seed: Annotated[int, Field(ge=0, lt=2**53)]  # JavaScript holds these integers exactly
    remove_heads: list[str]


@dataclass
class PlayModel:
    """A model of the page. Each step runs under `lock`, since hooks on the model capture its attention."""

    name: str
    lm: "LanguageModel"
    lock: threading.Lock = field(default_factory=threading.Lock)

    def describe(self) -> dict[str, Any]:
        config, n_parameters = self.lm.config, self.lm.model.n_parameters()
        sizes = {"layers": config.n_layers, "heads": config.n_heads, "context": config.context_length}
        return {"name": self.name, "parameters": n_parameters, **sizes}

    def start(self, settings: Generation) -> Iterator[dict[str, Any]]:
        """The objects that are the lines of an answer. Settings are checked by this call, before the first of them.

        Raises:
            ValueError: a value is out of range, or the prompt contains characters that the tokenizer does not know.
        """
        from tril.model.heads.ablation import head_gate
        from tril.model.heads.live import live_tokens, prompt_tokens

        lm = self.lm
        gate = head_gate(lm.config, settings.remove_heads) if settings.remove_heads else None
        options = {name: getattr(settings, name) for name in SAMPLING}
        tokens = live_tokens(lm, settings.prompt, head_gate=gate, **options)
        given = [{"name": name, "text": text} for name, text in prompt_tokens(lm, settings.prompt)]

        def lines() -> Iterator[dict[str, Any]]:
            yield {"prompt": given}
            while True:
                with self.lock:
                    token = next(tokens, None)
                if token is None:
                    return
                yield encoded(token, ended=token.id == lm.eot_id)

        return lines()


def encoded(token: "LiveToken", *, ended: bool) -> dict[str, Any]:
    """The token for the page: weights as base64 of little-endian float16, NaN as null."""
    from tril.model.heads.page import to_float16

    return {
        "id": token.id,
        "name": token.name,
        "text": token.text,
        "ended": ended,
        "candidates": [without_nan(candidate._asdict()) for candidate in token.candidates],
        "attention": base64.b64encode(to_float16(token.attention).tobytes()).decode("ascii"),
        "dropped": token.n_dropped,
    }


def create_app(
    models: Sequence[PlayModel], prompt: str = "", stopping: Callable[[], bool] = lambda: False
) -> "Starlette":
    """The application.

    Args:
        prompt: the text that the page starts with.
        stopping: whether the server ends; then all answers end.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import FileResponse, JSONResponse, StreamingResponse
    from starlette.routing import Route

    async def describe(request: "Request") -> "Response":
        return JSONResponse({"models": [model.describe() for model in models], "prompt": prompt}, headers=HEADERS)

    async def generate(request: "Request") -> "Response":
        try:
            check_origin(request)
            settings = build(Generation, dict(json.loads(await read_body(request))))
            if settings.model >= len(models):
                raise ValueError(f"model={settings.model} must be below the number of models, {len(models)}")
            if (n := len(settings.prompt)) > MAX_PROMPT:
                raise ValueError(f"the prompt has {n} characters; use at most {MAX_PROMPT}")
            answer = models[settings.model].start(settings)
        except (ValueError, TypeError) as error:
            return JSONResponse({"error": printable(message_of(error))}, status_code=400, headers=HEADERS)
        # The generator runs in a thread, step by step. When the page is gone, no further step is asked for.
        running = itertools.takewhile(lambda line: not stopping(), answer)
        lines = (json.dumps(line, allow_nan=False) + "\n" for line in running)
        return StreamingResponse(lines, media_type="application/x-ndjson", headers=HEADERS)

    routes = [Route("/models", describe), Route("/generate", generate, methods=["POST"])]
    for path, file in FILES.items():
        routes.append(Route(path, lambda request, file=file: FileResponse(file, headers=HEADERS)))
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)])


async def read_body(request: "Request") -> bytes:
    """The body of a request. Raises ValueError if it is larger than MAX_BODY, without reading the rest."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise ValueError(f"the request has more than {MAX_BODY} bytes; send less")
    return body


def check_origin(request: "Request") -> None:
    """Raises ValueError if another page sent the request, or a form could have."""
    origin, host = request.headers.get("origin"), request.headers["host"]
    if origin not in (None, f"http://{host}"):
        raise ValueError(f"origin {origin} is another page; open http://{host}/")
    if request.headers.get("content-type") != "application/json":
        raise ValueError("the request must have the content type application/json")


def create_server(models: Sequence[PlayModel], prompt: str = "") -> "uvicorn.Server":
    """A server whose `run(sockets=[...])` ends with Ctrl-C."""
    import uvicorn

    app = create_app(models, prompt, stopping=lambda: server.should_exit)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="error", lifespan="off"))
    return server


def listen(port: int) -> socket.socket:
    """A listening socket of the loopback interface. Raises OSError if the port is in use, or needs more rights."""
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        remedy = "choose another port, or port=0 for any free one"
        raise OSError(f"cannot listen on port={port}: {error.strerror}; {remedy}") from error


def serve(listener: socket.socket, models: Sequence[PlayModel], prompt: str, *, browser: bool) -> None:
    """Serves the page on a listening socket until Ctrl-C. Its address goes to stdout, and to a browser."""
    url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/"
    print(url, flush=True)
    if browser:
        webbrowser.open(url)
    create_server(models, prompt).run(sockets=[listener])
