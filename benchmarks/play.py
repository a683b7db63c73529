"""Frames per second of web play with one page and with ten, and the latency from key press to frame.

A server (`rl-lab play RUN --web`) runs in a separate process; this process acts as the browser, without
drawing. RUN is by default a briefly trained Dreamer of about a million parameters on 64×64 images of a
MiniGrid room: training time does not affect the speed. The agent plays as fast as the session allows (at most
60 steps per second). For the latency a key is pressed in the dream, and the time stops when the frame with
its effect arrives.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from rl_lab.tools.play.clients import decode_frame

MODEL = ["depth=8", "deter=256", "units=96", "stoch=16"]
WARM_UP = 1.0  # seconds


def run(argv: list[str]) -> list[dict[str, Any]]:
    """Return rows: frames/s to one page and to each of ten, latency in ms."""
    parser = argparse.ArgumentParser(prog="rl-lab bench play", description=__doc__)
    parser.add_argument("--run", help="run to play (default: a small one is trained first)")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement")
    parser.add_argument("--keys", type=int, default=200, help="number of key presses")
    parser.add_argument("--viewers", type=int, default=10)
    options = parser.parse_args(argv)
    busy = {
        "name": "play/load_average",
        "value": os.getloadavg()[0],
        "unit": "runnable processes before the benchmark",
    }
    with tempfile.TemporaryDirectory() as folder, serving(options.run or train(Path(folder) / "run")) as port:
        return [busy, *asyncio.run(measure(port, options))]


def train(folder: Path) -> str:
    """Train a small run on images; a few updates are enough."""
    import rl_lab

    words = [
        "components/encoder@components.encoder=dict",
        "environment=minigrid",
        "environment.task=Empty-6x6",
    ]
    words += ["environment.observe=rgb_full", "environment.num_envs=4", "environment.time_limit=40"]
    words += [f"algorithm.size.{word}" for word in MODEL]
    words += [
        "algorithm.batch_size=4",
        "algorithm.batch_length=16",
        "algorithm.train_ratio=8",
        "buffers.replay.capacity=2000",
    ]
    words += ["training.total_timesteps=300", "training.evaluate.every_env_steps=null"]
    words += ["logging.progress=off", "logging.tensorboard=false", f"run_dir={folder}"]
    return str(rl_lab.train("dreamer_cartpole", words, say=lambda text: None).path)


@contextlib.contextmanager
def serving(run: str) -> Iterator[int]:
    """Start a play server on the run; yields its port."""
    command = [
        sys.executable,
        "-m",
        "rl_lab",
        "play",
        run,
        "-a",
        "--web",
        "--port",
        "0",
        "-f",
        "60",
        "--ends",
        "never",
    ]
    server = subprocess.Popen(
        [*command, "--horizon", "10000", "--seed", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")  # the weights are named before the address
        found = next((match for line in lines if (match := re.search(r"http://[^/]*:(\d+)/", line))), None)
        if found is None:
            raise RuntimeError("rl-lab play did not start")
        yield int(found[1])
    finally:
        server.terminate()
        server.wait()


class Page:
    """The browser's side of the WebSocket."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.frames = 0
        self.bytes = 0
        self.head: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        self._id = 0

    async def send(self, do: str, value: Any = None) -> int:
        self._id += 1
        await self.socket.send(json.dumps({"do": do, "value": value, "id": self._id}))
        return self._id

    async def receive(self) -> None:
        message = await self.socket.recv()
        if isinstance(message, str):
            self.status = json.loads(message)
            return
        self.head, _ = decode_frame(message)
        self.frames += 1
        self.bytes += len(message)

    async def until(self, **wanted: Any) -> None:
        while any(self.status.get(name) != value for name, value in wanted.items()):
            await self.receive()

    async def watch(self, seconds: float) -> float:
        """Return the frames per second over `seconds`."""
        self.frames = self.bytes = 0
        begun = perf_counter()
        while perf_counter() - begun < seconds:
            await self.receive()
        return self.frames / (perf_counter() - begun)


async def measure(port: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    from websockets.asyncio.client import connect

    address = f"ws://127.0.0.1:{port}/live"
    async with contextlib.AsyncExitStack() as stack:

        async def page() -> Page:
            return Page(await stack.enter_async_context(connect(address, compression=None)))

        first = await page()
        await first.until(steers=True)
        rows = []
        for mode, parts in (("dream", False), ("both", True), ("real", True)):
            await first.send("mode", mode)
            await first.send("parts", parts)
            await first.until(mode=mode, parts=parts)
            await first.watch(WARM_UP)
            rate = await first.watch(options.seconds)
            size = {(panel["width"], panel["height"]) for panel in first.head["panels"]}
            name = f"{mode}_with_panels" if parts else mode
            rows.append(
                {
                    "name": f"play/{name}_frames_per_second",
                    "value": rate,
                    "unit": "frames/s",
                    "panels": len(first.head["panels"]),
                    "pixels": sorted(size),
                    "kilobytes_per_frame": round(first.bytes / max(1, first.frames) / 1000, 2),
                }
            )
        delays = await time_keys(first, options.keys)
        for label, share in (("median", 50), ("p95", 95)):
            value = float(np.percentile(delays, share))
            rows.append(
                {
                    "name": f"play/input_to_frame_{label}_ms",
                    "value": value,
                    "unit": "ms",
                    "presses": len(delays),
                }
            )
        await first.send("control", "agent")
        others = [await page() for _ in range(options.viewers - 1)]
        rates = await asyncio.gather(*(one.watch(options.seconds + WARM_UP) for one in [first, *others]))
        rows.append(
            {
                "name": f"play/{options.viewers}_viewers_slowest_frames_per_second",
                "value": min(rates),
                "unit": "frames/s",
            }
        )
        return rows


async def time_keys(page: Page, count: int) -> list[float]:
    """Return the milliseconds from a key press to the frame that shows its effect."""
    await page.send("mode", "dream")
    await page.send("parts", False)
    await page.send("control", "human")
    await page.until(mode="dream", control="human")
    delays = []
    for number in range(count):
        # One press at a time: the next starts after the effect of this one has arrived.
        await asyncio.sleep(0.03)
        begun = perf_counter()
        sent = await page.send("key_down", "ArrowUp" if number % 2 else "ArrowRight")
        while page.head.get("ack", 0) < sent:
            await page.receive()
        delays.append(1000 * (perf_counter() - begun))
        await page.send("key_up", "ArrowUp" if number % 2 else "ArrowRight")
    return delays
