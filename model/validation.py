"""One wording for the settings that pydantic refuses.

Every group of settings is a frozen pydantic dataclass in strict mode, so that types, limits and valid values stand at
the field. Its `title` is the prefix of its keys on the command line:

    @dataclass(frozen=True, config=ConfigDict(strict=True, title="model"))
    class GPTConfig:
        dim: Annotated[int, Field(ge=1)] = 192
"""

import json

from pydantic import ValidationError


def explain(error: ValidationError) -> str:
    """One line that names each refused setting with its value and its limit, separated by semicolons."""
    return "; ".join(_explain_one(error.title, details) for details in error.errors(include_url=False))


def _explain_one(title: str, details) -> str:
    if details["type"] == "value_error":  # raised by a validator of ours, which writes the whole sentence
        return str(details["ctx"]["error"])
    name = ".".join([title, *map(str, details["loc"])]) if title else ".".join(map(str, details["loc"]))
    if details["type"] == "missing":
        return f"{name} is missing"
    return f"{name}={_shown(details['input'])} {details['msg'].replace('Input should', 'must')}"


def _shown(value) -> str:
    """The value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)
