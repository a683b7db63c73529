"""The other side of the protocol may be missing, wrong, hostile or slow: one sentence each, and nothing hangs."""

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rl_lab.config.trust import UntrustedError, check_environment
from rl_lab.environments import make_env
from rl_lab.environments.interpreters import connection, peer, worker
from rl_lab.environments.interpreters.places import place_of
from rl_lab.errors import ConfigError, LabError, MissingPackageError
from tests.environments import sample_envs
from tests.environments.interpreters.test_far_environments import far_peers
from tests.environments.test_vector import assert_same, make, roll

HERE = sys.executable
TOKEN = "a token of twenty-six chars"


@pytest.fixture(autouse=True)
def _folder(monkeypatch):
    monkeypatch.chdir(Path(sample_envs.__file__).parent)
    monkeypatch.delenv(worker.TOKEN_VARIABLE, raising=False)


def message(header, data=b""):
    text = json.dumps(header).encode()
    return worker.LENGTHS.pack(len(text), len(data)) + text + data


def binary(header, data=b""):
    return worker.LENGTHS.pack(len(header), len(data)) + header + data


def row(env, flags, reward):
    return worker.ROW + worker.ROW_FORMAT.pack(env, flags, reward)


ROW = row(0, 0, 1.0)
HELLO = {"hello": worker.NAME, "protocol": worker.PROTOCOL, "pid": 1}
OPENED = {"env": 0, "arrays": 0, "game": False, "seeding": "reset", "action_repeat": 1}
BOX = {"kind": "Box", "shape": [2], "dtype": "float32", "low": -1.0, "high": 1.0}


def answers(*items):
    return message({"answers": list(items)})


def impostor(folder, *parts, then="sleep"):
    """An executable that sends these bytes instead of a worker's messages, one at each request."""
    file = folder / "python"
    end = "time.sleep(60)" if then == "sleep" else "sys.exit(7)"
    file.write_text(
        f"#!{HERE}\nimport os, sys, time\nsock = int(sys.argv[sys.argv.index('--fd') + 1])\n"
        f"for number, part in enumerate({parts!r}):\n"
        "    if number:\n        os.read(sock, 1 << 20)\n"
        f"    os.write(sock, part)\n{end}\n"
    )
    file.chmod(0o755)
    return str(file)


def refused(match, kind=ConfigError, task="dummy/discrete", **options):
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        make_env(task, 1, workers=0, **options)
    assert time.monotonic() - began < 20
    text = str(caught.value)
    assert re.match(match, text), text
    assert "\n" not in text
    return text


# --- Interpreters of this machine ---


def test_wrong_paths(tmp_path):
    refused(r"environment\.python=/nowhere/python: there is no such file", python="/nowhere/python")
    file = tmp_path / "file"
    file.write_text("no program")
    refused(r"environment\.python=.*file: this file is not executable", python=str(file))
    file.chmod(0o755)
    refused(r"environment\.python=.*file cannot be started: Exec format error", python=str(file))
    refused(
        r"environment\.python=/bin/(ls|true) is no Python 3\.8 or newer with NumPy: it ended",
        python="/bin/ls",
    )
    refused(r"environment\.python=metawrld: no interpreter has this name.*'metaworld'", python="metawrld")


