"""Checks the JSON of the tokenizer of a checkpoint before the tokenizers library reads it.

The library allocates memory by the numbers in the file, panics on some of them, and drops characters that it does not
know without an error.
"""

import json
from typing import Any

from tokenizers import Tokenizer

MAX_CHARACTERS = 200_000_000  # the largest published tokenizers have 40 million


def check_tokenizer(text: str, n_rows: int) -> None:
    """Checks the output of `Tokenizer.to_str`.

    Args:
        n_rows: vocab_size of the model: ids must be smaller.

    Raises:
        ValueError: the text is not a tokenizer, or one that no model can be used with.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"its tokenizer has {len(text)} characters, and the limit is {MAX_CHARACTERS}")
    try:
        problem = _problem(json.loads(text), n_rows)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"its tokenizer cannot be read ({reason}); it is damaged, use another file") from error
    except RecursionError as error:
        raise ValueError("its tokenizer is nested too deeply; it is damaged, use another file") from error
    if problem:
        raise ValueError(problem)


def load_tokenizer(text: str, n_rows: int) -> Tokenizer:
    """The tokenizer of a text that `check_tokenizer` accepts.

    Raises:
        ValueError: as `check_tokenizer`, or the library cannot read it.
    """
    check_tokenizer(text, n_rows)
    try:
        return Tokenizer.from_str(text)
    except BaseException as error:  # the library raises plain Exceptions, and PanicException, which is not one
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"its tokenizer cannot be read ({error}); it is damaged, use another file") from error


def _problem(tokenizer: dict, n_rows: int) -> str | None:
    """What is wrong with a tokenizer. It fails on values of other types than in the files of the library."""
    model = tokenizer["model"]
    vocabulary = _vocabulary(model["vocab"])
    ids = [*vocabulary.values(), *(token["id"] for token in tokenizer.get("added_tokens") or [])]
    wrong = [i for i in ids if type(i) is not int or i < 0]
    if wrong or not ids:
        return f"its tokenizer has {f'the id {wrong[0]}' if wrong else 'no tokens'}; use another file"
    if len(set(vocabulary.values())) < len(vocabulary):
        return "its tokenizer has several tokens with the same id; use another file"
    if max(ids) >= n_rows:
        limit = f"the model's vocab_size={n_rows}"
        return f"the tokenizer's {max(ids) + 1} tokens exceed {limit}; use the tokenizer of the model's run"
    if model.get("dropout"):
        problem = f"BPE dropout ({model['dropout']}), so the same text has other tokens each time"
        return f"its tokenizer has {problem}; set dropout to null"
    if not _knows_all(tokenizer, model, vocabulary):
        return "its tokenizer has no unknown token, and leaves out characters that it lacks; set unk_token"
    # The library removes the prefix from the second part of a merge without looking at it, which can abort.
    prefix = model.get("continuing_subword_prefix")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or []]
    if prefix and not all(merge[1].startswith(prefix) for merge in merges):
        return f"its tokenizer has merges without the continuing_subword_prefix={prefix!r}; use another file"
    return None


def _vocabulary(vocabulary: Any) -> dict[str, Any]:
    """The ids by token. A unigram model lists tokens with their scores."""
    return vocabulary if isinstance(vocabulary, dict) else {entry[0]: i for i, entry in enumerate(vocabulary)}


def _knows_all(tokenizer: dict, model: dict, vocabulary: dict) -> bool:
    """Whether every character has a token: the unknown token, or those of its bytes."""
    if model.get("unk_token") in vocabulary or model.get("unk_id") is not None:
        return True
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    from tokenizers.pre_tokenizers import ByteLevel

    steps = [step for key in ("normalizer", "pre_tokenizer") for step in _steps(tokenizer.get(key))]
    is_byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    return is_byte_level and all(character in vocabulary for character in ByteLevel.alphabet())


def _steps(part: Any) -> list[dict]:
    """The steps of a normalizer or pre-tokenizer, those of sequences included."""
    if not isinstance(part, dict):
        return []
    inner = part.get("normalizers") or part.get("pretokenizers") or []
    return [part, *(step for item in inner for step in _steps(item))]
