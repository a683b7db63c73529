"""The worker of environments in another interpreter: one file, standard library and NumPy, Python 3.8 or newer.

    python worker.py --fd 5                                    started by the trainer on this machine
    python worker.py --listen 127.0.0.1:7000                   waits for trainers; `environment.host=tcp://…`
    python worker.py --listen 0.0.0.0:7000 --token-file FILE   beyond loopback only with a token

Copy this file to another machine to run environments there. RL Lab is not needed, except for its suites.

The protocol, version `PROTOCOL`. Nothing is pickled, in either direction. A message is

    8 bytes     lengths of header and data, two little-endian uint32; at most MAX_HEADER and MAX_DATA
    header      JSON object; `arrays` lists [dtype, shape] of the arrays in the data
    data        these arrays, C order, little endian

A step and its usual answer have a short binary header instead; all numbers in it are little endian:

    "S", dtype (its number in DTYPES), dimensions: uint8; number of environments n: uint32;
         shape of an action: dimensions x uint32; environments: n x uint32                   data: n actions
    "R", for each environment: its number uint32, flags uint8 (ROW_FLAGS), reward float64
         data: for each row with the flag NUMBERS the values of its info, float64

The worker begins: {"hello": NAME, "protocol": 2, "python", "numpy", "pid"}. On a socket the first message has
`nonce` and `token` (whether it wants one) instead; the trainer answers {"hello", "protocol", "nonce", "proof"},
where proof = HMAC-SHA256(token, "trainer" + both nonces), and the worker proves that it has the token, too: so
the token itself is never sent. Then the trainer asks. Each request has one answer for each environment, in the
order of the requests; {"answers": [{"env", "arrays": how many are its own, …}, …]} has one or several of them:

    {"op": "open", "env": 3, "make": {…}}         -> the spaces, as in `native.space_to_data`
    {"op": "share", "env": 3, "path", "size"}     -> observations are written to this file from now on
    {"op": "reset", "env": 3, "seed", "options"}  -> obs, info
    "S", environments, actions                    -> for each: "R", or obs, row, info
    {"op": "render", "env": 3}                    -> a frame
    {"op": "close", "env": 3}

`row` is [reward, terminated, truncated]. "R" is the answer of a step whose observation is in the shared file, whose
info is empty or has numbers, and whose reward and flags are a number and two booleans; any other answer is JSON. The
keys and types of the numbers in an info are those of the last info of a step that was sent as JSON.
An observation is one array for each leaf of the space. It is in the shared file if its shape is that of the space
(its dtype may be another one: `dtypes`); any other is in the data of the message (`inline`: numbers of the
leaves), so that the trainer checks exactly what the environment returned. An answer with `error` has the
traceback of an exception; the environment is closed then.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import hmac
import importlib
import importlib.util
import inspect
import io
import ipaddress
import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402

NAME = "rl-lab environment worker"
PROTOCOL = 2
MAX_HEADER = 4 * 2**20
MAX_DATA = 2**28
MAX_ARRAYS = 10_000
DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]
BYTES = ("uint8", "bool", "int8")  # leaves with one byte for each value in the shared file; others have eight
LENGTHS = struct.Struct("<II")
STEP, STEP_KIND = b"S", struct.Struct("<BBI")
ROW, ROW_FORMAT = b"R", struct.Struct("<IBd")
TERMINATED, TRUNCATED = 1, 2  # flags of a row
GOES_ON, WHOLE, NUMBERS = (
    4,
    8,
    16,
)  # the game goes on after its end; the reward is an int; the info has numbers
ROW_FLAGS = 31
NUMBER_TYPES = frozenset([float, int, bool, np.float64, np.float32, np.int64, np.int32, np.bool_])
EXACT = 2**53  # integers up to it are exact as float64
MAX_STEPS = 65536  # environments in one request
TOKEN_VARIABLE = "RL_LAB_ENVIRONMENT_TOKEN"
MIN_TOKEN = 16  # characters
HANDSHAKE_S = 10.0
MAX_CONNECTIONS = 256
TOGETHER_S = 1e-3  # answers of shorter steps are sent together: each message wakes another process
EXIT_S = 5.0  # after the trainer's end, for a call that goes on
ALIGNMENT = 64

Header = Dict[str, Any]
Row = Tuple[int, int, float]
Kind = Tuple[str, Tuple[int, ...]]  # dtype and shape


# --- Messages --------------------------------------------------------------------------------------------


class Garbled(Exception):
    """The other side sent something that is no message of this protocol."""


class Stalled(Exception):
    """The other side sent nothing within the time limit."""


class Channel:
    """Messages over a connected socket, which becomes a blocking one."""

    def __init__(
        self, sock: socket.socket, limit_header: int = MAX_HEADER, limit_data: int = MAX_DATA
    ) -> None:
        self.sock = sock
        self.limits = (limit_header, limit_data)
        self._buffer = bytearray()
        self._timeout: Optional[float] = None
        sock.setblocking(True)
        self._limit(socket.SO_RCVTIMEO, None)  # the process before may have had others
        self._limit(socket.SO_SNDTIMEO, None)
        if sock.family != getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def limit_sends(self, seconds: float) -> None:
        """Let a send fail after this time without progress."""
        self._limit(socket.SO_SNDTIMEO, seconds)

    def _limit(self, option: int, seconds: Optional[float]) -> None:
        # The kernel keeps the time: a call of poll() before each recv() would cost more than the recv().
        micros = 0 if seconds is None else max(1, int(seconds * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", micros // 10**6, micros % 10**6))

    def send(self, header: Header, arrays: Sequence[np.ndarray] = ()) -> None:
        text, data = json_message(header, arrays)
        self.sock.sendall(self.framed(text, data))

    def framed(self, text: bytes, data: bytes = b"") -> bytes:
        """Return a message with its lengths; the header is JSON or binary."""
        if len(text) > self.limits[0] or len(data) > self.limits[1]:
            raise ValueError(
                "a message of %d bytes is above the limit of the protocol" % (len(text) + len(data))
            )
        return LENGTHS.pack(len(text), len(data)) + text + data

    def receive(self, timeout: Optional[float] = None) -> Tuple[Header, List[np.ndarray]]:
        """Return (header, arrays) of a message with a JSON header; raises as `take` does."""
        return read_json(*self.take(timeout))

    def take(self, timeout: Optional[float] = None) -> Tuple[bytes, bytes]:
        """Return (header, data); raise EOFError at the end, Stalled without progress for `timeout` seconds."""
        buffer, begin = self._buffer, LENGTHS.size
        while len(buffer) < begin:
            self._fill(begin, timeout)
        text_size, data_size = LENGTHS.unpack_from(buffer)
        if text_size > self.limits[0] or data_size > self.limits[1]:
            raise Garbled("a message of %d bytes" % (text_size + data_size))
        middle = begin + text_size
        end = middle + data_size
        while len(buffer) < end:
            self._fill(end, timeout)
        text, data = bytes(buffer[begin:middle]), bytes(buffer[middle:end])
        del buffer[:end]
        return text, data

    def _fill(self, size: int, timeout: Optional[float]) -> None:
        if timeout != self._timeout:
            self._limit(socket.SO_RCVTIMEO, timeout)
            self._timeout = timeout
        try:
            part = self.sock.recv(max(65536, size - len(self._buffer)))
        except BlockingIOError:
            raise Stalled() from None
        if not part:
            raise EOFError
        self._buffer += part

    @property
    def waiting(self) -> int:
        """Number of bytes that arrived and are no whole message yet, or belong to the next ones."""
        return len(self._buffer)

    def close(self) -> None:
        self.sock.close()


def json_message(header: Header, arrays: Sequence[np.ndarray] = ()) -> Tuple[bytes, bytes]:
    """Return header and data of a message with a JSON header."""
    parts = [np.ascontiguousarray(array).reshape(np.shape(array)) for array in arrays]
    if parts:
        header = dict(header, arrays=[[part.dtype.name, list(part.shape)] for part in parts])
    return json.dumps(header, separators=(",", ":")).encode(), b"".join([part.tobytes() for part in parts])


def read_json(text: bytes, data: bytes) -> Tuple[Header, List[np.ndarray]]:
    """Return (header, arrays) of a message with a JSON header."""
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise Garbled("a header that is no object")
        return header, _arrays(header.get("arrays", ()), data)
    except (ValueError, TypeError, RecursionError) as error:
        raise Garbled("a header that cannot be read (%s)" % type(error).__name__) from None


def info_form(info: Any) -> Any:
    """Return (keys, types) of an info that has numbers only, else None."""
    if not isinstance(info, dict):
        return None
    form = tuple(info), tuple(map(type, info.values()))
    return form if NUMBER_TYPES.issuperset(form[1]) and all(type(key) is str for key in form[0]) else None


def step_header(kind: Kind, numbers: Sequence[int]) -> bytes:
    """Return the header of a step; kind: of one action; numbers: of the environments."""
    dtype, shape = kind
    form = STEP_KIND.pack(DTYPES.index(dtype), len(shape), len(numbers))
    return STEP + form + struct.pack("<%dI" % (len(shape) + len(numbers)), *shape, *numbers)


def read_step_header(text: bytes) -> Tuple[Kind, Tuple[int, ...]]:
    """Return kind and numbers of a step's header."""
    begin = len(STEP) + STEP_KIND.size
    if len(text) < begin:
        raise Garbled("a step of %d bytes" % len(text))
    dtype, dimensions, count = STEP_KIND.unpack_from(text, len(STEP))
    if dtype >= len(DTYPES) or dimensions > 32 or not 0 < count <= MAX_STEPS:
        raise Garbled("a step of an unknown kind")
    if len(text) != begin + 4 * (dimensions + count):
        raise Garbled("a step of %d bytes" % len(text))
    values = struct.unpack_from("<%dI" % (dimensions + count), text, begin)
    return (DTYPES[dtype], values[:dimensions]), values[dimensions:]


