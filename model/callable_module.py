"""A module that can be called, because its main function has the same name and an import may give either."""

import sys
import types
from collections.abc import Callable


def make_callable(name: str, function: Callable) -> None:
    """Makes a call of the imported module `name` a call of `function`, with its signature and docstring."""

    class CallableModule(types.ModuleType):
        __call__ = staticmethod(function)

    sys.modules[name].__class__ = CallableModule
