"""Agents to take away: seconds from `rl-lab play example://…` to the first frame, and what export changes.

With --run RUN: the run's agent and its exports in float32 and bfloat16 act on the same observations, those of episodes
of an exported agent. Needs the extra play.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

import rl_lab
from rl_lab.buffers.formats.files import EpisodeFiles
from rl_lab.hub import examples


def run(argv: list[str]) -> list[dict]:
    parser = argparse.ArgumentParser(prog="rl-lab bench agents")
    parser.add_argument("--starts", type=int, default=3, help="times that each command is started")
    parser.add_argument("--run", type=Path, help="a run whose exports are compared with it")
    args = parser.parse_args(argv)
    rows = [
        {"name": "agents/load_average", "value": os.getloadavg()[0], "unit": "processes that want a core"}
    ]
    for name in examples():
        times = [first_frame(name) for _ in range(args.starts)]
        row = {"name": f"agents/{name}/first_frame", "value": statistics.median(times), "unit": "s"}
        rows.append({**row, "all": times})
    return rows + (exports(args.run) if args.run else [])


def first_frame(name: str) -> float:
    """Seconds from the command to the first frame that a page receives."""
    from websockets.sync.client import connect

    command = [sys.executable, "-m", "rl_lab", "play", f"example://{name}", "-w", "--web", "--port", "0"]
    begin = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            address = next(line.split()[-1] for line in process.stdout if "http://" in line)
            urllib.request.urlopen(address, timeout=60).read()
            with connect(address.replace("http", "ws") + "live", origin=address.rstrip("/")) as live:
                while not isinstance(live.recv(timeout=60), bytes):
                    pass
            return time.perf_counter() - begin
        finally:
            process.terminate()


def exports(source: Path) -> list[dict]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        own: list[np.ndarray] = []
        for dtype in ("float32", "bfloat16"):
            target = Path(folder) / dtype
            size = rl_lab.export(source, target, dtype=dtype, episodes=0, starts=4)["bytes"]
            files = EpisodeFiles(sorted((Path(folder) / "float32" / "media/episodes/test").glob("*.npz")))
            own = own or actions(rl_lab.load_agent(source, device="cpu"), files)
            found = actions(rl_lab.load_agent(target, device="cpu"), files)
            same = float(np.mean([np.array_equal(a, b) for a, b in zip(own, found)]))
            rows += [
                {"name": f"agents/{dtype}/equal_actions", "value": same, "unit": "share", "steps": len(own)},
                {"name": f"agents/{dtype}/weights", "value": size / 1e6, "unit": "MB"},
            ]
    return rows


def actions(agent: Any, files: EpisodeFiles) -> list[np.ndarray]:
    """The agent's most likely actions on the observations of the episodes."""
    found = []
    for index in range(len(files)):
        episode = files.episode(index)
        agent.reset(index)
        single = len(agent.spec.observations) == 1
        name = next(iter(agent.spec.observations))
        for step in range(len(episode)):
            obs = {(name if single else key): value[step] for key, value in episode.observations.items()}
            found.append(np.asarray(agent.act(obs, step == 0, scaled=True)))
    return found
