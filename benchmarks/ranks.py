"""What averaging over ranks costs: one Dreamer update alone, and as the only rank of a process group.

On a GPU the exchange of gradients, statistics and the loss is NCCL's and part of the CUDA graph; on the CPU it is
gloo's. With one rank nothing is sent: what remains is the copy of all gradients to one buffer and back, and the calls.

    rl-lab bench ranks --size 1m,12m,50m
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

from rl_lab.tools.bench import load_benchmark
from rl_lab.utils import ranks


def run(argv: list[str]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="rl-lab bench ranks", description="what averaging over ranks costs")
    parser.add_argument("--size", default="12m", help="one or several sizes, separated by commas")
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--batch", default="16x64", help="sequences x steps")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(argv)
    options.precision = "auto"
    options.tiny = options.eager = options.plain = options.profile = False
    dreamer = load_benchmark("dreamer")
    rows = []
    for size in options.size.split(","):
        times = {"alone": update_ms(dreamer, size, options)}
        with one_rank(options.device):
            times["joined"] = update_ms(dreamer, size, options)
        times["alone"] = min(times["alone"], update_ms(dreamer, size, options))  # before and after
        name = f"ranks/{size}"
        rows += [{"name": f"{name}/{key}_ms", "value": value, "unit": "ms"} for key, value in times.items()]
        overhead = 100.0 * (times["joined"] / times["alone"] - 1.0)
        rows.append({"name": f"{name}/overhead", "value": overhead, "unit": "%"})
    return rows


def update_ms(dreamer: Any, size: str, options: argparse.Namespace) -> float:
    """Median time of one update."""
    rows = dreamer.measure(size, [f"size={size}"], options)
    return float(next(row["value"] for row in rows if row["name"].endswith("/update_ms")))


def one_rank(device: str) -> Any:
    """A process group of this process alone, with the variables that torchrun would set."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "bench"}
    os.environ.update({**variables, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    return ranks.join(device)
