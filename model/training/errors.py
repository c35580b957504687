"""Errors of a run that only the model and its tokenizer can show, before the first step."""


class RunRefused(ValueError):
    """A setting that only the model and its tokenizer can show to be wrong, before the first step."""
