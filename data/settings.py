"""Settings: how a field is declared, how a group is built from plain values, and one wording for what is refused.

Every group of settings is a frozen pydantic dataclass in strict mode. A field declares its type, default, help, limits
and the settings that it depends on, once; the command line, `--help` and the checks follow from it:

    @dataclass(frozen=True, config=strict_settings("model"))
    class GPTConfig:
        dim: int = setting(192, "width of the model", ge=1)
        rope_base: float = setting(1e4, "base of the rotation frequencies", needs="pos=rope", gt=0)
"""

import difflib
import functools
import json
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

MISSING = "???"  # Hydra's value of a setting without a default


def setting(
    default: Any, help: str, *, common: bool = False, needs: str | None = None, escapes: bool = False, **limits: Any
) -> Any:
    """A field of a group of settings.

    Args:
        default: `...` for a setting that has none.
        help: for `--help`, in one line.
        common: many people change it, so that `--help` lists it; `--help=all` lists every setting.
        needs: the value of another setting of the group without which this one has no effect: "kind=muon",
            "kind=file|hub", or "clip" alone, which must not be null, false or 0.
        escapes: a text in which the command line has \\n for a line end, see `scripts.cli.app.unescaped`.
        limits: of pydantic's `Field`, such as ge=1.
    """
    extra = {"common": common, "needs": needs, "escapes": escapes}
    return Field(default, description=help, json_schema_extra=extra, **limits)  # pyright: ignore


def group(kind: type, help: str = "") -> Any:
    """A field that holds a group of settings, which is not built before it is needed."""
    return Field(default_factory=kind, description=help)


def strict_settings(title: str = "") -> ConfigDict:
    """The configuration of a group of settings: no conversions, and no unknown names, which pydantic would ignore.

    Args:
        title: prefix of the keys on the command line, such as "model"; "": none.
    """
    return ConfigDict(strict=True, extra="forbid", title=title, defer_build=True)  # --help needs no validators


def declared(group: type, prefix: str = "") -> dict[str, FieldInfo]:
    """The settings of a group by their dotted keys on the command line, those of groups within it included."""
    found = {}
    for name, field in group.__pydantic_fields__.items():
        key = f"{prefix}.{name}" if prefix else name
        inner = group_of(field)
        found |= {key: field} if inner is None else declared(inner, key)
    return found