def test_interpreter_without_numpy(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {HERE} -I -S "$@"\n')
    bare.chmod(0o755)
    refused(
        r"environment\.python=.* has no NumPy.*-m pip install numpy", MissingPackageError, python=str(bare)
    )


def test_missing_package_and_unknown_names():
    text = refused(
        r"environment\.python=.*needs the package 'a_package_that_nobody_has', which is not installed there",
        MissingPackageError,
        "foreign_envs:NeedsPackage",
        python=HERE,
    )
    assert text.endswith(f"{HERE} -m pip install a_package_that_nobody_has")
    refused(
        r"environment\.python=.*no environment 'Nothing-v3' is registered", task="Nothing-v3", python=HERE
    )
    refused(
        r"environment\.python=.*no environment 'Nobody' is registered",
        task="foreign_envs:Nobody",
        python=HERE,
    )
    refused(r"environment\.python=.*no task 'dummy/discret'", task="dummy/discret", python=HERE)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([message({**HELLO, "protocol": 1})], "speaks version 1 of the protocol, and this RL Lab version 2"),
        ([binary(worker.STEP + b"123456")], "a header that cannot be read"),
        ([message(HELLO), binary(worker.ROW)], "rows of 0 bytes"),
        ([message(HELLO), binary(ROW[:-1])], "rows of 12 bytes"),
        ([message(HELLO), binary(ROW + b"0")], "rows of 14 bytes"),
        ([message(HELLO), binary(ROW, b"1234567")], "numbers of 7 bytes"),
        ([message(HELLO), binary(ROW, b"12345678")], "numbers that no row has"),
        ([message(HELLO), binary(row(5, 0, 1.0))], "a row for no environment"),
        ([message(HELLO), binary(row(0, 32, 1.0))], "a row with the flags 32"),
        ([message(HELLO), binary(row(0, worker.WHOLE, 0.5))], "a row with a reward that is no integer"),
        ([message(HELLO), binary(row(0, worker.WHOLE, np.nan))], "a row with a reward that is no integer"),
        ([message(HELLO), binary(row(0, worker.NUMBERS, 1.0))], "a row without its numbers"),
        ([message(HELLO), binary(ROW)], "spaces that cannot be read"),
        ([message(HELLO), worker.LENGTHS.pack(worker.MAX_HEADER + 1, 0) + ROW], "a message of 4194305 bytes"),
        ([message(HELLO), binary(worker.STEP + b"123456")], "a header that cannot be read"),
        ([message({"hello": "somebody"})], "no introduction of a worker"),
        ([b"SSH-2.0-OpenSSH_9.2p1\r\n"], "sent a garbled message: a message of"),
        ([message(HELLO), b"\xff" * 64], "sent a garbled message: a message of"),
        ([message(HELLO), worker.LENGTHS.pack(3, 0) + b"[1]"], "a header that is no object"),
        ([message(HELLO), worker.LENGTHS.pack(3, 0) + b"{x}"], "a header that cannot be read"),
        ([message(HELLO), worker.LENGTHS.pack(4000, 0) + b"[" * 4000], "a header that cannot be read"),
        ([message(HELLO), message({"answers": 3})], "no answers"),
        ([message(HELLO), answers({**OPENED, "env": 9})], "an answer for no environment"),
        ([message(HELLO), answers({**OPENED, "arrays": 4})], "an answer without its arrays"),
        ([message(HELLO), answers({**OPENED, "observation": BOX})], "spaces that cannot be read"),
        (
            [message(HELLO), answers({**OPENED, "observation": {**BOX, "shape": [2**40]}, "action": BOX})],
            "spaces that cannot be read",
        ),
        (
            [message(HELLO), answers({**OPENED, "observation": {**BOX, "dtype": "object"}, "action": BOX})],
            "spaces that cannot be read",
        ),
        (
            [message(HELLO), message({"arrays": [["object", [1]]]}, b"12345678")],
            "an array of an unknown kind",
        ),
        ([message(HELLO), message({"arrays": [["int8", [-1]]]}, b"1")], "an array of an unknown kind"),
        ([message(HELLO), message({"arrays": [["int64", [2]]]}, b"12345678")], "arrays that are larger"),
        ([message(HELLO), message({"arrays": []}, b"12345678")], "data that no array has"),
        ([message(HELLO)], "did not answer for 1 s"),
    ],
)
def test_impostors(tmp_path, parts, why, monkeypatch):
    monkeypatch.setattr(peer, "FIRST_ANSWER_FACTOR", 1)
    python = impostor(tmp_path, *parts)
    text = refused(r"environment\.python=", LabError, python=python, timeout=1.0)
    assert why in text
    assert not peer._peers


def test_peer_that_ends_or_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "START_S", 0.5)
    refused(r"environment\.python=.* it did not answer for 0\.5 s", python=impostor(tmp_path))
    monkeypatch.setattr(connection, "START_S", 20)
    python = impostor(tmp_path, message(HELLO), b"", then="exit")
    refused(r"environment\.python=.*: the worker ended with exit code 7", LabError, python=python)


def test_garbled_rows_are_a_failure_of_the_process(tmp_path):
    opened = {**OPENED, "observation": BOX, "action": {"kind": "Discrete", "n": 2, "start": 0}}
    reset = {"env": 0, "arrays": 0, "info": {}}
    python = impostor(
        tmp_path,
        message(HELLO),
        answers(opened),
        answers({"env": 0, "arrays": 0}),
        answers(reset),
        answers(reset),
    )
    env = peer.far_env(
        "task",
        place_of(python, None),
        "task",
        module=None,
        options={},
        render=False,
        own_time_limit=True,
        seed_argument=None,
    )
    obs, _ = env.reset(seed=1)
    assert obs.shape == (2,)
    with pytest.raises(LabError, match="sent a garbled message: a step without a row"):
        env.step(1)
    env.close()


