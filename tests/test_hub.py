"""hf:// addresses and `rl-lab push`, against a local stand-in of the hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import rl_lab
from rl_lab import hub
from rl_lab.errors import LabError
from rl_lab.hub import EXAMPLES, examples
from tests.hub_server import TOKEN, Hub, stand_in

pytest.importorskip("huggingface_hub")

ACT = """
import numpy as np, rl_lab, sys
for address in sys.argv[1:]:
    agent = rl_lab.load_agent(address)
    rng = np.random.default_rng(0)
    obs = {n: np.zeros(s.shape, s.dtype) if s.dtype != "uint8" else rng.integers(0, 256, s.shape, dtype=np.uint8)
           for n, s in agent.spec.observations.items()}
    print([agent.act(obs, sample=True, scaled=True).tolist() for _ in range(8)], agent.step)
"""
MESSAGES = """
import os, rl_lab, rl_lab.errors, sys
for address in sys.argv[1:]:
    try:
        rl_lab.load_agent(address)
    except rl_lab.errors.LabError as error:
        print(error)
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
rl_lab.load_agent("hf://a/b")
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with stand_in() as found:
        yield found


def call(
    server: Hub, cache: Path, *words: str, token: str = TOKEN, **extra: str
) -> subprocess.CompletedProcess:
    """Run a command of its own process: the library reads its environment variables at import."""
    environ = {**os.environ, "HF_ENDPOINT": server.address, "HF_HUB_OFFLINE": "0", "RL_LAB_CACHE": str(cache)}
    environ |= {"HF_TOKEN": token, "HF_HOME": str(cache / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", **extra}
    command = [sys.executable, "-m", "rl_lab", *words] if words[0] != "-c" else [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environ, cwd=cache, timeout=120)


def test_push_load_and_play(server: Hub, tmp_path: Path):
    name = examples()[0]
    local = tmp_path / "agent"
    shutil.copytree(EXAMPLES / name, local)
    (local / "config" / "signature.json").write_text("{}")
    (local / "notes.txt").write_text("private")
    refused = call(server, tmp_path, "push", str(local), "me/dreams", token="")
    assert refused.returncode == 1 and "set HF_TOKEN" in refused.stderr, refused.stderr
    pushed = call(server, tmp_path, "push", str(local), "me/dreams", "--private")
    assert pushed.returncode == 0, pushed.stderr
    sent = set(server.files["me/dreams"])
    assert {"agent.safetensors", "config.yaml", "config/spec.json", "README.md"} <= sent
    assert "notes.txt" not in sent and "config/signature.json" not in sent
    assert b"hf://me/dreams" in server.files["me/dreams"]["README.md"] and "me/dreams" in server.private

    commit = server.commit("me/dreams")
    addresses = ["hf://me/dreams", f"hf://me/dreams@{commit}"]
    loaded = call(server, tmp_path, "-c", ACT, str(local), *addresses)
    assert loaded.returncode == 0, loaded.stderr
    here, *there = loaded.stdout.splitlines()
    assert there == [here, here] and "8000" in here
    folder = tmp_path / "hub" / "me--dreams@main"
    assert not [file for file in folder.rglob("*") if file.is_symlink()]
    before = len(server.requests)
    played = call(server, tmp_path, "play", "hf://me/dreams", "-w", "--video", "--steps", "3")
    assert played.returncode == 0, played.stderr
    assert list(tmp_path.glob("me--dreams@main-output/media/recordings/*"))
    assert not [line for line in server.requests[before:] if line.startswith("GET") and "safetensors" in line]
    offline = call(server, tmp_path, "-c", ACT, "hf://me/dreams", HF_HUB_OFFLINE="1")
    assert offline.stdout.splitlines() == [here], offline.stderr


def test_a_strangers_repository_cannot_name_code(server: Hub, tmp_path: Path):
    files = {
        file.relative_to(EXAMPLES / examples()[0]).as_posix(): file.read_bytes()
        for file in (EXAMPLES / examples()[0]).rglob("*")
        if file.is_file()
    }
    config = yaml.safe_load(files["config.yaml"])
    config["components"]["encoder"]["_target_"] = "torch.hub.load"
    files["config.yaml"] = yaml.safe_dump(config).encode()
    files |= {"sitecustomize.py": b"raise SystemExit(7)", "config/signature.json": b"{}", "torch.py": b"1/0"}
    server.files["bad/agent"] = files
    done = call(server, tmp_path, "play", "hf://bad/agent", "-w", "--video", "--steps", "2")
    assert done.returncode == 1 and "components.encoder._target_ is 'torch.hub.load'" in done.stderr
    names = {file.name for file in (tmp_path / "hub" / "bad--agent@main").rglob("*") if file.is_file()}
    assert not names & {"sitecustomize.py", "signature.json", "torch.py"}


def test_messages(server: Hub, tmp_path: Path):
    server.files["some/model"] = {"README.md": b"# x", "pytorch_model.bin": b"0"}
    expected = {
        "hf://nobody/nothing": "there is no such repository",
        "hf://some/model": "is no agent of RL Lab",
        "hf://some/model@nowhere": "has no revision 'nowhere'",
    }
    done = call(server, tmp_path, "-c", MESSAGES, *expected)
    for (address, text), line in zip(expected.items(), done.stdout.splitlines(), strict=True):
        assert line.startswith(address.partition("@")[0]) and text in line, line
    assert "LabError: hf://a/b: " in done.stderr, done.stderr


@pytest.mark.parametrize(
    "address", ["hf://name", "hf://../x", "hf://a/b/c", "hf://a/b@", "hf://a/b@../c", "hf://a b/c"]
)
def test_addresses_of_another_form(address: str):
    with pytest.raises(LabError, match=r"is no address on the hub: write hf://owner/name"):
        rl_lab.load_agent(address)


def test_missing_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(LabError, match=r"hf:// needs huggingface_hub: pip install .*\[hub\]"):
        hub.download("missing/package", "main")
