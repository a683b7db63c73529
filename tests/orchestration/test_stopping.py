"""What a signal does to a run: said at once, obeyed at the next opportunity, and Ctrl-C twice means now."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from rl_lab.orchestration.stopping import stop_on_signals


def test_it_is_said_once_and_asked_every_time(capfd):
    asked: list[int] = []
    with stop_on_signals(lambda: asked.append(1)):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert len(asked) == 2
    assert capfd.readouterr().err.count("SIGTERM: finishing") == 1


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_does_not_wait(first: signal.Signals, capfd):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop_on_signals(lambda: None):
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second one should have ended this")
    assert signal.getsignal(signal.SIGINT) is before
    assert ("once more stops at once" in capfd.readouterr().err) == (first == signal.SIGINT)


def test_outside_the_main_thread_signals_are_somebody_elses():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def run() -> None:
        with stop_on_signals(lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
