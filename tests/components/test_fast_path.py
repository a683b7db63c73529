from __future__ import annotations

import threading

import torch

from rl_lab.components.nn.fast_path import compiled_pointwise, compiling, fast, fast_path


def test_fast_path_and_compiling_are_separate_switches():
    calls = []

    @compiled_pointwise
    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return 2 * x

    with fast_path(True), compiling(False):
        assert fast()
        double(torch.ones(2))
    with compiling(True):
        assert not fast()
    with compiling(True), fast_path(False):
        assert not fast()
    assert calls == [False]  # never compiled: `fast_path` alone does not compile


def test_fast_path_holds_for_its_thread_and_is_restored():
    seen = []
    with fast_path(True):
        with fast_path(False):
            assert not fast()
        assert fast()
        thread = threading.Thread(target=lambda: seen.append(fast()))
        thread.start()
        thread.join()
    assert seen == [False] and not fast()
