"""Text sources. A new one is a file with its class, see `base.Source`, and an entry here."""

from collections.abc import Mapping
from typing import Any

from tril.data.settings import build
from tril.data.sources.base import Source
from tril.data.sources.files import Files
from tril.data.sources.hub import Hub
from tril.data.sources.prose import Prose
from tril.data.sources.shakespeare import Shakespeare
from tril.data.sources.stdlib import StandardLibrary

SOURCES: dict[str, type[Source]] = {"stdlib": StandardLibrary, "prose": Prose, "shakespeare": Shakespeare}
SOURCES |= {"files": Files, "hub": Hub}


def parse(mapping: Mapping[str, Any]) -> Source:
    """Checks plain values below `data:`, of which `source` names the source, and builds the settings from them.

    Raises:
        ValueError: an unknown key, for which the message has the nearest valid one; a missing key; or an invalid value.
        OSError: a file or folder that does not exist.
    """
    kind = SOURCES.get(str(mapping.get("source")))  # a list has no hash
    if kind is None:
        raise ValueError(f"data.source={mapping.get('source')} must be one of {', '.join(SOURCES)}")
    return build(kind, {key: value for key, value in mapping.items() if key != "source"}, "data")
