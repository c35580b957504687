"""Text sources. A new one is a file here with its class, see `base.Source`, and a file configs/data/NAME.yaml."""

import importlib
import pkgutil

from tril.data.sources.base import Source

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
SOURCES: dict[str, type] = {source.name: source for source in Source.__subclasses__()}
