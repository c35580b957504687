"""The setting `dir` of the scripts that read a sweep."""

from typing import Annotated

from pydantic import BeforeValidator


def _require(value: object) -> object:
    if value is None:
        raise ValueError("dir is missing; name the folder of a sweep, dir=multirun/DATE/TIME, or dir=latest")
    return value


SweepDir = Annotated[str, BeforeValidator(_require)]
