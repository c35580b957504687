"""The chat template of a folder of Hugging Face transformers."""

import json
from pathlib import Path
from typing import Any

from tril.model.interop.hf_folder import TOKENIZER_CONFIG, read_json

FILE = "chat_template.jinja"
NAME = "default"  # of several


def chat_template(folder: Path) -> str | None:
    """The Jinja template of a folder, which begins with the special tokens that it names; None: the folder has none.

    chat_template.jinja goes before tokenizer_config.json, as in transformers.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged.
    """
    settings = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    if (folder / FILE).is_file():
        try:
            template: Any = (folder / FILE).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder / FILE} is not UTF-8 ({error.reason}); copy the folder again") from error
    else:
        template = settings.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get(NAME)
    if template is None:
        return None
    if not isinstance(template, str):
        where = folder / TOKENIZER_CONFIG
        raise ValueError(f"{where}: chat_template must be text, not {type(template).__name__}; copy the folder again")
    return "".join(_special_tokens(settings)) + template


def _special_tokens(settings: dict[str, Any]) -> list[str]:
    """Jinja statements that set bos_token, eos_token and the like to their texts."""
    lines = []
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            lines.append(f"{{% set {name} = {json.dumps(token, ensure_ascii=False)} %}}")
    return lines
