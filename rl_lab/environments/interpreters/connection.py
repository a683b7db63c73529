"""Starting the worker of another interpreter on this machine, and connecting to one that listens elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_lab.environments.faults import last_line
from rl_lab.environments.interpreters import worker as far
from rl_lab.environments.interpreters.places import Place, address, token_for
from rl_lab.errors import ConfigError, MissingPackageError

WORKER_FILE = Path(far.__file__)
START_S = 60.0  # for the interpreter to start and import NumPy
CONNECT_S = 10.0
RECONNECT_S = 30.0  # a worker elsewhere that was reached before may be starting again
# They are the trainer's, and would lead the other interpreter to the trainer's packages.
NOT_INHERITED = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "VIRTUAL_ENV",
    "__PYVENV_LAUNCHER__",
    far.TOKEN_VARIABLE,
)

_reached: set[str] = set()  # hosts


def start(place: Place) -> tuple[subprocess.Popen[bytes], far.Channel, dict[str, Any]]:
    """Start `worker.py` with the interpreter and wait until it introduces itself."""
    python = str(place.python)
    if not os.path.isfile(python):
        raise ConfigError(
            f"{place.key}: there is no such file; write the path of an interpreter, or a name of rl-lab envs"
        )
    if not os.access(python, os.X_OK):
        raise ConfigError(f"{place.key}: this file is not executable; write the path of a Python interpreter")
    ours, theirs = socket.socketpair()
    said, output = os.pipe()  # what it prints before it introduces itself
    streams = os.dup(2)
    try:
        process = subprocess.Popen(
            [python, str(WORKER_FILE), "--fd", str(theirs.fileno()), "--output", str(streams)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(), streams),
            env={name: value for name, value in os.environ.items() if name not in NOT_INHERITED},
            process_group=0,  # Ctrl-C is for the trainer; and its children can be killed with it
        )
    except OSError as error:
        ours.close()
        raise ConfigError(f"{place.key} cannot be started: {error.strerror or error}") from None
    finally:
        theirs.close()
        os.close(output)
        os.close(streams)
        failed = "process" not in locals()
        if failed:
            os.close(said)
    channel = far.Channel(ours)
    try:
        introduction = introduction_of(place, channel.receive(START_S)[0])
    except (far.Garbled, far.Stalled, EOFError, OSError) as error:
        kill(process)
        channel.close()
        os.set_blocking(said, False)
        with contextlib.suppress(OSError):
            text = (
                last_line(os.read(said, 65536).decode(errors="replace"))
                if isinstance(error, EOFError)
                else ""
            )
            if "No module named 'numpy'" in text:
                raise MissingPackageError(
                    f"{place.key} has no NumPy, which the worker needs: {python} -m pip install numpy"
                ) from None
            why = why_not(error) + (f" ({text})" if text else "")
            raise ConfigError(f"{place.key} is no Python 3.8 or newer with NumPy: it {why}") from None
        raise ConfigError(f"{place.key} is no Python 3.8 or newer with NumPy: it {why_not(error)}") from None
    except BaseException:
        kill(process)
        channel.close()
        raise
    finally:
        os.close(said)
    return process, channel, introduction


def introduction_of(place: Place, message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("hello") != far.NAME:
        raise far.Garbled("no introduction of a worker")
    if message.get("protocol") != far.PROTOCOL:
        raise ConfigError(
            f"{place.key}: the worker speaks version {message.get('protocol')!r} of the protocol, and this RL Lab version "
            f"{far.PROTOCOL}: copy {WORKER_FILE.name} of this RL Lab there and start it again"
        )
    return dict(message)


def why_not(error: BaseException) -> str:
    if isinstance(error, far.Stalled):
        return f"did not answer for {START_S:g} s"
    if isinstance(error, far.Garbled):
        return f"sent a garbled message: {error}"
    return "ended"


def connect(place: Place) -> far.Channel:
    """Connect to a worker that listens; one that was reached before has some time to come back."""
    host = str(place.host)
    token = token_for(host)
    end = time.monotonic() + (RECONNECT_S if host in _reached else 0.0)
    while True:
        try:
            sock = socket.create_connection(address(host), timeout=CONNECT_S)
            break
        except OSError as error:
            if time.monotonic() >= end:
                raise ConfigError(
                    f"{place.key} cannot be reached ({error.strerror or error}): start {WORKER_FILE.name} --listen there"
                ) from None
            time.sleep(0.5)
    try:
        channel = far.Channel(sock, limit_header=4096, limit_data=0)
        channel.limit_sends(CONNECT_S)
        _prove(place, channel, token)
    except (far.Garbled, far.Stalled, EOFError, OSError) as error:
        sock.close()
        what = (
            why_not(error)
            if not isinstance(error, far.Stalled)
            else f"did not answer for {far.HANDSHAKE_S:g} s"
        )
        raise ConfigError(f"{place.key}: the worker there {what}") from None
    except BaseException:
        sock.close()
        raise
    _reached.add(host)
    return far.Channel(sock)


def _prove(place: Place, channel: far.Channel, token: str) -> None:
    """Exchange proofs of the token; neither side sends it."""
    theirs = introduction_of(place, channel.receive(far.HANDSHAKE_S)[0])
    nonce, mine = theirs.get("nonce"), far.new_nonce()
    if not isinstance(nonce, str):
        raise far.Garbled("no introduction of a worker that listens")
    if theirs.get("token") and not token:
        raise ConfigError(
            f"{place.key}: the worker there wants a token: set {far.TOKEN_VARIABLE} to the same value here"
        )
    if token and not theirs.get("token"):
        raise ConfigError(
            f"{place.key}: the worker there has no token: set {far.TOKEN_VARIABLE} to the same value there, or unset it here"
        )
    answer = {"hello": far.NAME, "protocol": far.PROTOCOL, "nonce": mine}
    channel.send({**answer, "proof": far.proof(token, "trainer", nonce, mine)} if token else answer)
    reply, _ = channel.receive(far.HANDSHAKE_S)
    if "refused" in reply:
        raise ConfigError(f"{place.key} refused the connection: {str(reply['refused'])[:200]}")
    if token and not far.same(reply.get("proof"), far.proof(token, "worker", nonce, mine)):
        raise ConfigError(f"{place.key}: the worker there does not have the token of {far.TOKEN_VARIABLE}")


def kill(process: subprocess.Popen[bytes] | None) -> None:
    """Kill a worker and the processes that its simulator started."""
    if process is not None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