def test_workers_end_with_the_trainer():
    code = (
        "import sys, numpy as np, time; from rl_lab import make_env\n"
        "env = make_env('sample_envs:Fails', 1, workers=0, python=sys.executable); env.reset()\n"
        "print(env.pool.workers[0]._runner.slots[0].env.unwrapped.peer.pid, flush=True)\n"
        "env.step(np.array([3]))\n"  # hangs for a minute
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(worker.__file__).parents[3])}
    trainer = subprocess.Popen([HERE, "-c", code], stdout=subprocess.PIPE, text=True, env=environ)
    pid = int(trainer.stdout.readline())
    time.sleep(0.3)
    trainer.kill()
    trainer.wait()
    end = time.monotonic() + worker.EXIT_S + 5
    while time.monotonic() < end and Path(f"/proc/{pid}/stat").exists() and not ended(pid):
        time.sleep(0.1)
    assert ended(pid)


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_no_file_of_shared_memory_is_left():
    before = set(Path("/dev/shm").glob("rl-lab-*"))
    with make_env("dummy/dict", 2, workers=0, python=HERE) as env:
        env.reset()
        assert all(slot.env.unwrapped._memory is not None for slot in env.pool.workers[0]._runner.slots)
        assert set(Path("/dev/shm").glob("rl-lab-*")) == before


def test_without_shared_memory_rows_are_in_the_messages(monkeypatch):
    monkeypatch.setattr(peer.FarEnv, "_share", lambda self: None)
    with make("dummy/dict", workers=0) as here, make("dummy/dict", workers=0, python=HERE) as there:
        assert_same(roll(here), roll(there))


# --- Other machines ---


class Listener:
    """`worker.py --listen` on loopback."""

    def __init__(self, token="", port=0):
        environ = {
            **os.environ,
            worker.TOKEN_VARIABLE: token,
            "PYTHONPATH": str(Path(worker.__file__).parents[3]),
        }
        command = [HERE, worker.__file__, "--listen", f"127.0.0.1:{port}"]
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline().rpartition(":")[2])
        self.host = f"tcp://127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def test_another_host(monkeypatch):
    """Rows, exact resume, and `kill -9` of the far process and of all of the far side."""
    monkeypatch.setenv(worker.TOKEN_VARIABLE, TOKEN)
    with Listener(TOKEN) as listener:
        with (
            make("dummy/dict", workers=0) as here,
            make("dummy/dict", workers=0, host=listener.host) as there,
        ):
            assert_same(roll(here), roll(there))
            assert there.set_state(here.get_state()) == []
            there.reset()
            (far,) = far_peers(there)
            os.kill(far.pid, signal.SIGKILL)
            said = []
            there.listen(said.append)
            *_, infos = there.step(np.zeros((3, 2), np.int64))
            assert sorted(infos["closed"]) == [0, 1, 2] and there.restarts == 1
            assert "closed its connection" in said[0]
            there.step(np.zeros((3, 2), np.int64))
            assert there.is_first.all()

            os.kill(far_peers(there)[0].pid, signal.SIGKILL)
            listener.__exit__()
            again = []
            later = threading.Timer(1.0, lambda: again.append(Listener(TOKEN, listener.port)))
            later.start()
            there.step(np.zeros((3, 2), np.int64))
            there.step(np.zeros((3, 2), np.int64))  # waits until the machine is back
            assert there.restarts == 2 and there.is_first.all()
            later.join()
        again[0].__exit__()


def test_tokens(monkeypatch):
    with Listener(TOKEN) as listener:
        refused(r"environment\.host=.*wants a token: set RL_LAB_ENVIRONMENT_TOKEN", host=listener.host)
        monkeypatch.setenv(worker.TOKEN_VARIABLE, TOKEN + "x")
        refused(
            r"environment\.host=.*refused the connection: the token is not the worker's", host=listener.host
        )
    with Listener() as listener:
        refused(r"environment\.host=.*has no token", host=listener.host)
        monkeypatch.delenv(worker.TOKEN_VARIABLE)
        make_env("dummy/discrete", 1, workers=0, host=listener.host).close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        unused = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    text = r"environment\.host=.*cannot be reached \(Connection refused\): start worker\.py --listen there"
    refused(text, task="dummy/count", host=unused)


