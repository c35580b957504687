"""The pytest plugin: the fixture `assert_causal`.

pytest loads it in every project of an environment that has Tril, so it imports nothing but pytest and the standard
library until a test uses the fixture.
"""

from collections.abc import Callable

import pytest


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # pytest rewrites the assertions in all modules of a distribution with a plugin. It takes them from the list of the
    # wheel's files, without the first folder where no module lies outside of it, so a user's own model.py would be
    # rewritten; torch.compile(fullgraph=True) then fails at assertions on tensors. pytest has no option against this.
    hook = getattr(pluginmanager, "rewrite_hook", None)
    getattr(hook, "_must_rewrite", set()).difference_update({"model", "data", "scripts", "train"})


@pytest.fixture
def assert_causal() -> Callable[..., None]:
    """A function that fails the test if an output of a model depends on the future: `assert_causal(model, ...)`.

    Arguments are those of `tril.model.causality.certify`; vocab_size and context_length are those of `model.config` by
    default.
    """

    from tril.model.causality import assert_causal

    return assert_causal
