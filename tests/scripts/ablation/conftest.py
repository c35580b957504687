"""Fixtures of the tests of sweeps."""

import pytest


@pytest.fixture
def drawn(monkeypatch):
    """File name -> figure of all pictures. They are not saved, which takes a second each."""
    from matplotlib.figure import Figure

    figures_by_name = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures_by_name.__setitem__(path.name, figure))
    return figures_by_name