def test_beyond_loopback_a_token_is_needed_on_both_sides():
    refused(
        r"environment\.host=tcp://10\.1\.2\.3:7000 is beyond loopback and needs a token",
        host="tcp://10.1.2.3:7000",
    )
    refused(r"environment\.host=tcp://simulators:7000 is beyond loopback", host="tcp://simulators:7000")
    for host in (
        "127.0.0.1:7000",
        "tcp://127.0.0.1",
        "tcp://:80",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:99999",
    ):
        refused(r"environment\.host=.*write tcp://HOST:PORT", host=host)
    for address, token, why in (
        ("0.0.0.0:0", "", "a token is needed"),
        ("127.0.0.1:0", "short", "use at least 16"),
    ):
        command = [HERE, worker.__file__, "--listen", address]
        environ = {**os.environ, worker.TOKEN_VARIABLE: token}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20)
        assert done.returncode == 1 and why in done.stderr


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "did not answer for 0.5 s"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "sent a garbled message"),
        (message({**HELLO, "protocol": 9, "nonce": "0"}), "speaks version 9 of the protocol"),
        (
            message({**HELLO, "nonce": "0", "token": True}) + message({"admitted": True}),
            "does not have the token",
        ),
    ],
)
def test_impostors_elsewhere(said, why, monkeypatch):
    monkeypatch.setattr(worker, "HANDSHAKE_S", 0.5)
    monkeypatch.setenv(worker.TOKEN_VARIABLE, TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            sock, _ = server.accept()
            sock.sendall(said)
            time.sleep(0.8)
            sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        text = refused(r"environment\.host=", LabError, host=f"tcp://127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert why in text


def test_worker_refuses_strangers_before_it_starts_anything():
    with Listener(TOKEN) as listener:
        for said in (b"GET / HTTP/1.1\r\n\r\n", message({**HELLO, "nonce": "1", "proof": "0" * 64}), b""):
            with socket.create_connection(("127.0.0.1", listener.port)) as sock:
                sock.settimeout(20)
                channel = worker.Channel(sock)
                mine, _ = channel.receive(20)
                assert mine["token"] is True and "python" not in mine
                sock.sendall(said)
                if said:
                    with pytest.raises((EOFError, OSError)):
                        while True:
                            answer, _ = channel.receive(20)
                            assert set(answer) == {"refused"}
        import psutil

        assert psutil.Process(listener.process.pid).children() == []


def test_proofs_depend_on_side_token_and_nonces():
    proofs = {
        worker.proof(*words) for words in (("t", "a", "1", "2"), ("u", "a", "1", "2"), ("t", "b", "1", "2"))
    }
    proofs |= {worker.proof("t", "a", "2", "1"), worker.proof("t", "a", "12", "")}
    assert len(proofs) == 5 and not worker.same(None, "x") and worker.same("x", "x")


# --- Binary messages ---


@pytest.mark.parametrize("dtype", ["int64", "float32", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (0,)])
def test_steps_round_trip(dtype, shape):
    actions = (np.arange(2 * int(np.prod(shape))).reshape(2, *shape) % 3).astype(dtype)
    kind, numbers = worker.read_step_header(worker.step_header((dtype, shape), (7, 2**32 - 1)))
    assert (kind, numbers) == ((dtype, shape), (7, 2**32 - 1))
    read = worker.read_actions(kind, 2, actions.tobytes())
    assert read.dtype == actions.dtype and read.shape == actions.shape and (read == actions).all()
    for data in (actions.tobytes() + b"0", actions.tobytes()[:-1]):
        if len(data) != actions.nbytes:
            with pytest.raises(worker.Garbled, match="actions of"):
                worker.read_actions(kind, 2, data)


def test_garbled_headers_of_steps():
    header = worker.step_header(("float32", (3,)), (0, 1))
    for cut in range(len(header)):
        with pytest.raises(worker.Garbled, match=f"a step of {cut} bytes"):
            worker.read_step_header(header[:cut])
    with pytest.raises(worker.Garbled, match="a step of"):
        worker.read_step_header(header + b"0")
    for form in ((99, 0, 1), (0, 33, 1), (0, 0, 0), (0, 0, worker.MAX_STEPS + 1)):
        with pytest.raises(worker.Garbled, match="a step of an unknown kind"):
            worker.read_step_header(worker.STEP + worker.STEP_KIND.pack(*form))


class Numbers:
    """An interface whose steps return these (reward, terminated, truncated, info)."""

    seeding, game, env = "reset", None, None
    spaces = ({"kind": "Dict", "spaces": []}, {"kind": "Discrete", "n": 2, "start": 0})

    def __init__(self, results):
        self.results = iter(results)

    def step(self, action):
        return ({}, *next(self.results))


def test_rows_round_trip(monkeypatch):
    """Rewards, flags and infos arrive with value and type, whichever message has them."""
    flat = {"log/a": 0.5, "log/b": 0.0}
    results = [
        (0.1, False, True, {}),
        (-(2**53), True, False, {}),
        (2**60, False, False, {}),
        (np.float32(0.1), np.bool_(True), 1, {}),
        ("no", False, False, {}),
        (float("inf"), False, False, {"object": object()}),
        (0.0, False, False, flat),
        (0.0, False, False, {**flat, "log/a": -0.0}),
        (1, False, False, {**flat, "log/b": 7}),
        (1.0, False, False, {**flat, "log/b": 9}),
        (1.0, False, False, {**flat, "log/b": 2**60}),
        (1.0, False, False, {"text": "x", "array": np.arange(2)}),
        (1.0, False, False, {"ok": np.bool_(True), "count": np.int64(3), "half": np.float32(0.5)}),
        (1.0, False, False, {"ok": np.bool_(False), "count": np.int64(4), "half": np.float32(0.1)}),
    ]
    binary_ones = [0, 1, 5, 7, 9, 13]
    monkeypatch.setattr(worker, "make", lambda wanted: Numbers(results))
    ours, theirs = socket.socketpair()
    server = worker.Server(worker.Channel(theirs))
    server.envs[4] = worker.Environment({})
    near = peer.Peer.__new__(peer.Peer)
    near._answers, near._forms = {4: peer.deque()}, {}
    channel = worker.Channel(ours)
    header = worker.step_header(("int64", ()), (4,))
    for number, (reward, terminated, truncated, info) in enumerate(results):
        server._steps(header, np.int64(1).tobytes())
        server._send()
        text, data = channel.take(5.0)
        assert text.startswith(worker.ROW) == (number in binary_ones), number
        near._sort(text, data)
        answer, arrays = near._answers[4].popleft()
        expected = [worker.number(value) for value in (reward, terminated, truncated)]
        assert repr(answer["row"]) == repr(json.loads(json.dumps(expected))) and arrays == []
        assert repr(answer.get("info", {})) == repr(json.loads(json.dumps(worker.plain(info))))
    with pytest.raises(worker.Garbled, match="an info with numbers of another type"):
        near._sort(row(4, worker.NUMBERS, 0.0), np.full(3, np.nan).tobytes())
    with pytest.raises(worker.Garbled, match="a row without its numbers"):
        near._sort(row(4, worker.NUMBERS, 0.0), np.zeros(2).tobytes())
    ours.close(), theirs.close()


def test_silence_is_noticed_after_each_limit():
    ours, theirs = socket.socketpair()
    channel = worker.Channel(ours)
    for limit in (0.05, 0.2):
        began = time.monotonic()
        with pytest.raises(worker.Stalled):
            channel.take(limit)
        assert limit * 0.9 <= time.monotonic() - began < limit + 5
    theirs.sendall(binary(ROW)[:-1])  # a message that is cut off is silence, too
    with pytest.raises(worker.Stalled):
        channel.take(0.05)
    theirs.sendall(ROW[-1:] + b"\xff" * 8)
    assert channel.take(0.05) == (ROW, b"")
    with pytest.raises(worker.Garbled, match="a message of"):
        channel.take(0.05)
    ours.close(), theirs.close()


# --- The file itself ---


def test_worker_is_one_file_for_old_interpreters():
    text = Path(worker.__file__).read_text()
    tree = ast.parse(text, feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).partition(".")[0])
    assert imported - sys.stdlib_module_names == {"numpy"}
    newer = (
        "removeprefix",
        "removesuffix",
        "zip(*",
        "strict=",
        "match ",
        "tomllib",
        "math.lcm",
        "functools.cache\n",
    )
    assert not [word for word in newer if word in text]


def test_configs_of_strangers_name_no_interpreter():
    stranger = {"task": "CartPole-v1", "suite": None}
    check_environment({"environment": {**stranger, "python": None, "host": None, "seed_argument": None}})
    for key, value in (("python", "/tmp/python"), ("python", "./python"), ("host", "tcp://127.0.0.1:7000")):
        with pytest.raises(UntrustedError, match=f"environment.{key} is "):
            check_environment({"environment": {**stranger, key: value}})
    with pytest.raises(UntrustedError, match=r"environment\.tasks is "):
        check_environment(
            {"environment": {"task": "several", "suite": "multitask", "tasks": [{"task": "CartPole-v1"}]}}
        )