def read_actions(kind: Kind, count: int, data: bytes) -> np.ndarray:
    """Return the actions (count, ...) in the data of a step."""
    dtype, shape = kind
    size = count * np.dtype(dtype).itemsize
    for length in shape:
        size *= length
    if size != len(data):
        raise Garbled("actions of %d bytes, not %d" % (len(data), size))
    return np.frombuffer(data, dtype).reshape((count, *shape))


def read_rows(text: bytes, data: bytes) -> List[Row]:
    """Return (environment, flags, reward) for each row of a message that begins with ROW; data: of their infos."""
    size = len(text) - len(ROW)
    if not size or size % ROW_FORMAT.size:
        raise Garbled("rows of %d bytes" % size)
    if len(data) % 8:
        raise Garbled("numbers of %d bytes" % len(data))
    return list(ROW_FORMAT.iter_unpack(memoryview(text)[len(ROW) :]))


def _arrays(described: Any, data: bytes) -> List[np.ndarray]:
    if len(described) > MAX_ARRAYS:
        raise Garbled("%d arrays" % len(described))
    arrays, offset = [], 0
    for dtype, shape in described:
        if (
            dtype not in DTYPES
            or len(shape) > 32
            or not all(type(n) is int and 0 <= n <= MAX_DATA for n in shape)
        ):
            raise Garbled("an array of an unknown kind")
        count = 1
        for length in shape:
            count *= length
        size = count * np.dtype(dtype).itemsize
        if offset + size > len(data):
            raise Garbled("arrays that are larger than their data")
        arrays.append(np.frombuffer(data, dtype, count, offset).reshape(shape))
        offset += size
    if offset != len(data):
        raise Garbled("data that no array has")
    return arrays


