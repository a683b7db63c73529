"""Environments in another interpreter: `environment.python=PATH` on this machine, `environment.host=tcp://…` elsewhere.

`Peer` is the trainer's side of the protocol in `worker.py`. One peer, a process with the other interpreter, has all
environments of one `EnvRunner`; `environment.workers` is the number of peers (see `lanes`). `FarEnv` is a Gymnasium environment whose calls go to a peer, so that wrappers,
checks, seeding and exact resume are those of every other environment. The steps of all environments of a peer are
sent together before the first answer is read (`begin_step`).

The other side may be anyone: its messages are bounded and checked, and never unpickled.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import multiprocessing
import os
import signal
import struct
import subprocess
import tempfile
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np

from rl_lab.environments.faults import PeerLost, last_line, signal_name
from rl_lab.environments.interpreters import worker as far
from rl_lab.environments.interpreters.connection import (
    START_S,
    connect,
    introduction_of,
    kill,
    start,
    why_not,
)
from rl_lab.environments.interpreters.places import Place
from rl_lab.environments.native import space_from_data
from rl_lab.environments.spec import UnusableRow
from rl_lab.errors import PACKAGE, ConfigError, LabError, MissingPackageError
from rl_lab.utils.stopping import GRACE_S, STOP, StopRequested
from rl_lab.utils.untrusted import in_run_folder

CLOSE_S = 5.0
POLL_S = 0.5  # between two looks at the request to stop
FIRST_ANSWER_FACTOR = 5  # times the timeout: imports, creation and the first reset
MAX_DEPTH, MAX_LEAVES, MAX_CHOICES = 8, 1000, 1_000_000

Answer = tuple[dict[str, Any], list[np.ndarray]]


class FarError(LabError):
    """An environment raised in the other interpreter; `far_traceback` is the text of its traceback."""

    def __init__(self, message: str, far_traceback: str) -> None:
        super().__init__(message)
        self.far_traceback = far_traceback


# --- Peers -----------------------------------------------------------------------------------------------


class Peer:
    """One process with another interpreter, and the environments in it."""

    _numbers = itertools.count()

    def __init__(self, place: Place) -> None:
        self.place = place
        self.serial = next(Peer._numbers)
        self.process: subprocess.Popen[bytes] | None = None
        self.lost: PeerLost | None = None  # why it cannot be used anymore
        self.reported = False  # whether `lost` was raised
        self.users = 0
        self._waiting: list[tuple[int, far.Kind, bytes]] = []  # actions to send together
        self._last: tuple[Any, bytes] = (None, b"")  # what the last header of a step says, and the header
        self._answers: dict[int, deque[Answer]] = {}
        self._forms: dict[int, Any] = {}  # keys and types of the last info in JSON, if it has numbers only
        self._env_numbers = itertools.count()
        if place.python:
            self.process, self.channel, self.introduction = start(place)
        else:
            self.channel = connect(place)
            self.introduction = self._first_message()
        if place.timeout is not None:
            self.channel.limit_sends(place.timeout)

    @property
    def pid(self) -> int:
        """Process id, on its machine."""
        return int(self.introduction.get("pid", 0))

    def _first_message(self) -> dict[str, Any]:
        try:
            return introduction_of(self.place, self.channel.receive(START_S)[0])
        except (far.Garbled, far.Stalled, EOFError, OSError) as error:
            self.channel.close()
            raise ConfigError(f"{self.place.key}: {why_not(error)} at the start of the worker") from None

    def new_env(self) -> int:
        number = next(self._env_numbers)
        self._answers[number] = deque()
        return number

    def forget_env(self, number: int) -> None:
        self._answers.pop(number, None)
        self._forms.pop(number, None)

    def add_step(self, number: int, kind: far.Kind, action: bytes) -> None:
        """Send a step together with those of other environments, at the latest with the next request."""
        self._waiting.append((number, kind, action))

    def send_steps(self) -> None:
        waiting, self._waiting = self._waiting, []
        while waiting:  # one message, unless environments of different actions share the process
            kind = waiting[0][1]
            now = [item for item in waiting if item[1] == kind]
            waiting = [] if len(now) == len(waiting) else [item for item in waiting if item[1] != kind]
            said = (kind, [item[0] for item in now])
            if self._last[0] != said:
                self._last = (said, far.step_header(*said))
            self._send(self._last[1], b"".join([item[2] for item in now]))

    def send(self, header: Mapping[str, Any]) -> None:
        self.send_steps()
        self._send(*far.json_message(dict(header)))

    def _send(self, text: bytes, data: bytes) -> None:
        if self.lost is None:
            with contextlib.suppress(OSError):  # `receive` detects and reports the end of the peer
                self.channel.sock.sendall(self.channel.framed(text, data))

    def receive(self, number: int, factor: float = 1.0) -> Answer:
        """Return the next answer for an environment; raises PeerLost if the peer ended, stalls or is garbled."""
        if self._waiting:
            self.send_steps()
        answers = self._answers[number]
        limit = None if self.place.timeout is None else self.place.timeout * factor
        while not answers:
            if self.lost is not None:
                self.reported = True
                raise self.lost
            try:
                self._sort(*self._take(limit))
            except far.Stalled:
                self.lose("hung", f"did not answer for {limit:g} s")
            except StopRequested:
                self.lose("hung", f"did not answer within {GRACE_S:g} s of the request to stop")
            except far.Garbled as error:
                self.lose("died", f"sent a garbled message: {error}")
            except (EOFError, OSError):
                self.lose("died", *self._end())
            except BaseException:  # a message was cut in two
                self.lose("hung", "was interrupted")
                raise
        return answers.popleft()

    def _take(self, limit: float | None) -> tuple[bytes, bytes]:
        """Return the next message; raises Stalled after the limit, and StopRequested as `stopping` describes."""
        left = math.inf if limit is None else limit
        while True:
            wait, size = min(POLL_S, left), self.channel.waiting
            try:
                return self.channel.take(wait)
            except far.Stalled:
                left = left - wait if self.channel.waiting == size else math.inf if limit is None else limit
                if left <= 0:
                    raise
            if STOP.overdue():
                raise StopRequested

    def _sort(self, text: bytes, data: bytes) -> None:
        if text.startswith(far.ROW):
            begin = 0
            for number, flags, reward in far.read_rows(text, data):
                if number not in self._answers:
                    raise far.Garbled("a row for no environment")
                header = _row(flags, reward)
                if flags & far.NUMBERS:
                    keys, types = self._forms.get(number) or ((), ())
                    if not keys or begin + 8 * len(keys) > len(data):
                        raise far.Garbled("a row without its numbers")
                    values = struct.unpack_from(f"<{len(keys)}d", data, begin)
                    header["info"] = _info(keys, types, values)
                    begin += 8 * len(keys)
                self._answers[number].append((header, []))
            if begin != len(data):
                raise far.Garbled("numbers that no row has")
            return
        header, arrays = far.read_json(text, data)
        answers, start = header.get("answers"), 0
        if not isinstance(answers, list):
            raise far.Garbled("no answers")
        for answer in answers:
            env, count = (
                (answer.get("env"), answer.get("arrays")) if isinstance(answer, dict) else (None, None)
            )
            if not isinstance(env, int) or env not in self._answers:
                raise far.Garbled("an answer for no environment")
            if type(count) is not int or not 0 <= count <= len(arrays) - start:
                raise far.Garbled("an answer without its arrays")
            if "row" in answer and "info" in answer:
                self._forms[env] = far.info_form(answer["info"])
            self._answers[env].append((answer, arrays[start : start + count]))
            start += count

    def lose(self, kind: str, what: str, advice: str = "") -> None:
        """End this peer; the environments that use it raise PeerLost."""
        if self.lost is None:
            self.lost = PeerLost(kind, f"{self.place.key}: the worker", what, advice, self.serial)
            kill(self.process)
            self.channel.close()

    def _end(self) -> tuple[str, str]:
        if self.process is None:
            return "closed its connection", "The message of that machine may say why."
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.returncode
        if code is not None and code < 0:
            advice = (
                "If nobody sent that signal, the machine may be out of memory."
                if code == -signal.SIGKILL
                else ""
            )
            return f"was killed by {signal_name(-code)}", advice
        return ("closed its connection" if code is None else f"ended with exit code {code}"), ""

    def stop(self) -> None:
        """Close the connection; the process closes its environments and exits."""
        if self.lost is None:
            self.lost = PeerLost("died", f"{self.place.key}: the worker", "was closed", "", self.serial)
            self.channel.close()
            if self.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(CLOSE_S)
                kill(self.process)


def _row(flags: int, reward: float) -> dict[str, Any]:
    """Return a row of the protocol as the header of an answer."""
    if flags > far.ROW_FLAGS:
        raise far.Garbled(f"a row with the flags {flags}")
    if flags & far.WHOLE:
        if not abs(reward) <= far.EXACT or reward != int(reward):
            raise far.Garbled("a row with a reward that is no integer")
        reward = int(reward)
    row = [reward, bool(flags & far.TERMINATED), bool(flags & far.TRUNCATED)]
    return {"row": row, "goes_on": True} if flags & far.GOES_ON else {"row": row}


def _info(keys: Sequence[str], types: Sequence[Any], values: Sequence[float]) -> dict[str, Any]:
    """Return the numbers of a row as an info."""
    try:
        if set(types) == {float}:
            return dict(zip(keys, values, strict=True))
        return {key: kind(value) for key, kind, value in zip(keys, types, values, strict=True)}
    except (ValueError, OverflowError):  # NaN or infinity as an integer
        raise far.Garbled("an info with numbers of another type") from None


_peers: dict[Place, Peer] = {}
_starting: weakref.WeakValueDictionary[Place, Any] = weakref.WeakValueDictionary()  # locks
_lock = threading.Lock()


def _acquire(place: Place) -> Peer:
    """Return the peer of this process for a place; start it if there is none that works."""
    with _lock:
        starting = _starting.get(place)
        if starting is None:
            starting = _starting[place] = threading.Lock()
    with starting:  # not `_lock`: those of other places start at the same time
        with _lock:
            peer = _peers.get(place)
            if peer is not None and peer.lost is None:
                peer.users += 1
                return peer
        peer = Peer(place)
        peer.users = 1
        with _lock:
            _peers[place] = peer
        return peer


def _release(peer: Peer) -> None:
    with _lock:
        peer.users -= 1
        last = peer.users == 0
        if last and _peers.get(peer.place) is peer:
            del _peers[peer.place]
    if last:
        peer.stop()


# --- Environments ----------------------------------------------------------------------------------------


class FarEnv(gymnasium.Env):
    """One environment in another interpreter.

    wanted: what `worker.make` creates
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 (as in Gymnasium)

    def __init__(self, name: str, place: Place, wanted: Mapping[str, Any]) -> None:
        self.name, self.place, self.wanted = name, place, dict(wanted)
        self.render_mode = "rgb_array" if wanted.get("render") else None
        self._open()

    def _open(self) -> None:
        self._pending: bytes | None = None  # the action that was sent, until its answer is read
        self._begun: Any = None  # the same action as it was given
        self._action = (np.dtype("int64"), "int64")  # dtype of the last action, and its name
        self._first = True
        self._views: dict[tuple[int, str], np.ndarray] = {}
        self._memory: mmap.mmap | None = None
        self._usual: list[tuple[Any, np.ndarray]] = []  # path and view of each leaf in the shared memory
        self.peer = _acquire(self.place)
        self._closed = False
        self.number = self.peer.new_env()
        try:
            self._describe(self._ask({"op": "open", "make": self.wanted}, FIRST_ANSWER_FACTOR)[0])
            if self.place.python:
                self._share()
        except BaseException:
            self.close()
            raise

    def _describe(self, header: Mapping[str, Any]) -> None:
        try:
            observation, action = header["observation"], header["action"]
            _check_space(observation), _check_space(action)
            self.observation_space, self.action_space = space_from_data(observation), space_from_data(action)
            self._leaves = list(far.leaves_of(observation))
            self.action_repeat = int(header["action_repeat"])
            if header["game"]:
                self.reset_continues = False
            seeding = str(header["seeding"])
        except (KeyError, TypeError, ValueError, OverflowError, AssertionError) as error:
            self._garbled(f"spaces that cannot be read ({type(error).__name__})")
        if seeding == "none" and multiprocessing.parent_process() is None and self.name not in _warned:
            _warned.add(self.name)
            warnings.warn(
                f"{self.name} cannot be seeded in the other interpreter, so runs do not resume exactly: if its constructor "
                "takes a seed, set +environment.seed_argument to the argument's name",
                stacklevel=2,
            )

    def _share(self) -> None:
        """Let observations be written to memory of both processes; without it they are sent in messages."""
        offsets, size = far.leaf_offsets([leaf[1:] for leaf in self._leaves])
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        try:
            descriptor, path = tempfile.mkstemp(prefix="rl-lab-", dir=folder)
        except OSError:
            return
        try:
            os.posix_fallocate(descriptor, 0, size) if hasattr(os, "posix_fallocate") else os.truncate(
                descriptor, size
            )
            memory = mmap.mmap(descriptor, size)
            self._ask({"op": "share", "path": path, "size": size})
        except OSError:  # too little room
            return
        finally:
            os.close(descriptor)
            os.unlink(path)  # both have it open
        self._memory, self._offsets = memory, offsets
        self._usual = [
            (path, self._view(index, dtype, shape)) for index, (path, dtype, shape) in enumerate(self._leaves)
        ]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.peer.lost is not None and self.peer.reported:
            self.close()
            self._open()
        if seed is None:
            seed = int(self.np_random.integers(2**31 - 1))
        factor = FIRST_ANSWER_FACTOR if self._first else 1
        header, arrays = self._ask({"op": "reset", "seed": seed, "options": options}, factor)
        self._first = False
        if hasattr(self, "reset_continues"):
            self.reset_continues = False
        return self._observation(header, arrays), header.get("info", {})

    @property
    def begun(self) -> bool:
        """Whether `begin_step` was called since the last `step`."""
        return self._pending is not None

    def begin_step(self, action: Any) -> None:
        """Send a step whose result `step` returns; the action must be the same."""
        if self._pending is None:
            array = np.asarray(action)
            if array.dtype != self._action[0]:
                self._action = (array.dtype, array.dtype.name)  # `name` takes a microsecond
            self._pending = array.tobytes()
            self._begun = action
            self.peer.add_step(self.number, (self._action[1], array.shape), self._pending)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.begin_step(action)
        if action is not self._begun and self._pending != np.asarray(action).tobytes():
            raise RuntimeError("step() was called with another action than begin_step()")
        try:
            header, arrays = self._answer(1)
        finally:
            self._pending = None
        row = header.get("row")
        if not isinstance(row, list) or len(row) != 3:
            self._garbled("a step without a row")
        if hasattr(self, "reset_continues"):
            self.reset_continues = bool(header.get("goes_on"))
        reward, terminated, truncated = row
        return self._observation(header, arrays), reward, terminated, truncated, header.get("info", {})

    def render(self) -> Any:
        _, arrays = self._ask({"op": "render"})
        return arrays[0].copy() if arrays else None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.peer.lost is None and self.peer.users > 1:  # the last one ends the process
            with contextlib.suppress(LabError):
                self._ask({"op": "close"})
        self.peer.forget_env(self.number)
        _release(self.peer)

    def _ask(self, header: Mapping[str, Any], factor: float = 1) -> Answer:
        if self._pending is not None:  # nobody asked for its result
            self._pending = None
            with contextlib.suppress(LabError, UnusableRow):
                self._answer(1)
        self.peer.send({**header, "env": self.number})
        return self._answer(factor)

    def _answer(self, factor: float) -> Answer:
        header, arrays = self.peer.receive(self.number, factor)
        if "unusable" in header:
            raise UnusableRow(str(header["unusable"])[:500])
        if "error" in header:
            raise self._failure(header)
        return header, arrays

    def _failure(self, header: Mapping[str, Any]) -> LabError:
        text, place = str(header["error"]), self.place
        if "missing" in header:
            package = str(header["missing"])[:100]
            how = f"{place.python} -m pip install {package}" if place.python else f"install {package} there"
            return MissingPackageError(
                f"{place.key}: {self.name} needs the package '{package}', which is not installed there: {how}"
            )
        if "sentence" in header:
            return ConfigError(f"{place.key}: {str(header['sentence'])[:1000]}")
        return FarError(f"{place.key}: {self.name} raised {last_line(text)}\n\n{text.strip()}", text)

    def _observation(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Any:
        """Put the leaves together; those that the other side could not read are missing."""
        if self._usual and not arrays and not (_ODD_LEAVES & header.keys()):
            values = [(path, view.copy()) for path, view in self._usual]
        else:
            try:
                values = self._unusual(header, arrays)
            except (TypeError, ValueError, AttributeError) as error:
                self._garbled(f"an observation that cannot be read ({type(error).__name__})")
        nested: Any = {}
        for path, value in values:
            if not path:
                return value
            inner = nested
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = value
        return nested

    def _unusual(
        self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]
    ) -> list[tuple[Any, np.ndarray]]:
        """Return path and value of the leaves, some of which are in the message."""
        sent = dict(zip(header.get("inline", ()), arrays, strict=True))
        dtypes, odd = header.get("dtypes", {}), header.get("odd", {})
        values = []
        for index, (path, dtype, shape) in enumerate(self._leaves):
            if index in sent:
                values.append((path, sent[index].copy()))
            elif str(index) in odd:
                if odd[str(index)] is not None:
                    values.append((path, np.asarray(str(odd[str(index)]))))
            elif self._memory is not None:
                kind = dtypes.get(str(index), dtype) if dtypes else dtype
                values.append((path, self._view(index, kind, shape).copy()))
        return values

    def _view(self, index: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        view = self._views.get((index, dtype))
        if view is None:
            if dtype not in far.DTYPES or self._memory is None:
                raise ValueError
            start, count = self._offsets[index], math.prod(shape)
            view = np.frombuffer(self._memory, dtype, count, start).reshape(shape)
            self._views[index, dtype] = view
        return view

    def _garbled(self, what: str) -> NoReturn:
        self.peer.lose("died", f"sent a garbled message: {what}")
        self.peer.reported = True
        assert self.peer.lost is not None
        raise self.peer.lost


_warned: set[str] = set()
_ODD_LEAVES = {"inline", "dtypes", "odd"}  # keys of an answer whose leaves are not all as in the space


def _check_space(data: Any, depth: int = 0) -> int:
    """Raise ValueError for a space that no environment has; return its number of leaves."""
    if depth > MAX_DEPTH or not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise ValueError
    kind, leaves = data["kind"], 1
    if kind in ("Dict", "Tuple"):
        children = data["spaces"]
        if not isinstance(children, list) or len(children) > MAX_LEAVES:
            raise ValueError
        if kind == "Dict" and not all(
            isinstance(item, list) and isinstance(item[0], str) for item in children
        ):
            raise ValueError
        leaves = sum(_check_space(item[1] if kind == "Dict" else item, depth + 1) for item in children)
    elif kind == "Box":
        if data["dtype"] not in far.DTYPES or not all(type(n) is int and n >= 0 for n in data["shape"]):
            raise ValueError
        if math.prod(data["shape"]) * 8 > far.MAX_DATA:
            raise ValueError
    elif kind in ("Discrete", "MultiDiscrete", "MultiBinary"):
        counts = np.asarray(data["nvec"] if kind == "MultiDiscrete" else data["n"])
        if counts.dtype.kind != "i" or counts.size > MAX_CHOICES or not 0 < counts.sum() <= MAX_CHOICES:
            raise ValueError
        if kind == "MultiDiscrete" and data["dtype"] not in far.DTYPES:
            raise ValueError
    if leaves > MAX_LEAVES:
        raise ValueError
    return leaves


def far_env(
    name: str,
    place: Place,
    task: str,
    *,
    module: str | None,
    options: Mapping[str, Any],
    render: bool,
    own_time_limit: bool,
    seed_argument: str | None,
) -> FarEnv:
    """Create an environment in another interpreter.

    module: the adapter of a suite, which runs there; None: `task` is a registered id or an import path
    """
    wanted = {
        "task": task,
        "module": module,
        "options": dict(options),
        "render": render,
        "time_limit": own_time_limit,
        "seed_argument": seed_argument,
    }
    if place.python:  # another machine has its own folders
        wanted["lab"] = str(PACKAGE)
        wanted["folder"] = None if in_run_folder(os.getcwd()) else os.getcwd()
    try:
        json.dumps(wanted)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{place.key}: settings of {name} must be numbers, words and lists ({error})"
        ) from None
    return FarEnv(name, place, wanted)
