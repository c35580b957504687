"""Fixtures of the causality tests."""

import functools

import pytest

from tril.model.causality import certificate
from tril.model.causality.canary import canary


@pytest.fixture
def short_canary(monkeypatch):
    """A canary test of few steps, for models that pass. test_certificate.py and test_mutants.py test the full one."""
    monkeypatch.setattr(certificate, "canary", functools.partial(canary, steps=5))
