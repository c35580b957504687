"""The attention maps of a text as one HTML page: pick a head and a token, see its weights and the next tokens."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from tril.model.atomic_files import atomic_path, without_nan

SMALLEST = 2.0**-24  # the smallest float16 above 0 (IEEE 754 binary16)


def write_page(
    path: str | Path,
    *,
    tokens: Sequence[str],
    maps: Tensor,
    probabilities: Sequence[Sequence[tuple[str, float]]],
    title: str,
    scores: Mapping[str, tuple[str, Tensor]] | None = None,
    earlier: Mapping[int, np.ndarray] | None = None,
) -> None:
    """Writes one file that needs neither network nor server.

    Weights are stored as float16: relative error at most 2^-11 from 2^-14 on, absolute error at most 2^-25 below that.
    0 stays exactly 0, and what is above 0 stays above 0 (at least 2^-24). The page takes 2.7 bytes per weight: 25 MB
    for 12 x 12 heads and 256 tokens, the largest size that it is made for.

    Args:
        tokens: the text of each of the T tokens; it may contain any characters.
        maps: (L, H, T, T), the weight by layer, head, query and key. All of it goes into the page, so that a weight
            above the diagonal shows.
        probabilities: for each token, the most probable next tokens with their probabilities, the most probable first.
            The actual next token is recognized by its text.
        title: heading of the page.
        scores: name -> what it means, and the score of each head (L, H), shown next to the name of the head.
        earlier: step -> maps of the same text at an earlier step, (L, H, T, T) codes of `records.read_maps`. A slider
            goes through them; each takes 1.3 bytes per weight.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    n_layers, n_heads, n_queries, n_keys = maps.shape
    assert n_queries == n_keys == len(tokens) == len(probabilities) and 0 not in maps.shape, maps.shape
    data = {
        "layers": n_layers,
        "heads": n_heads,
        "tokens": tokens,
        "probabilities": probabilities,
        "steps": list(earlier or {}),
        "scores": [
            {"name": name, "meaning": meaning, "values": values.tolist()}
            for name, (meaning, values) in (scores or {}).items()
        ],
    }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    # jinja2 writes JSON in ASCII without <, > and &, so no token can end its HTML element.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    codes = b"".join(each.tobytes() for each in (earlier or {}).values())
    texts = {"maps": to_float16(maps).tobytes(), "earlier": codes}
    encoded = {name: base64.b64encode(each).decode("ascii") for name, each in texts.items()}
    page = environment.get_template("attention.html").render(title=title, data=without_nan(data), **encoded)
    with atomic_path(path) as part:  # xmlcharrefreplace: for half of a surrogate pair
        part.write_text(page, encoding="utf-8", errors="xmlcharrefreplace", newline="\n")


def to_float16(maps: Tensor) -> np.ndarray:
    """Little-endian float16, 0 exactly where `maps` is 0."""
    exact = maps.detach().cpu().double().numpy()  # numpy has no bfloat16
    rounded = exact.astype("<f2")
    rounded[(rounded == 0) & (exact > 0)] = SMALLEST
    return rounded
