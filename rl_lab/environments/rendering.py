"""What MuJoCo draws with, on this machine and in this process."""

from __future__ import annotations

import contextlib
import ctypes.util
import multiprocessing
import os
import sys

from rl_lab.errors import LabError


def find_renderer() -> str:
    """What this machine can draw with: EGL (a GPU, or Mesa in software), else OSMesa, else "disable".

    "" leaves the choice to MuJoCo: there is a screen, or another system than Linux.
    """
    if ctypes.util.find_library("EGL"):
        return "egl"
    if ctypes.util.find_library("OSMesa"):
        return "osmesa"
    return "disable" if sys.platform.startswith("linux") and not os.environ.get("DISPLAY") else ""


def choose_renderer(needed: bool) -> str:
    """Settle MUJOCO_GL before dm_control reads it, which it does once.

    A choice that the user made stays. LabError when frames are `needed` and nothing can draw them.
    """
    chosen = os.environ.get("MUJOCO_GL", "").lower()
    if not chosen and "dm_control._render" not in sys.modules:
        chosen = find_renderer()
        if chosen:
            os.environ["MUJOCO_GL"] = chosen
    if needed and chosen in ("disable", "off", "false", "0"):
        raise LabError(
            "MuJoCo has nothing to draw frames with: install EGL (apt install libegl1 libgl1-mesa-dri, or a GPU's "
            "driver) or OSMesa (apt install libosmesa6) and unset MUJOCO_GL, or use observe=proprio"
        )
    _load_triton_before_mesa()
    return chosen


def _load_triton_before_mesa() -> None:
    """Mesa brings an LLVM, and so does Triton: loaded after Mesa's, Triton's crashes the process; before it, both work.

    torch loads Triton where it is installed, at the latest with the first optimizer. Workers never load torch, and stay
    small.
    """
    if "torch" in sys.modules or multiprocessing.parent_process() is None:
        with contextlib.suppress(ImportError):
            import triton  # noqa: F401