def proof(token: str, side: str, first: str, second: str) -> str:
    """Return the hexadecimal HMAC with which one side shows the other that it has the token."""
    text = "\n".join((NAME, str(PROTOCOL), side, first, second))
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def new_nonce() -> str:
    return os.urandom(32).hex()


def same(one: Any, other: str) -> bool:
    """Compare two texts in a time that does not depend on where they differ."""
    return isinstance(one, str) and hmac.compare_digest(one.encode(), other.encode())


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def leaf_offsets(leaves: Sequence[Any]) -> Tuple[List[int], int]:
    """Return the offset of each leaf [dtype, shape] in the shared file, and its size; room for any dtype."""
    offsets, total = [], 0
    for dtype, shape in leaves:
        size = int(np.prod(shape)) * (1 if dtype in BYTES else 8)
        offsets.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, max(total, 1)


# --- Spaces ----------------------------------------------------------------------------------------------


def space_data(space: Any) -> Header:
    """Return a space of Gymnasium or of gym as JSON data; they are recognized by name."""
    kind = [c.__name__ for c in type(space).__mro__]
    if "Dict" in kind:
        return {
            "kind": "Dict",
            "spaces": [[str(key), space_data(child)] for key, child in space.spaces.items()],
        }
    if "Tuple" in kind:
        return {"kind": "Tuple", "spaces": [space_data(child) for child in space.spaces]}
    if "Box" in kind:
        return box_data(space.shape, space.dtype, space.low, space.high)
    if "Discrete" in kind:
        return {"kind": "Discrete", "n": int(space.n), "start": int(getattr(space, "start", 0))}
    if "MultiDiscrete" in kind:
        start = np.asarray(
            getattr(space, "start", None) if hasattr(space, "start") else np.zeros_like(space.nvec)
        )
        return {
            "kind": "MultiDiscrete",
            "dtype": str(space.dtype),
            "nvec": np.asarray(space.nvec).tolist(),
            "start": start.tolist(),
        }
    if "MultiBinary" in kind:
        return {"kind": "MultiBinary", "n": np.asarray(space.n).tolist()}
    return {"kind": type(space).__name__}


