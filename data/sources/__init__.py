"""Text sources. A new one is a file with its class, see `base.Source`, and an entry here."""

from tril.data.sources.files import Files, SingleText
from tril.data.sources.hub import Hub
from tril.data.sources.prose import Prose
from tril.data.sources.stdlib import StandardLibrary

SOURCES = {"stdlib": StandardLibrary, "prose": Prose, "shakespeare": SingleText, "files": Files, "hub": Hub}
