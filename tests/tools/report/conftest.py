"""Reports whose plots are pictures, unless a test asks for `plotly`: then whether it is installed changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_lab.tools.report import interactive


@pytest.fixture(autouse=True)
def no_plotly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if "plotly" not in request.fixturenames:
        monkeypatch.setattr(interactive, "library", lambda: None)
    yield


@pytest.fixture
def plotly() -> Path:
    """The file of plotly.js."""
    file = interactive.library()
    if file is None:
        pytest.skip("not run: needs the package plotly (the extra report)")
    return file
