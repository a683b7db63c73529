"""MuJoCo's rendering backend: set before import, and Triton imported before Mesa."""

import ctypes.util
import multiprocessing
import sys

import pytest

from rl_lab.environments import make_env
from rl_lab.environments.rendering import choose_renderer
from rl_lab.errors import LabError


@pytest.mark.parametrize(
    ("libraries", "chosen"), [({"EGL", "OSMesa"}, "egl"), ({"OSMesa"}, "osmesa"), (set(), "disable")]
)
def test_renderer_is_set_before_import(libraries, chosen, monkeypatch):
    pytest.importorskip("dm_control", reason="extra: dmc")
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: name if name in libraries else None)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.delitem(sys.modules, "dm_control._render", raising=False)
    assert choose_renderer(needed=False) == chosen
    if chosen == "disable":
        with pytest.raises(LabError, match="apt install libegl1") as caught:
            make_env("dmc/walker_walk", observe="vision", size=48)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("worker", "torch", "loaded"),
    [(False, True, True), (False, False, True), (True, True, True), (True, False, False)],
)
def test_triton_is_imported_before_mesa(worker, torch, loaded, monkeypatch, tmp_path):
    """After Mesa's LLVM, importing Triton (which torch does) ends the process with a segmentation fault."""
    (tmp_path / "triton.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object() if worker else None)
    with monkeypatch.context() as modules:
        modules.delitem(sys.modules, "triton", raising=False)
        if torch:
            modules.setitem(sys.modules, "torch", sys.modules.get("torch"))
        else:
            modules.delitem(sys.modules, "torch", raising=False)
        choose_renderer(needed=True)
        assert ("triton" in sys.modules) == loaded
        sys.modules.pop("triton", None)
