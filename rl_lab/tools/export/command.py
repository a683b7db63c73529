"""`rl-lab export RUN`: write the agent of a run as a folder that needs neither the run nor its checkpoints.

agent.safetensors    the weights of all parts, and the rest of the acting agent's state in its metadata
config.yaml          the resolved config, without paths of this machine
config/              spec.json, native.json: shapes and spaces of the environment
scores.json          the new episodes that the scores of the card are from
media/episodes/test/ recorded episodes: a dream starts from them where the environment is missing
dream.gif            environment | dream | difference, from the same actions
README.md            the model card
agent.onnx           with --onnx: the acting policy with its memory
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_lab.errors import ConfigError, LabError, one_line
from rl_lab.run_folder import SIGNATURE
from rl_lab.tools.resume import add_trust
from rl_lab.utils.checkpoint.safetensors import PRECISIONS

if TYPE_CHECKING:
    from rl_lab.agent import Agent
    from rl_lab.run_folder import RunFolder

STARTS = "media/episodes/test"
LONGEST_START = 200  # steps of a recorded episode
LARGEST_EXAMPLE = 2_000_000  # bytes of the weights of an agent in the package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", help="run folder or checkpoint file (default: the newest run)")
    parser.add_argument("--out", metavar="DIR", help="folder to write (default: RUN/export)")
    parser.add_argument(
        "--checkpoint", default="last", help="last, best, a step number, or a file (default: last)"
    )
    parser.add_argument(
        "--dtype",
        choices=PRECISIONS,
        default="float32",
        help="of the weights: float32 keeps every bit, bfloat16 halves the file (default: float32)",
    )
    parser.add_argument(
        "--episodes", type=int, default=20, help="new episodes for the scores; 0: none (default: 20)"
    )
    parser.add_argument("--starts", type=int, default=6, help="recorded episodes; 0: none (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="seed of these episodes")
    parser.add_argument(
        "--license", metavar="ID", help="licence of the weights, for the card: mit, cc-by-4.0, …"
    )
    parser.add_argument(
        "--onnx", action="store_true", help="also write agent.onnx, and compare it with the agent"
    )
    parser.add_argument(
        "--example",
        metavar="NAME",
        help="write to the package instead, as example://NAME; bfloat16, at most 2 MB",
    )
    parser.add_argument("--device", default="cpu", help="for the episodes: auto, cpu, cuda, cuda:N or mps")
    add_trust(parser)


def main(args: argparse.Namespace) -> int:
    if args.example:
        from rl_lab.hub import EXAMPLES

        if not args.example.isidentifier() or args.out:
            raise ConfigError(
                "--example NAME: NAME is one word of letters and digits, and --out is not given"
            )
        args.out, args.dtype = str(EXAMPLES / args.example), "bfloat16"
    result = export(
        args.run,
        args.out,
        checkpoint=args.checkpoint,
        dtype=args.dtype,
        episodes=args.episodes,
        starts=args.starts,
        seed=args.seed,
        license=args.license,
        onnx=args.onnx,
        device=args.device,
        trust=args.trust,
    )
    size = result["bytes"]
    if args.example:  # it is nobody's own: the trust rules hold for it, too
        (Path(args.out) / "config" / SIGNATURE).unlink(missing_ok=True)
    if args.example and size > LARGEST_EXAMPLE:
        raise ConfigError(
            f"--example {args.example}: the weights have {size:,} bytes, more than {LARGEST_EXAMPLE:,}"
        )
    print(f"{result['folder']}: {result['parameters']:,} parameters, {size / 1e6:.2f} MB in {args.dtype}")
    for line in result["remarks"]:
        print(line)
    address = f"example://{args.example}" if args.example else result["folder"]
    print(
        f"use it: rl_lab.load_agent({str(address)!r}) · rl-lab play {address} · rl-lab push {address} owner/name"
    )
    return 0


def export(
    run: Path | str | None = None,
    out: Path | str | None = None,
    *,
    checkpoint: str = "last",
    dtype: str = "float32",
    episodes: int = 20,
    starts: int = 6,
    seed: int = 0,
    license: str | None = None,
    onnx: bool = False,
    device: str = "cpu",
    trust: bool = False,
) -> dict[str, Any]:
    """Write the folder; return `folder`, `bytes` and `parameters` of the weights, `scores` and `remarks`."""
    from rl_lab.agent import load_agent
    from rl_lab.run_folder import find_run, output_root
    from rl_lab.tools.export.card import write_card
    from rl_lab.utils.files import write_json_atomic

    for name, value in (("--episodes", episodes), ("--starts", starts)):
        if value < 0:
            raise ConfigError(f"{name} must be 0 or more, not {value}")
    source = find_run(run, output_root(None))
    agent = load_agent(run or source.path, checkpoint=checkpoint, device=device, trust=trust)
    target = Path(out).expanduser() if out else source.output().path / "export"
    _check_target(target, source)
    size = write_agent(agent, source, target, dtype)
    remarks: list[str] = []
    scores = _scores(source, agent, checkpoint, episodes, seed, device, trust, target, remarks)
    if scores:
        write_json_atomic(target / "scores.json", scores)
    if starts:
        _record(agent, target, starts, seed, trust, remarks)
    if onnx:
        from rl_lab.tools.export.onnx_policy import export_onnx

        facts = export_onnx(agent, target / "agent.onnx", seed=seed)
        remarks.append(facts.sentence)
    parameters = count_parameters(agent)
    write_card(target, agent, scores=scores, dtype=dtype, parameters=parameters, license=license)
    return {"folder": target, "bytes": size, "parameters": parameters, "scores": scores, "remarks": remarks}


def write_agent(agent: Agent, source: RunFolder, target: Path, dtype: str) -> int:
    """Write weights, config and shapes; return the bytes of the weights."""
    from omegaconf import OmegaConf

    from rl_lab.run_folder import RunFolder, code_state
    from rl_lab.utils.checkpoint import CheckpointManager
    from rl_lab.utils.checkpoint.manager import WEIGHT_KEYS
    from rl_lab.utils.checkpoint.safetensors import write_state
    from rl_lab.utils.files import write_json_atomic

    assert agent.checkpoint is not None
    loaded = CheckpointManager.load_file(agent.checkpoint, weights=True)
    state = {key: value for key, value in loaded.state.items() if key in WEIGHT_KEYS}
    folder = RunFolder(target)
    (target / "config").mkdir(parents=True, exist_ok=True)
    plain: Any = OmegaConf.to_container(agent.config)
    plain = without_paths(plain)
    info = {"spec": agent.spec.to_dict(), "trained": code_state().splitlines()[0], "updates": agent.updates}
    form = loaded.info.get("native")
    if form is None and source.form_file.is_file():
        form = json.loads(source.form_file.read_text(encoding="utf-8"))
    if form is not None:
        info["native"] = form
        write_json_atomic(folder.form_file, form)
    write_json_atomic(folder.spec_file, agent.spec.to_dict())
    size = write_state(folder.weights, state, info, dtype)
    folder.save_config(OmegaConf.create(plain), signed=_is_signed(source))
    return size


def without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without this machine's paths: those of the run, of stored data and of loaded weights."""
    cleaned = {key: None if key in ("run_dir", "output_root") else value for key, value in config.items()}
    for section in ("training", "buffers", "load"):
        if section in cleaned:
            cleaned[section] = _without(cleaned[section])
    return cleaned