def extra_of(field: FieldInfo) -> dict[str, Any]:
    """The values of `common`, `needs` and `escapes`, see `setting`; {} for a field without them."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def defaults(group: type) -> dict[str, Any]:
    """The defaults of a group as nested plain values; MISSING for a setting that has none."""
    values = {}
    for name, field in group.__pydantic_fields__.items():
        value = field.get_default(call_default_factory=True)
        values[name] = MISSING if value is PydanticUndefined else to_jsonable_python(value)
    return values


def build(group: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """The settings of a group from nested plain values.

    Raises:
        ValueError: an unknown key, with the nearest valid one, or values that the group refuses.
    """
    fields = group.__pydantic_fields__
    built, start = {}, f"{prefix}." if prefix else ""
    for name, value in values.items():
        key = f"{start}{name}"
        if name not in fields:
            raise ValueError(f"there is no setting {key}{nearest(str(name), fields, start)}")
        inner = group_of(fields[name])
        if inner is not None and isinstance(value, Mapping):
            value = build(inner, value, key)
        elif isinstance(value, float) and value.is_integer() and float not in parts_of(fields[name].annotation):
            value = int(value)  # 1e3
        built[name] = value
    return group(**built)


def without_effect(config: Any, prefix: str = "") -> dict[str, str]:
    """The settings that have no effect with the other values of their group: dotted keys, and the need of each."""
    values, found = flatten(to_jsonable_python(config)), {}
    for key, field in declared(type(config)).items():
        if key in values and (need := extra_of(field).get("needs")):
            name, equals, choices = need.partition("=")
            value = values[".".join([*key.split(".")[:-1], name])]
            if not (typed(value) in choices.split("|") if equals else value):
                found[f"{prefix}.{key}" if prefix else key] = need
    return found


def canonical(config: Any) -> Any:
    """The same settings with those that have no effect at their defaults, so that equal runs have equal settings."""
    kind, unused = type(config), without_effect(config)
    values, default = flatten(to_jsonable_python(config)), flatten(defaults(kind))
    return build(kind, unflatten({key: default[key] if key in unused else value for key, value in values.items()}))


def group_of(field: FieldInfo) -> type | None:
    """The group of settings that a field holds, perhaps as one of the alternatives with None; None: a plain value."""
    return next((part for part in parts_of(field.annotation) if hasattr(part, "__pydantic_fields__")), None)


def parts_of(annotation: Any) -> Iterator[Any]:
    """The classes in an annotation and the values of its `Literal`: list, str, NoneType of list[str] | None."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        yield from parts
        return
    if origin not in (typing.Union, types.UnionType, typing.Annotated):
        yield origin or annotation
    for part in parts[:1] if origin is typing.Annotated else parts:
        if part is not ...:
            yield from parts_of(part)


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}. An empty mapping is kept."""
    flat = {}
    for key, value in tree.items():
        below = flatten(value) if isinstance(value, Mapping) and value else None
        flat |= {str(key): value} if below is None else {f"{key}.{name}": item for name, item in below.items()}
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, name = str(key).split(".")
        functools.reduce(lambda node, group: node.setdefault(group, {}), groups, tree)[name] = value
    return tree


def nearest(name: str, choices: Collection[str], prefix: str = "") -> str:
    """The end of an error message: the choice most similar to `name`, or all choices, each after `prefix`."""
    if close := difflib.get_close_matches(name, list(choices), n=1):
        return f"; did you mean {prefix}{close[0]}?"
    return f"; choose one of {', '.join(prefix + key for key in sorted(choices))}"


def explain(error: ValidationError) -> str:
    """One line that names each refused setting with its value and its limit, separated by semicolons."""
    return "; ".join(_explain_one(error.title, details) for details in error.errors(include_url=False))


def _explain_one(title: str, details) -> str:
    if details["type"] == "value_error":  # raised by a validator of ours, which writes the whole sentence
        return str(details["ctx"]["error"])
    has_prefix = title[:1].islower()  # pydantic replaces an empty title by the class name, which is CapWords
    name = ".".join([title] * has_prefix + [str(part) for part in details["loc"]])
    if details["type"] == "missing":
        group, _, last = name.rpartition(".")  # the last is a number in a list
        return f"{group}={typed(details['input'])} needs more values" if last.isdecimal() else f"{name} is missing"
    kind = f"a group of settings; change one, such as {name}.KEY=VALUE"
    message = re.sub(r"an instance of \w+Config", kind, details["msg"].replace(" after validation", ""))
    limit = re.sub(r"^\w+ should", "must", message)  # "Input should be ...", "String should have ..."
    if details["type"] == "literal_error":  # as on the command line, and not as in Python
        limit = limit.replace("'", "").replace("True", "true").replace("False", "false")
    is_type_error = details["type"].endswith("_type")  # then quotes tell the text '8' from the number 8
    return f"{name}={one_line(typed(details['input'], quoted=is_type_error))} {limit}"


def typed(value: Any, *, quoted: bool = False) -> str:
    """The value as on the command line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(typed(each, quoted=quoted) for each in value)}]"
    return repr(value) if quoted else str(value)


def printable(text: object, keep: str = "") -> str:
    """The text with escapes for line ends, control characters and bytes that are not UTF-8, but for those in `keep`."""
    return "".join(x if x.isprintable() or x in keep else x.encode("unicode_escape").decode("ascii") for x in str(text))


def one_line(error: object) -> str:
    """A text, or the message of a library's error, in at most 600 characters without line breaks."""
    text = str(error).strip() or (type(error).__name__ if isinstance(error, BaseException) else "")
    text = text if len(text) <= 600 else f"{text[:300]} ... {text[-295:]}"
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
