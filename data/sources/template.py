"""Renders chat templates: Jinja templates as in tokenizer_config.json of Hugging Face transformers.

A template can come from somebody else, so it runs in jinja2's sandbox, as transformers runs it. The sandbox bounds
neither time nor memory: `python template.py` renders one in a process that has limits of both. It imports no other
module of Tril.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

SECONDS, MEMORY = 5, 1 << 30  # of that process
Messages = list[dict[str, str]]  # "role" and "content" each


def compile_template(text: str) -> Callable[..., str]:
    """A function (messages, eos, generation) -> text; `generation`: up to where the next answer begins.

    The environment is that of transformers: sandboxed, with the functions and the tag that published templates use.
    """
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks answers; their text stays the same."""

        tags = {"generation"}

        def parse(self, parser: Any) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    jinja.filters["tojson"] = to_json  # jinja2's own escapes for HTML
    jinja.globals |= {"raise_exception": raise_exception, "bos_token": "", "tools": None, "documents": None}
    template = jinja.from_string(text)
    return lambda messages, eos, generation=False: template.render(
        messages=messages, eos_token=eos, add_generation_prompt=generation
    )


@lru_cache
def within_limits(text: str) -> bool:
    """Whether a template is compiled, and renders or refuses two messages, within SECONDS and MEMORY."""
    command = [sys.executable, "-P", __file__]  # -P: not the modules of this folder
    try:
        done = subprocess.run(command, input=text.encode(), stderr=subprocess.DEVNULL, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


if __name__ == "__main__":
    with contextlib.suppress(ImportError):  # Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        compile_template(sys.stdin.buffer.read().decode())(
            [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning"}], "<eos>"
        )
    except MemoryError:
        sys.exit(1)
    except Exception:  # the process that trains reports what the template refuses
        pass
