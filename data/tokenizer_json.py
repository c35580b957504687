"""Tokenizer files of others, checked before and after the `tokenizers` library reads them.

The library allocates memory up to the largest id, raises bare Exceptions, lets its panics through, and drops characters
that it cannot encode.
"""

import json
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

MAX_BYTES = 1 << 27  # the largest published ones have about 35 MB
MAX_IDS = 1 << 21  # XLM-V has 901,629
PROBE = "The caf\u00e9 \u6f22\U0001f469\n\x00 1"
ABSENT_BYTES = {0xC0, 0xC1, *range(0xF5, 0x100)}  # of no UTF-8 text
TEXT_BYTES = [f"<0x{byte:02X}>" for byte in range(256) if byte not in ABSENT_BYTES]  # the tokens of "byte_fallback"
# of "ByteLevel", which writes the absent bytes as the characters of the same number
TEXT_CHARACTERS = set(pre_tokenizers.ByteLevel.alphabet()) - set(map(chr, ABSENT_BYTES))


def read_tokenizer(content: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json.

    Raises:
        ValueError: the library cannot read it, or its ids are too large or not unique.
    """
    try:
        state = json.loads(content)
        vocab, added = state["model"]["vocab"], state["added_tokens"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        _check_ids([*ids], [token["id"] for token in added])
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("it has no model with a vocabulary, or no added_tokens") from error
    return guarded(Tokenizer.from_str, content)


def _check_ids(ids: list[Any], added: list[Any]) -> None:
    for token_id in ids + added:
        if not isinstance(token_id, int) or not 0 <= token_id < MAX_IDS:
            raise ValueError(f"the id {token_id!r} must be an integer from 0 to {MAX_IDS - 1}")
    if len(set(ids)) < len(ids):
        raise ValueError("several tokens of its vocabulary have the same id")


def defect(tokenizer: Tokenizer, content: str) -> str | None:
    """Why the ids of `tokenizer`, which was read from `content`, would not represent a text, and the remedy."""
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        return f"model.dropout={dropout:g} makes its ids random; set it to null in the file"
    if not _has_unknown(tokenizer, content):
        return "it has no unknown token, so characters that it lacks would vanish; set model.unk_token in the file"
    try:
        guarded(lambda: tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=False).ids))
    except ValueError as error:
        return f"it cannot encode {PROBE!r} ({error}); choose another one"
    return None


def _has_unknown(tokenizer: Tokenizer, content: str) -> bool:
    """Whether each character gets an id: that of the unknown token, or those of its bytes."""
    model: Any = tokenizer.model
    if getattr(model, "byte_fallback", False) and all(model.token_to_id(token) is not None for token in TEXT_BYTES):
        return True
    state = json.loads(content)
    if isinstance(model, models.Unigram):
        return state["model"].get("unk_id") is not None
    if model.unk_token is not None:
        return model.token_to_id(model.unk_token) is not None
    is_byte_level = any(_contains_byte_level(state.get(part)) for part in ("normalizer", "pre_tokenizer"))
    return is_byte_level and all(model.token_to_id(character) is not None for character in TEXT_CHARACTERS)


def _contains_byte_level(part: Any) -> bool:
    """Whether a normalizer or pre-tokenizer is of the type ByteLevel, or a sequence with one."""
    if not isinstance(part, dict):
        return False
    parts = part.get("normalizers") or part.get("pretokenizers") or ()
    return part.get("type") == "ByteLevel" or any(map(_contains_byte_level, parts))


def guarded(task: Any, *arguments: Any) -> Any:
    """The result of a call of the library, whose errors become a ValueError of one line."""
    try:
        return task(*arguments)
    except BaseException as error:  # a panic of its Rust code is no Exception
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError((str(error).strip() or type(error).__name__).splitlines()[0]) from error