def box_data(shape: Any, dtype: Any, low: Any, high: Any) -> Header:
    bounds = [np.broadcast_to(np.asarray(bound, dtype), shape).reshape(-1) for bound in (low, high)]
    return {
        "kind": "Box",
        "shape": [int(n) for n in shape],
        "dtype": str(np.dtype(dtype)),
        "low": _bound(bounds[0]),
        "high": _bound(bounds[1]),
    }


def _bound(flat: np.ndarray) -> Any:
    equal = flat.size > 0 and bool((flat == flat[0]).all())
    values = [value if np.isfinite(value) else str(value) for value in (flat[:1] if equal else flat).tolist()]
    return values[0] if equal else values


def spec_data(spec: Any) -> Header:
    """Return specs of dm_env as the data of a space."""
    if hasattr(spec, "items"):
        return {"kind": "Dict", "spaces": [[str(key), spec_data(child)] for key, child in spec.items()]}
    if isinstance(spec, (list, tuple)):
        return {"kind": "Tuple", "spaces": [spec_data(child) for child in spec]}
    if hasattr(spec, "num_values"):
        return {"kind": "Discrete", "n": int(spec.num_values), "start": 0}
    dtype = np.dtype(spec.dtype)
    if dtype.kind not in "biuf":
        return {"kind": type(spec).__name__}
    if dtype.kind == "b":
        dtype = np.dtype("uint8")
    limits = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    low, high = getattr(spec, "minimum", limits[0]), getattr(spec, "maximum", limits[1])
    return box_data(spec.shape, dtype, low, high)


def leaves_of(data: Header, path: Tuple[Any, ...] = ()) -> Iterator[Tuple[Any, str, Tuple[int, ...]]]:
    """Yield (path, dtype, shape) of the leaves of a space's data; those that are no arrays are left out."""
    kind = data["kind"]
    if kind == "Dict":
        for key, child in data["spaces"]:
            yield from leaves_of(child, (*path, key))
    elif kind == "Tuple":
        for index, child in enumerate(data["spaces"]):
            yield from leaves_of(child, (*path, index))
    elif kind == "Box":
        yield path, data["dtype"], tuple(data["shape"])
    elif kind == "Discrete":
        yield path, "int64", ()
    elif kind == "MultiDiscrete":
        yield path, data["dtype"], np.shape(data["nvec"])
    elif kind == "MultiBinary":
        yield path, "int8", tuple(np.atleast_1d(data["n"]).tolist())


# --- Environments ----------------------------------------------------------------------------------------


class Unusable(Exception):
    """The environment returned something that no interface allows."""


class GymInterface:
    """Gymnasium's interface and that of gym: reset with one or two values, step with four or five."""

    def __init__(self, env: Any, seeded: bool) -> None:
        self.env = env
        self.spaces = (space_data(env.observation_space), space_data(env.action_space))
        self.game = env.unwrapped if hasattr(getattr(env, "unwrapped", env), "reset_continues") else None
        self._keywords = reset_keywords(env)
        if seeded or "seed" in self._keywords:
            self.seeding = "constructor" if seeded else "reset"
        else:
            self.seeding = "seed" if callable(getattr(env, "seed", None)) else "none"

    def reset(self, seed: int, options: Any) -> Any:
        keywords = {"seed": seed} if self.seeding == "reset" else {}
        if options and "options" in self._keywords:
            keywords["options"] = options
        if self.seeding == "seed":
            self.env.seed(seed)
        result = self.env.reset(**keywords)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        return result, {}

    def step(self, action: Any) -> Tuple[Any, ...]:
        result = self.env.step(action)
        if isinstance(result, (tuple, list)) and len(result) == 5:
            return tuple(result)
        if not isinstance(result, (tuple, list)) or len(result) != 4:
            count = "%d values" % len(result) if isinstance(result, (tuple, list)) else type(result).__name__
            raise Unusable("step() returned %s, not (obs, reward, terminated, truncated, info)" % count)
        obs, reward, done, info = result
        cut = bool(done) and isinstance(info, dict) and bool(info.get("TimeLimit.truncated", False))
        return obs, reward, False if cut else done, cut, info

    def render(self) -> Any:
        if getattr(self.env, "render_mode", None) is None and "mode" in _parameters(self.env.render):
            return self.env.render(mode="rgb_array")
        return self.env.render()

    def close(self) -> None:
        self.env.close()


