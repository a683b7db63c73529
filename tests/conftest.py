"""Tests run on one torch thread and in float32: small networks, two workers, deterministic results."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
# The key that signs the configs of runs: not that of the user who runs the tests.
os.environ["RL_LAB_KEY_FILE"] = os.path.join(tempfile.mkdtemp(prefix="rl_lab_tests_"), "run.key")

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture(autouse=True)
def _away_from_the_checkout(tmp_path, monkeypatch):
    """Run every test in its own folder; what a command does to the import path ends with the test.

    The checkout is first on that path, also after a fixture that ran a command: a package that the tests install has
    a module `tests`, too.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [ROOT, *(path for path in sys.path if path != ROOT)])
    monkeypatch.setenv("PYTHONSAFEPATH", "")


def pytest_collection_modifyitems(items):
    """Skip tests, visibly, that need a GPU or Triton's interpreter where there is none."""
    needs = {
        "gpu": (has_cuda, "a CUDA device"),
        "extras": (has_interpreter, "Triton's interpreter (make test-extras)"),
    }
    for marker, (found, what) in needs.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not found():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"not run: needs {what}"))


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def has_interpreter() -> bool:
    return importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
