"""Ranks in processes of their own on the CPU, without the launcher of torchrun, and one update with given batches."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rl_lab.build import Run, build_run
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.records import Batch, UpdateResult
from rl_lab.run_environments import environment_spec
from rl_lab.utils import ranks
from rl_lab.workflows.tdmpc.losses import RunningScale

QUIET = ["debug=tiny", "experiment.device=cpu", "logging.progress=off", "logging.tensorboard=false"]
LOGGER = SimpleNamespace(scalars=lambda *a, **k: None, flush=lambda: None, metrics_bytes=lambda: 0)
PHASES = (
    "training.phases=[{name: data, duration_steps: 120, workflow_hooks: [COLLECT]},"
    " {name: learn, type: offline, duration_cycles: 2, workflow_hooks: [HOOKS]}]"
)


def on_ranks(count: int, function: Callable[..., None], *arguments: Any) -> list[int]:
    """Call a function of a module in `count` processes with the variables of torchrun; their exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rl_lab.training"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
        "RL_LAB_KEY_FILE": os.environ["RL_LAB_KEY_FILE"],
    }
    processes = [
        context.Process(target=_as_rank, args=(number, variables, function, arguments))
        for number in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode if process.exitcode is not None else -1 for process in processes]


def _as_rank(
    number: int, variables: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update({**variables, "RANK": str(number), "LOCAL_RANK": str(number)})
    function(*arguments)


# ---------------------------------------------------------------- updates with given batches


def built(words: list[str], hooks: list[str]) -> Run:
    """A run that collects rows and then runs each hook twice; with `measure`, an expert acts."""
    words = [word.replace("FOLDER", tempfile.mkdtemp()) for word in words]
    collect = "{collect: {policy: expert}}" if "measure" in hooks else "collect"
    phases = PHASES.replace("HOOKS", ", ".join(hooks)).replace("COLLECT", collect)
    config = compose_config([*words, *QUIET, phases, "training.total_timesteps=1000"])
    spec = environment_spec(config)
    return build_run(
        resolve_config(config, spec), spec, logger=LOGGER, checkpoints=None, say=lambda text: None
    )


def gradients(run: Run) -> dict[str, torch.Tensor]:
    """The gradients that the last update of each part has left, by component or controller."""
    parts = {**dict(run.context.components.items()), **dict(run.context.controller_manager.modules())}
    found = {
        name: [p.grad.float().flatten() for p in part.parameters() if p.grad is not None]
        for name, part in parts.items()
        if isinstance(part, torch.nn.Module)
    }
    return {name: torch.cat(items) for name, items in found.items() if items}


def statistics(run: Run) -> dict[str, torch.Tensor]:
    """Floating buffers of the parts and tensors of the workflow's own state, by name; not averages of weights."""
    found: dict[str, torch.Tensor] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, torch.Tensor) and node.is_floating_point() and "slow" not in path:
            found[path] = node.detach().clone()
        for key, value in node.items() if isinstance(node, dict) else ():
            walk(value, f"{path}.{key}")

    for number, module in enumerate(run.context.modules()):
        walk(dict(module.named_buffers()), str(number))
    walk(run.workflow.get_state(), "workflow")
    return found


def stir(run: Run) -> None:
    """Change all weights: some heads start with zeros, whose outputs would be the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    for module in run.context.modules():
        for p in module.parameters():
            p.data += 0.2 * torch.randn(p.shape, generator=generator)
    run.workflow.weights_loaded()


def weights(run: Run) -> list[dict[str, torch.Tensor]]:
    return [{k: v.clone() for k, v in m.state_dict().items()} for m in run.context.modules()]


def record_updates(words: list[str], hooks: list[str]) -> dict[str, Any]:
    """Run alone, and keep the inputs of every update, what each left, and the weights before the first."""
    run = built(words, hooks)
    calls: list[dict[str, Any]] = []
    updates = [name for name in hooks if name != "measure"]
    for name in updates:
        runner: Any = run.orchestrator.runners[name]
        runner.capture = _recorder(name, runner.hook.step, calls, run)
    before: list[dict[str, torch.Tensor]] = []
    while (action := run.orchestrator.scheduler.next_action()) is not None:
        if action in updates and not before:
            stir(run)
            before = weights(run)
        run.orchestrator.run_action(action, run.orchestrator.scheduler.current_phase())
    run.close()
    assert [call["hook"] for call in calls] == updates * 2
    return {"words": words, "hooks": hooks, "before": before, "calls": calls}


def _recorder(name: str, step: Callable[..., UpdateResult], calls: list[dict[str, Any]], run: Run) -> Any:
    def call(batch: Batch, scalars: Any, noise: Any, *, key: Any = None) -> UpdateResult:
        def copy(tensors: Any) -> dict[str, torch.Tensor]:
            return {name: value.clone() for name, value in tensors.items()}

        if batch.mask is not None:  # ranks have different numbers of real rows
            batch.mask[0, -1] = False
        kept = {"hook": name, "columns": copy(batch.columns), "scalars": copy(scalars), "noise": copy(noise)}
        kept["mask"] = None if batch.mask is None else batch.mask.clone()
        result = step(batch, scalars, noise)
        loss = float(result.metrics["loss"])
        calls.append({**kept, "gradients": gradients(run), "statistics": statistics(run), "loss": loss})
        return result

    return call


def repeat_updates(folder: str) -> None:
    """On each rank: the updates of recorded.pt with this rank's share of batch and noise; results in `folder`."""
    with ranks.join("cpu"):
        recorded = torch.load(Path(folder) / "recorded.pt", weights_only=True)
        results = [repeat(case) for case in recorded]
        torch.save(results, Path(folder) / f"rank{ranks.rank()}.pt")


def scale_of_share(folder: str) -> None:
    """TD-MPC2's value scale from this rank's share of values.pt."""
    values = torch.load(Path(folder) / "values.pt", weights_only=True)
    with ranks.join("cpu"), ranks.joint():
        torch.save(RunningScale().update(share(values)), Path(folder) / f"scale{ranks.rank()}.pt")


def repeat(case: dict[str, Any]) -> list[dict[str, Any]]:
    run = built(case["words"], case["hooks"])
    for module, saved in zip(run.context.modules(), case["before"]):
        module.load_state_dict(saved)
    run.workflow.weights_loaded()
    results = []
    for call in case["calls"]:
        hook = run.orchestrator.runners[call["hook"]].hook
        columns = {name: share(value) for name, value in call["columns"].items()}
        batch = Batch(columns, mask=None if call["mask"] is None else share(call["mask"]))
        noise = {name: share_of_noise(value, hook.noise[name].shape) for name, value in call["noise"].items()}
        with ranks.joint():
            result = hook.step(batch, call["scalars"], noise)
        loss = float(result.metrics["loss"])
        results.append({"gradients": gradients(run), "statistics": statistics(run), "loss": loss})
    run.close()
    return results


def share(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return value.chunk(ranks.size(), dim)[ranks.rank()].clone()


def share_of_noise(noise: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """This rank's part of the noise of the joint batch; all of it, if it does not depend on the batch."""
    differing = [dim for dim, (whole, part) in enumerate(zip(noise.shape, shape)) if whole != part]
    if not differing:
        return noise
    (dim,) = differing
    if shape[dim] * ranks.size() == noise.shape[dim]:
        return share(noise, dim)
    # One number for each vector of the batch, then one for each code (EMAQuantizer.learn).
    vectors = noise.shape[dim] - shape[dim]
    mine, codes = noise.split([vectors * ranks.size(), noise.shape[dim] - vectors * ranks.size()], dim)
    return torch.cat([share(mine, dim), codes], dim)
