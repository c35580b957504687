"""Why a run does not start, or ends early. Each message is one line."""


class RunRefused(ValueError):
    """A setting turns out to be wrong with the built model and its tokenizer, before the first step."""


class NonFiniteError(ValueError):
    """The loss or a gradient of a step, or a validation loss, is not a finite number. The weights are those before."""
