"""Signals: acknowledged immediately, a stop after the current action, and an immediate stop on a second Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from rl_lab.utils.stopping import stop_on_signals


def test_signal_is_acknowledged_once(capfd):
    asked: list[int] = []
    with stop_on_signals(lambda: asked.append(1)):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert len(asked) == 2
    assert capfd.readouterr().err.count("SIGTERM: finishing") == 1


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_sighup_and_sigusr1_request_stop(number: signal.Signals, capfd):
    asked: list[int] = []
    assert signal.getsignal(number) is signal.SIG_DFL
    with stop_on_signals(lambda: asked.append(1)):
        for _ in range(3):  # a shell and the kernel may both send it: several do not stop immediately
            os.kill(os.getpid(), number)
    assert len(asked) == 3
    assert capfd.readouterr().err.count(f"{number.name}: finishing") == 1
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_existing_handlers_are_kept(number: signal.Signals):
    asked: list[str] = []
    for handler in (signal.SIG_IGN, lambda *_: asked.append("program")):
        before = signal.signal(number, handler)
        try:
            with stop_on_signals(lambda: asked.append("run")):
                os.kill(os.getpid(), number)
            assert signal.getsignal(number) is handler
        finally:
            signal.signal(number, before)
    assert asked == ["program"]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_second_interrupt_stops_immediately(first: signal.Signals, capfd):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop_on_signals(lambda: None):
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second one should have ended this")
    assert signal.getsignal(signal.SIGINT) is before
    assert ("a second Ctrl-C stops immediately" in capfd.readouterr().err) == (first == signal.SIGINT)


def test_other_threads_leave_signals_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def run() -> None:
        with stop_on_signals(lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
