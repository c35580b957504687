"""Fixtures of the tests of sweeps."""

import pytest

from tril.scripts.ablation import figures


@pytest.fixture
def drawn(monkeypatch):
    """File name -> figure of all pictures. They are not saved, which takes a second each."""
    figures_by_name = {}
    monkeypatch.setattr(figures, "save", lambda figure, path: figures_by_name.__setitem__(path.name, figure))
    return figures_by_name
