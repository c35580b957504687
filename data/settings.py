"""Settings: how a field is declared, and one wording for the values that pydantic refuses.

Every group of settings is a frozen pydantic dataclass in strict mode. A field declares its type, default, help and
limits once; the command line, `--help` and the checks follow from it:

    @dataclass(frozen=True, config=strict_settings("model"))
    class GPTConfig:
        dim: int = setting(192, "width of the model", ge=1)
"""

import json
import re
from typing import Any

from pydantic import ConfigDict, Field, ValidationError


def setting(default: Any, help: str, **limits: Any) -> Any:
    """A field of a group of settings.

    Args:
        default: `...` for a setting that has none.
        help: for `--help`, in one line.
        limits: of pydantic's `Field`, such as ge=1.
    """
    return Field(default, description=help, **limits)


def strict_settings(title: str = "") -> ConfigDict:
    """The configuration of a group of settings: no conversions, and no unknown names, which pydantic would ignore.

    Args:
        title: prefix of the keys on the command line, such as "model"; "": none.
    """
    return ConfigDict(strict=True, extra="forbid", title=title)


def explain(error: ValidationError) -> str:
    """One line that names each refused setting with its value and its limit, separated by semicolons."""
    return "; ".join(_explain_one(error.title, details) for details in error.errors(include_url=False))


def _explain_one(title: str, details) -> str:
    if details["type"] == "value_error":  # raised by a validator of ours, which writes the whole sentence
        return str(details["ctx"]["error"])
    has_prefix = title[:1].islower()  # pydantic replaces an empty title by the class name, which is CapWords
    name = ".".join([title] * has_prefix + [str(part) for part in details["loc"]])
    if details["type"] == "missing":
        return f"{name} is missing"
    if details["type"] == "unexpected_keyword_argument":
        return f"{name} is unknown"
    limit = re.sub(r"^\w+ should", "must", details["msg"])  # "Input should be ...", "String should have ..."
    is_type_error = details["type"].endswith("_type")  # then quotes tell the text '8' from the number 8
    return f"{name}={_typed(details['input'], quoted=is_type_error)} {limit}"


def _typed(value, *, quoted: bool) -> str:
    """The value as on the command line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value) if quoted else str(value)
