"""Names of tests.contract.harness, until all tests import them from there."""

from tests.contract.harness import TINY, merged, train  # noqa: F401


def typed(*settings, base=TINY):
    return merged(base, *settings)


def train_typed(settings):
    return train(*settings, base=())
