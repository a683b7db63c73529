"""What a signal does to a run: said at once, obeyed at the next opportunity, and Ctrl-C twice means now."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from rl_lab.orchestration.orchestrator import stop_on_signals


def test_it_is_said_once_and_asked_every_time(capfd):
    asked: list[int] = []
    with stop_on_signals(lambda: asked.append(1)):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert len(asked) == 2
    assert capfd.readouterr().err.count("SIGTERM: finishing") == 1


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_closed_terminal_and_a_warned_job_are_asked_to_stop(number: signal.Signals, capfd):
    asked: list[int] = []
    assert signal.getsignal(number) is signal.SIG_DFL
    with stop_on_signals(lambda: asked.append(1)):
        for _ in range(3):  # a shell and the kernel may both send it: more than one does not mean now
            os.kill(os.getpid(), number)
    assert len(asked) == 3
    assert capfd.readouterr().err.count(f"{number.name}: finishing") == 1
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_what_is_ignored_or_handled_by_the_program_stays_so(number: signal.Signals):
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