class DmEnvInterface:
    """dm_env's interface: time steps with a discount, specs instead of spaces."""

    def __init__(self, env: Any, seeded: bool) -> None:
        self.env = env
        self.spaces = (spec_data(env.observation_spec()), spec_data(env.action_spec()))
        self.game = None
        self._task = getattr(env, "task", None)
        random = getattr(self._task, "random", None)
        self._random = (
            random if isinstance(random, np.random.RandomState) else getattr(env, "random_state", None)
        )
        if not isinstance(self._random, np.random.RandomState):
            self._random = None
        self.seeding = "constructor" if seeded else "none" if self._random is None else "seed"

    def reset(self, seed: int, options: Any) -> Any:
        if self._random is not None and self.seeding == "seed":
            self._random.seed(seed)
        return self.env.reset().observation, {}

    def step(self, action: Any) -> Tuple[Any, ...]:
        result = self.env.step(action)
        last = bool(result.last())
        terminated = last and result.discount == 0.0
        reward = 0.0 if result.reward is None else result.reward
        return result.observation, reward, terminated, last and not terminated, {}

    def render(self) -> Any:
        return self.env.physics.render(240, 320, camera_id=0)

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


def reset_keywords(env: Any) -> List[str]:
    """Return which of `seed` and `options` the environment itself takes; wrappers of gym pass anything on."""
    inner = getattr(env, "unwrapped", env)
    parameters = _parameters(inner.reset)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in ("seed", "options") if takes_all or name in parameters]


def _parameters(function: Any) -> Any:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def make(wanted: Header) -> Any:
    """Create the environment that `wanted` describes; return its interface.

    wanted: `task`, `options` (keywords of the constructor), `render`, `time_limit` (false: without its own);
            for a suite of RL Lab `module`, and `lab`, the folder of the package on this machine;
            `seed_argument` and `seed` if only the constructor takes the seed; `folder` with the user's modules
    """
    options = dict(wanted.get("options") or {})
    if wanted.get("seed_argument"):
        options[wanted["seed_argument"]] = int(wanted.get("seed") or 0)
    if wanted.get("folder") and wanted["folder"] not in sys.path:
        sys.path.append(wanted["folder"])  # modules of the trainer's current folder, as in the trainer
    if wanted.get("module"):
        env = _make_of_suite(wanted, options)
    else:
        env = _make_by_name(str(wanted["task"]), bool(wanted.get("render")), options)
    if not wanted.get("time_limit", True):
        env = _without_time_limit(env)
    interface = DmEnvInterface if hasattr(env, "observation_spec") else GymInterface
    if interface is GymInterface and not hasattr(env, "observation_space"):
        raise TypeError(
            "%s is a %s, not an environment of Gymnasium, gym or dm_env"
            % (wanted["task"], type(env).__name__)
        )
    return interface(env, bool(wanted.get("seed_argument")))


def _make_of_suite(wanted: Header, options: Header) -> Any:
    folder = wanted.get("lab")
    if "rl_lab" not in sys.modules and folder and os.path.isfile(os.path.join(folder, "__init__.py")):
        # Only this package: its folder may hold other packages, which are not for this interpreter.
        spec = importlib.util.spec_from_file_location(
            "rl_lab", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["rl_lab"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["rl_lab"])
    adapter = importlib.import_module(wanted["module"])
    task = adapter.resolve(wanted["task"]) if hasattr(adapter, "resolve") else wanted["task"]
    return adapter.make(task, render=bool(wanted.get("render")), **options)


def _make_by_name(task: str, render: bool, options: Header) -> Any:
    module_name, colon, name = task.partition(":")
    if not colon:
        return _make_by_id(task, render, options)
    module = importlib.import_module(module_name)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        return _make_by_id(name, render, options)
    if render and "render_mode" in _parameters(found):
        options = dict(options, render_mode="rgb_array")
    return found(**options)


def _make_by_id(name: str, render: bool, options: Header) -> Any:
    """Create a registered environment, of Gymnasium if it knows the name, else of gym."""
    missing = None
    for package in ("gymnasium", "gym"):
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # gym asks every time to be replaced
                gym: Any = importlib.import_module(package)
        except ModuleNotFoundError as error:
            missing = missing or error
            continue
        registry = getattr(gym.envs, "registry", None) or gym.envs.registration.registry
        known = registry if isinstance(registry, dict) else registry.env_specs
        if name not in known:
            continue
        if render and "render_mode" in (getattr(gym.make, "__kwdefaults__", None) or {"render_mode": 0}):
            options = dict(options, **({} if _version(gym) < (0, 25) else {"render_mode": "rgb_array"}))
        if package == "gym":
            gym.logger.set_level(40)  # errors: it warns of its own step API
        if _version(gym) >= (0, 24):
            options = dict(options, disable_env_checker=True)
        return gym.make(name, **options)
    if missing is not None and "gymnasium" not in sys.modules and "gym" not in sys.modules:
        raise missing
    raise LookupError("no environment '%s' is registered in this interpreter" % name)


def _version(module: Any) -> Tuple[int, ...]:
    numbers = str(getattr(module, "__version__", "9")).split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in numbers)


