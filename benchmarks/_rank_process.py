"""One process of `rl-lab bench scale_model --part ranks`: a rank, or a learner alone, that follows orders.

`python _rank_process.py '{"NAME": ["key=value", …]}'` builds a learner for each name, as in training, with random rows.
Each line of the input is an order, a JSON list; each answer is a line that begins with MARK.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from rl_lab.buffers.batches import BatchStream
from rl_lab.build import assemble_workflow, build_buffers
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.launch.ranks import rank_config
from rl_lab.orchestration.updates import HookRunner
from rl_lab.run_environments import environment_spec
from rl_lab.utils import ranks

MARK = "result: "
ROWS = 200  # of each stream


def rank_process(words: dict[str, list[str]]) -> None:
    """Follow orders until the input ends, as a rank if the variables of torchrun are set."""
    torch.set_num_threads(1)
    with ranks.join("cpu"):
        updates = {
            name: learner(list(value), 1 if ranks.joined() else int(name)) for name, value in words.items()
        }

        def timed(call: Callable[[], Any], count: int) -> dict[str, float]:
            times = []
            for _ in range(count + 2):
                begin = perf_counter()
                call()
                times.append(perf_counter() - begin)
            return {"seconds": statistics.median(times[2:])}

        for line in sys.stdin:
            what, *rest = json.loads(line)
            if what == "update":
                answer = timed(updates[rest[0]], rest[1])
            elif what == "traffic":
                answer = traffic_of(updates[rest[0]])
            elif what == "exchange":
                tensor = torch.zeros(rest[0])
                answer = timed(partial(dist.all_reduce, tensor), rest[1])
            else:  # 16 tensors, as many parts have more than one
                tensors = [torch.zeros(rest[0] // 16) for _ in range(16)]
                with ranks.joint():
                    answer = timed(partial(ranks.average_over_ranks_, tensors), rest[1])
            print(MARK + json.dumps(answer), flush=True)


def learner(words: list[str], divisor: int) -> Callable[[], None]:
    """Return a function that makes one update of the hook `update`, of this rank's share of the batch.

    divisor: of the batch in a process that is no rank
    """
    words = [*words, "experiment.device=cpu", "environment.workers=0"]
    config = compose_config(words)
    spec = environment_spec(config)
    if divisor > 1:
        config = compose_config(
            [*words, f"algorithm.batch_size={int(config.algorithm.batch_size) // divisor}"]
        )
    config = resolve_config(config, spec)
    if ranks.size() > 1:
        config = rank_config(config)
    device = torch.device("cpu")
    workflow = assemble_workflow(config, spec, device)
    hook = workflow.hooks()["update"]
    buffer = build_buffers(config, spec, workflow.policy_columns(), device)["replay"]
    fill(buffer, int(config.environment.num_envs))
    runner = HookRunner("update", hook, device=device, generator=torch.Generator().manual_seed(0))
    stream = BatchStream(buffer, hook.batch, torch.Generator().manual_seed(0), device=device)
    return partial(runner.run, stream, {"progress": 0.0}, {"updates": 0})


def fill(buffer: Any, streams: int) -> None:
    """Random rows of one episode; integers are 0, which every task has as an action."""
    generator = torch.Generator().manual_seed(0)
    for step in range(ROWS):
        row: dict[str, Any] = {}
        for name, spec in buffer.columns.items():
            shape, kind = (streams, *spec.shape), getattr(torch, spec.dtype)
            if kind.is_floating_point:
                row[name] = torch.rand(shape, generator=generator, dtype=kind)
            elif name == "is_first":
                row[name] = torch.full(shape, step == 0)
            elif kind == torch.uint8:
                row[name] = torch.randint(256, shape, dtype=kind, generator=generator)
            else:
                row[name] = torch.zeros(shape, dtype=kind)
        buffer.add(row)


def traffic_of(update: Callable[[], None]) -> dict[str, float]:
    """Exchanges of one update, bytes that are reduced and gathered, and those of the largest tensor: the gradients."""
    found = {"calls": 0.0, "reduced": 0.0, "gathered": 0.0, "largest": 0.0}
    reduce, collect = dist.all_reduce, dist.all_gather

    def counted_reduce(tensor: Any, *words: Any, **options: Any) -> Any:
        found["calls"] += 1
        found["reduced"] += tensor.nbytes
        found["largest"] = max(found["largest"], float(tensor.nbytes))
        return reduce(tensor, *words, **options)

    def counted_collect(parts: Any, tensor: Any, *words: Any, **options: Any) -> Any:
        found["calls"] += 1
        found["gathered"] += tensor.nbytes
        return collect(parts, tensor, *words, **options)

    dist.all_reduce, dist.all_gather = counted_reduce, counted_collect
    try:
        update()
    finally:
        dist.all_reduce, dist.all_gather = reduce, collect
    return found


if __name__ == "__main__":
    rank_process(json.loads(sys.argv[1]))