def _without(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_without(value) for value in node]
    return None if isinstance(node, str) and node.startswith(("/", "~", "./", "../")) else node


def _is_signed(source: RunFolder) -> bool:
    """Whether the run was made here; the signature of the exported config then says so, too."""
    try:
        source.load_config(trust=False, environment=False)
    except ConfigError:  # a stranger's run, exported with --trust
        return False
    return source.trusted


def count_parameters(agent: Agent) -> int:
    import torch

    context = agent.workflow.context
    parts = [*dict(context.components.items()).values(), *dict(context.controller_manager.modules()).values()]
    return sum(p.numel() for part in parts if isinstance(part, torch.nn.Module) for p in part.parameters())


def _check_target(target: Path, source: RunFolder) -> None:
    from rl_lab.run_folder import RunFolder

    if target.resolve() == source.path:
        raise ConfigError(f"--out {target} is the run itself: choose another folder")
    ours = (
        RunFolder(target).exported or not target.exists() or (target.is_dir() and not any(target.iterdir()))
    )
    if not ours:
        raise ConfigError(f"--out {target} has other files: choose a new or an empty folder")


def _scores(
    source: RunFolder,
    agent: Agent,
    checkpoint: str,
    episodes: int,
    seed: int,
    device: str,
    trust: bool,
    target: Path,
    remarks: list[str],
) -> dict[str, Any] | None:
    """Run new episodes with the exported weights, so that the card says what the folder gives."""
    from rl_lab.tools.evaluate import evaluate

    if not episodes:
        return None
    try:
        found = evaluate(
            target,
            episodes=episodes,
            seed=seed,
            device=device,
            video=False,
            json_file=str(target / "scores.json"),
            csv_file=str(target / "scores.csv"),
            trust=trust,
        )
    except LabError as error:
        remarks.append(f"no scores: {one_line(error)}")
        return None
    (target / "scores.csv").unlink(missing_ok=True)
    return {key: value for key, value in found.items() if key not in ("files", "remarks", "weights_used")}


