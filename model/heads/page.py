"""The attention maps of a text as one HTML page: pick a head, point at a token, see what it attends to and what may follow."""

import base64
import html
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

TEMPLATE = Path(__file__).with_name("attention.html")
SMALLEST = 2.0**-24  # of the float16 above 0 (IEEE 754 binary16)


def write_page(
    path: str | Path,
    *,
    tokens: Sequence[str],
    maps: Tensor,
    probabilities: Sequence[Sequence[tuple[str, float]]],
    title: str,
) -> None:
    """One file that needs neither network nor server.

    tokens         the text of each of the T tokens; anything, it is shown as text
    maps           (L, H, T, T): weight of layer, head, query, key. All of it goes into the page, so that a weight above the diagonal shows
    probabilities  for each t the most probable next tokens after token t with their probabilities, most probable first. The one that does
                   follow is recognised by its text
    title          heading of the page

    Weights are kept as float16: relative error at most 2^-11 from 2^-14 on, absolute error at most 2^-25 below that. 0 stays exactly 0,
    and what is above 0 stays above 0 (at least 2^-24). The page takes 2.7 bytes for each of the L*H*T*T weights: 25 MB for 12 x 12 heads
    and 256 tokens, the largest that it is made for. A browser reads them all once, while the page opens.

    Raises ValueError for shapes that do not fit each other.
    """
    sizes = tuple(maps.shape)
    if len(sizes) != 4 or 0 in sizes or not sizes[2] == sizes[3] == len(tokens) == len(probabilities):
        raise ValueError(
            f"{len(tokens)} tokens, maps {sizes} and probabilities after {len(probabilities)} tokens do not fit each other; "
            "maps must be (L, H, T, T), none of them 0, with T tokens and probabilities after each of them"
        )
    data = {
        "layers": sizes[0],
        "heads": sizes[1],
        "tokens": list(tokens),
        "probabilities": [[(token, _for_json(p)) for token, p in after] for after in probabilities],
    }
    parts = {
        "title": html.escape(title),
        "data": _json(data),
        "maps": base64.b64encode(_halves(maps).tobytes()).decode("ascii"),
    }
    template = TEMPLATE.read_text(encoding="utf-8")
    page = re.sub(
        r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template
    )  # in one pass, since a title may hold {{data}}
    Path(path).write_text(
        page, encoding="utf-8", errors="xmlcharrefreplace", newline="\n"
    )  # for half of a surrogate pair


def _halves(maps: Tensor) -> np.ndarray:
    """Little-endian float16, 0 exactly where `maps` is 0."""
    exact = maps.detach().cpu().double().numpy()  # numpy has no bfloat16
    halves = exact.astype("<f2")
    halves[(halves == 0) & (exact > 0)] = SMALLEST
    return halves


def _json(data: dict) -> str:
    """JSON in ASCII without a character that means something to HTML, so that no text can end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _for_json(probability: float) -> float | None:
    """JSON knows no nan."""
    return float(probability) if math.isfinite(probability) else None
