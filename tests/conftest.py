"""Tests run on one torch thread and in float32: small nets, two workers, repeatable numbers."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

import pytest


@pytest.fixture(autouse=True)
def _away_from_the_checkout(tmp_path, monkeypatch):
    """Runs and reports of a test stay in its own folder."""
    monkeypatch.chdir(tmp_path)


def pytest_collection_modifyitems(items):
    """What needs a GPU runs where one is found, and is listed as not run where not."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="not run: needs a CUDA device"))