def _without_time_limit(env: Any) -> Any:
    if type(env).__name__ == "TimeLimit" and hasattr(env, "env"):
        return env.env
    inner = getattr(env, "env", None)
    if inner is not None and inner is not env and hasattr(inner, "step"):
        env.env = _without_time_limit(inner)
    return env


class Environment:
    """One environment, and how its observations are written."""

    def __init__(self, wanted: Header) -> None:
        self.wanted = wanted
        self.interface = make(wanted)
        observation, self.action = self.interface.spaces
        self.leaves = list(leaves_of(observation))
        self.slots: List[Any] = []  # parts of the shared file: its memory, offset, views by dtype
        self._usual: List[np.ndarray] = []  # views of the dtype and shape of the space
        self._is_discrete = self.action["kind"] == "Discrete"
        self._form: Any = None  # of the last info of a step that was sent as JSON

    def describe(self) -> Header:
        observation, action = self.interface.spaces
        return {
            "observation": observation,
            "action": action,
            "game": self.interface.game is not None,
            "seeding": self.interface.seeding,
            "action_repeat": int(
                getattr(getattr(self.interface.env, "unwrapped", None), "action_repeat", 1) or 1
            ),
        }

    def share(self, path: str, size: int) -> None:
        offsets, total = leaf_offsets([leaf[1:] for leaf in self.leaves])
        if size != total:
            raise ValueError("the shared file has %d bytes, not %d" % (size, total))
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
        self.slots = [(memory, offset, {}) for offset in offsets]
        self._usual = [self._slot(index, *leaf[1:]) for index, leaf in enumerate(self.leaves)]

    def _slot(self, index: int, kind: str, shape: Tuple[int, ...]) -> np.ndarray:
        """Return the part of the shared file for this leaf, as an array of this kind."""
        memory, offset, views = self.slots[index]
        if kind not in views:
            views[kind] = np.frombuffer(memory, kind, int(np.prod(shape)), offset).reshape(shape)
        return views[kind]

    def reset(self, seed: int, options: Any) -> Any:
        if self.interface.seeding == "constructor":
            self.interface.close()
            self.interface = make(dict(self.wanted, seed=seed))
        obs, info = self.interface.reset(seed, options)
        header, arrays = self._observation(obs)
        header["info"] = plain(info)
        return header, arrays

    def step(self, action: Any) -> Tuple[int, Any, Any, List[np.ndarray]]:
        """Return (flags, reward, numbers of the info, []) of a row, or (-1, None, header, arrays) of another answer."""
        native = int(action) if self._is_discrete else np.array(action)
        obs, reward, terminated, truncated, info = self.interface.step(native)
        header, arrays = self._observation(obs)
        reward, terminated, truncated = number(reward), number(terminated), number(truncated)
        goes_on = self.interface.game is not None and bool(self.interface.game.reset_continues)
        flags = -1 if header else row_flags(reward, terminated, truncated)
        if goes_on and flags >= 0:
            flags |= GOES_ON
        if info and flags >= 0 and self._form is not None and self._form == info_form(info):
            values = list(info.values())
            if int not in self._form[1] and np.int64 not in self._form[1]:
                return flags | NUMBERS, reward, values, arrays
            if all(-EXACT <= value <= EXACT for value in values):
                return flags | NUMBERS, reward, values, arrays
        if info:
            form, info = info_form(info), plain(info)
        if not info and flags >= 0:
            return flags, reward, (), arrays
        header["row"] = [reward, terminated, truncated]
        if info:
            header["info"], self._form = info, form
        if goes_on:
            header["goes_on"] = True
        return -1, None, header, arrays

    def _observation(self, obs: Any) -> Tuple[Header, List[np.ndarray]]:
        header: Header = {}
        arrays: List[np.ndarray] = []
        inline: List[int] = []
        dtypes: Dict[int, str] = {}
        usual = self._usual
        for index, (path, dtype, shape) in enumerate(self.leaves):
            try:
                value = obs
                for key in path:
                    value = value[key]
                array = np.asarray(value)
            except Exception:  # the trainer reports the leaf as missing
                header.setdefault("odd", {})[index] = None
                continue
            if usual and array.dtype == usual[index].dtype and array.shape == shape:
                usual[index][...] = array
                continue
            kind = array.dtype.name
            if kind not in DTYPES:
                header.setdefault("odd", {})[index] = repr(value)[:200]
                continue
            if usual and array.shape == shape and array.itemsize <= (1 if dtype in BYTES else 8):
                self._slot(index, kind, shape)[...] = array
                if kind != dtype:
                    dtypes[index] = kind
                continue
            inline.append(index)
            arrays.append(array.astype(kind, copy=False))  # the byte order of the machine
        if inline:
            header["inline"] = inline
        if dtypes:
            header["dtypes"] = dtypes
        return header, arrays


