"""Why a run does not start."""


class RunRefused(ValueError):
    """A setting turns out to be wrong with the built model and its tokenizer, before the first step."""