def _record(agent: Agent, target: Path, count: int, seed: int, trust: bool, remarks: list[str]) -> None:
    """Record episodes, from which a dream can start without the environment, and draw a dream beside the longest."""
    from rl_lab.tools.dream_report.errors import run_episodes

    folder = target / STARTS
    for old in folder.glob("start_*.npz"):
        old.unlink()
    try:
        episodes = run_episodes(agent, count, seed=seed, longest=LONGEST_START)
    except LabError as error:
        remarks.append(f"no recorded episodes, so no dream.gif: {one_line(error)}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(episodes):
        write_start(folder / f"start_{number}.npz", rows)
    if agent.workflow.can_dream and agent.workflow.dreamed_observations(agent.spec):
        _draw(target, episodes, trust, remarks)


def write_start(file: Path, rows: dict[str, np.ndarray]) -> None:
    """Write the K+1 rows of an episode in the layout of rl_lab/buffers/formats/files.py."""
    from rl_lab.records import OBS_PREFIX
    from rl_lab.utils.files import write_atomic

    names = [name for name in rows if name.startswith(OBS_PREFIX)]
    arrays = {
        "observations" if len(names) == 1 else f"observations/{name.removeprefix(OBS_PREFIX)}": rows[name]
        for name in names
    }
    arrays["actions"] = rows["action"][:-1]
    arrays |= {
        "rewards": rows["reward"][1:],
        "terminated": rows["terminated"][1:],
        "truncated": rows["truncated"][1:],
    }
    write_atomic(file, lambda stream: np.savez_compressed(stream, **arrays))  # type: ignore[arg-type]


def _draw(target: Path, episodes: list[dict[str, np.ndarray]], trust: bool, remarks: list[str]) -> None:
    from rl_lab.run_folder import RunFolder
    from rl_lab.tools.dream_report import fitting_context, measure
    from rl_lab.tools.dream_report.animation import dream_gif

    folder = RunFolder(target)
    context = fitting_context(folder)
    longest = max(len(rows["reward"]) for rows in episodes)
    try:
        found = measure(
            [folder],
            episodes=str(target / STARTS),
            context=context,
            horizon=max(1, min(30, longest - context)),
            segments=1,
            device="cpu",
            trust=trust,
        )
        dream_gif(found, target / "dream.gif", episodes=1)
    except LabError as error:
        remarks.append(f"no dream.gif: {one_line(error)}")