def row_flags(reward: Any, terminated: Any, truncated: Any) -> int:
    """Return the flags of a row; -1 if its values are of other types."""
    if (terminated is not True and terminated is not False) or (
        truncated is not True and truncated is not False
    ):
        return -1
    flags = (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
    if isinstance(reward, float):
        return flags
    return flags | WHOLE if type(reward) is int and abs(reward) <= EXACT else -1


def number(value: Any) -> Any:
    """Return a number of any type as one of Python, and anything else as its text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.size == 1 and value.dtype.kind in "biuf":
        return value.item()
    return repr(value)[:200]


def plain(value: Any, depth: int = 0) -> Any:
    """Return what JSON can hold of an info dict."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value[:1000]
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.size <= 1000:
        return value.tolist()
    if depth < 3 and isinstance(value, dict):
        items = [(key, plain(child, depth + 1)) for key, child in value.items() if isinstance(key, str)]
        return {key: child for key, child in items if child is not None}
    if depth < 3 and isinstance(value, (list, tuple)) and len(value) <= 1000:
        return [plain(child, depth + 1) for child in value]
    return None if depth else repr(value)[:200]


# --- Answers ---------------------------------------------------------------------------------------------


class Server:
    """Answers the requests of one trainer until its connection ends."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.envs: Dict[int, Environment] = {}
        self._rows = bytearray()
        self._numbers_of_infos: List[float] = []
        self._answers: List[Header] = []
        self._arrays: List[np.ndarray] = []
        self._last = b""  # header of the last step; most are equal
        self._kind: Kind = ("int64", ())
        self._numbers: Tuple[int, ...] = ()

    def run(self) -> None:
        while True:
            try:
                text, data = self.channel.take()
            except (EOFError, OSError):
                break
            if text.startswith(STEP):
                self._steps(text, data)
            else:
                header, _ = read_json(text, data)
                self._answer(header.get("env"), self._do, header)
            self._send()
        for environment in self.envs.values():
            environment.interface.close()

    def _steps(self, text: bytes, data: bytes) -> None:
        if text != self._last:
            self._kind, self._numbers = read_step_header(text)
            self._last = text
        began = time.monotonic()
        for env, action in zip(self._numbers, read_actions(self._kind, len(self._numbers), data)):
            try:
                flags, reward, header, arrays = self.envs[env].step(action)
            except BaseException as error:
                flags, reward, header, arrays = -1, None, failure(error), []
            if flags >= 0:
                self._rows += ROW_FORMAT.pack(env, flags, reward)
                self._numbers_of_infos += header
            else:
                self._add(env, header, arrays)
            now = time.monotonic()
            if now - began > TOGETHER_S:
                self._send()
                began = now

    def _do(self, header: Header) -> Tuple[Header, Sequence[np.ndarray]]:
        op, env = header["op"], header["env"]
        if op == "open":
            self.envs[env] = Environment(header["make"])
            return self.envs[env].describe(), ()
        environment = self.envs[env]
        if op == "share":
            environment.share(header["path"], header["size"])
            return {}, ()
        if op == "reset":
            return environment.reset(header["seed"], header.get("options"))
        if op == "render":
            frame = np.asarray(environment.interface.render())
            return ({}, (frame,)) if frame.dtype.name in DTYPES else ({}, ())
        if op == "close":
            self.envs.pop(env).interface.close()
            return {}, ()
        raise ValueError("no request %r" % op)

    def _answer(self, env: Any, function: Callable[..., Any], *args: Any) -> None:
        try:
            header, arrays = function(*args)
        except BaseException as error:
            header, arrays = failure(error), ()
        self._add(env, header, arrays)

    def _add(self, env: Any, header: Header, arrays: Sequence[np.ndarray]) -> None:
        self._answers.append(dict(header, env=env, arrays=len(arrays)))
        self._arrays += arrays

    def _send(self) -> None:
        """Send the answers so far: rows, and the others."""
        message = b""
        if self._rows:
            numbers = self._numbers_of_infos
            message = self.channel.framed(ROW + self._rows, struct.pack("<%dd" % len(numbers), *numbers))
            self._rows.clear()
            numbers.clear()
        if self._answers:
            message += self.channel.framed(*json_message({"answers": self._answers}, self._arrays))
            self._answers, self._arrays = [], []
        if message:
            self.channel.sock.sendall(message)


def failure(error: BaseException) -> Header:
    """Return an exception as the header of an answer."""
    if isinstance(error, Unusable):
        return {"unusable": str(error)}
    header = {"error": traceback.format_exc()[-20000:]}
    names = [c.__name__ for c in type(error).__mro__]
    if isinstance(error, ModuleNotFoundError):
        header["missing"] = str(error.name)
    elif "LabError" in names or (isinstance(error, LookupError) and str(error).startswith("no environment")):
        header["sentence"] = str(error)
    return header


def serve(sock: socket.socket) -> None:
    """Speak to the trainer at the other end of this socket, which is the same user's or has the token."""
    threading.Thread(target=_end_with_trainer, args=(sock.fileno(),), daemon=True).start()
    Server(Channel(sock)).run()


def introduction() -> Header:
    version = ".".join(map(str, sys.version_info[:3]))
    return {
        "hello": NAME,
        "protocol": PROTOCOL,
        "python": version,
        "numpy": np.__version__,
        "pid": os.getpid(),
    }


def _end_with_trainer(descriptor: int) -> None:
    """End this process soon after the connection, even if a call of an environment never returns."""
    closed = select.poll()
    closed.register(descriptor, getattr(select, "POLLRDHUP", 0))
    closed.poll()
    time.sleep(EXIT_S)
    os._exit(1)


# --- Other machines --------------------------------------------------------------------------------------


def admit(sock: socket.socket, token: str) -> bool:
    """Exchange proofs with a trainer that connected; return whether it may use this worker."""
    channel = Channel(sock, limit_header=4096, limit_data=0)
    channel.limit_sends(HANDSHAKE_S)
    mine = new_nonce()
    channel.send({"hello": NAME, "protocol": PROTOCOL, "nonce": mine, "token": bool(token)})
    answer, _ = channel.receive(HANDSHAKE_S)
    theirs = answer.get("nonce")
    if answer.get("hello") != NAME or answer.get("protocol") != PROTOCOL or not isinstance(theirs, str):
        channel.send({"refused": "the worker speaks version %d of the protocol" % PROTOCOL})
        return False
    if token and not same(answer.get("proof"), proof(token, "trainer", mine, theirs)):
        channel.send({"refused": "the token is not the worker's"})
        return False
    channel.send(dict({"proof": proof(token, "worker", mine, theirs)} if token else {}, admitted=True))
    return True


def listen(address: str, token: str) -> None:
    """Wait for trainers; each connection has a process of its own, so that a crash ends only that one."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdigit():
        sys.exit("--listen %s: write HOST:PORT, for example 127.0.0.1:7000" % address)
    if not token and not is_loopback(host):
        sys.exit(
            "--listen %s: beyond loopback a token is needed: set %s or --token-file"
            % (address, TOKEN_VARIABLE)
        )
    if token and len(token) < MIN_TOKEN:
        sys.exit("the token has %d characters: use at least %d random ones" % (len(token), MIN_TOKEN))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, int(port)))
    server.listen(64)
    print("%s %d listens at %s:%d" % (NAME, PROTOCOL, host, server.getsockname()[1]), flush=True)
    places = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def host_one(sock: socket.socket) -> None:
        try:
            if not admit(sock, token):
                return
            os.set_inheritable(sock.fileno(), True)
            environ = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
            command = [sys.executable, os.path.abspath(__file__), "--fd", str(sock.fileno())]
            child = subprocess.Popen(
                command, pass_fds=(sock.fileno(),), env=environ, stdin=subprocess.DEVNULL
            )
            sock.close()
            child.wait()
        except (OSError, EOFError, Garbled, Stalled):
            pass
        finally:
            sock.close()
            places.release()

    while True:
        sock, _ = server.accept()
        if not places.acquire(blocking=False):
            sock.close()
            continue
        threading.Thread(target=host_one, args=(sock,), daemon=True).start()


def read_token(path: Optional[str]) -> str:
    if path:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    return os.environ.get(TOKEN_VARIABLE, "").strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Worker of RL Lab for environments in this interpreter.")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="wait for trainers at this address; port 0: any"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="file with the token (default: $%s)" % TOKEN_VARIABLE
    )
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))  # its modules are not for environments
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != here]
    if args.listen:
        listen(args.listen, read_token(args.token_file))
    if args.fd is None:
        parser.error("use --listen HOST:PORT")
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):  # the trainer decides when to stop
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    sock = socket.socket(fileno=args.fd)
    sock.setblocking(True)
    Channel(sock).send(introduction())
    if args.output is not None:  # until now it went to the trainer, for the message of a failed start
        os.dup2(args.output, 1)
        os.dup2(args.output, 2)
        os.close(args.output)
    serve(sock)


if __name__ == "__main__":
    main()
