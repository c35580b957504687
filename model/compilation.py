"""How many times torch compiles one function."""

import torch

RECOMPILE_LIMIT = 256  # of one function; torch's own 8 is meant to find functions that recompile by mistake


def raise_recompile_limit() -> None:
    """For a process with several models or shapes: beyond its limit, torch silently runs the function uncompiled."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
