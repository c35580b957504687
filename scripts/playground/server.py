"""The HTTP server of play.py: the page, the models, and one streamed answer per generation.

    GET  /           the page and the files that it needs
    GET  /models     JSON: the models, and the prompt and the repetition penalty to start with
    POST /generate   JSON of `Generation` -> one line of JSON with the prompt's tokens, then one per new token

It answers programs of this computer only. Other pages in the same browser are refused: by the Host header, which a
rebound DNS name cannot fake, and by the content type, which a browser sends for another page only if the server agrees.
"""

import base64
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
from pydantic import Field

from tril.data.settings import build, printable, strict_settings
from tril.model.atomic_files import without_nan
from tril.scripts.cli.errors import message_of

if TYPE_CHECKING:
    import uvicorn
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
    repetition_penalty: Annotated[float, Field(gt=0, le=10)]
    seed: Annotated[int, Field(ge=0, lt=2**53)]  # JavaScript holds these integers exactly
    remove_heads: list[str]


@dataclass(frozen=True)
class PlayModel:
    """A model of the page."""

    name: str
    lm: "LanguageModel"

    def describe(self) -> dict[str, Any]:
        config, n_parameters = self.lm.config, self.lm.model.n_parameters()
        sizes = {"layers": config.n_layers, "heads": config.n_heads, "context": config.context_length}
        return {"name": self.name, "parameters": n_parameters, **sizes}

    def start(self, settings: Generation) -> "tuple[list[dict[str, str]], Iterator[LiveToken]]":
        """The tokens of the prompt, and the new ones.

        Raises:
            ValueError: a value is out of range, or the prompt contains characters that the tokenizer does not know.
        """
        from tril.model.heads.ablation import head_gate
        from tril.model.heads.live import live_tokens, prompt_tokens

        gate = head_gate(self.lm.config, settings.remove_heads) if settings.remove_heads else None
        options = {key: value for key, value in vars(settings).items() if key not in ("model", "remove_heads")}
        tokens = live_tokens(self.lm, head_gate=gate, **options)
        return [{"name": name, "text": text} for name, text in prompt_tokens(self.lm, settings.prompt)], tokens

    def encoded(self, token: "LiveToken") -> dict[str, Any]:
        """A token for the page: weights as base64 of little-endian float16, NaN as null."""
        from tril.model.heads.page import to_float16

        candidates = [without_nan(candidate._asdict()) for candidate in token.candidates]
        attention = base64.b64encode(to_float16(token.attention).tobytes()).decode("ascii")
        shown = {"candidates": candidates, "attention": attention, "ended": token.id == self.lm.eot_id}
        return token._asdict() | shown


def create_server(models: Sequence[PlayModel], prompt: str = "") -> "uvicorn.Server":
    """A server whose `run(sockets=[...])` ends with Ctrl-C, and all answers with it.

    Args:
        prompt: the text that the page starts with.
    """
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import FileResponse, JSONResponse, StreamingResponse
    from starlette.routing import Route

    lock = threading.Lock()  # of each step, since hooks on a model capture its attention

    async def describe(request: "Request") -> "Response":
        first = {"prompt": prompt, "repetition_penalty": models[0].lm.penalty}
        return JSONResponse({"models": [model.describe() for model in models], **first}, headers=HEADERS)

    async def generate(request: "Request") -> "Response":
        try:
            if request.headers.get("content-type") != "application/json":
                raise ValueError("the request must have the content type application/json")
            settings = build(Generation, dict(await request.json()))
            if settings.model >= len(models):
                raise ValueError(f"model={settings.model} must be below the number of models, {len(models)}")
            model = models[settings.model]
            given, tokens = model.start(settings)
        except (ValueError, TypeError, RecursionError) as error:
            return JSONResponse({"error": printable(message_of(error))}, status_code=400, headers=HEADERS)

        def lines() -> Iterator[str]:
            """Runs in a thread, step by step. When the page is gone, no further step is asked for."""
            line: dict[str, Any] = {"prompt": given}
            while not server.should_exit:
                yield json.dumps(line, allow_nan=False) + "\n"
                with lock:
                    token = next(tokens, None)
                if token is None:
                    return
                line = model.encoded(token)

        return StreamingResponse(lines(), media_type="application/x-ndjson", headers=HEADERS)

    routes = [Route("/models", describe), Route("/generate", generate, methods=["POST"])]
    for path, file in FILES.items():
        routes.append(Route(path, lambda request, file=file: FileResponse(file, headers=HEADERS)))
    app = Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)])
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="error", lifespan="off"))
    return server


def listen(port: int) -> socket.socket:
    """A listening socket of the loopback interface. Raises OSError if the port is in use, or needs more rights."""
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        remedy = "choose another port, or port=0 for any free one"
        raise OSError(f"cannot listen on port={port}: {error.strerror}; {remedy}") from error
