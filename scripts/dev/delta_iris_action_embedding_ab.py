"""Δ-IRIS with the tokenizer's initial weights of before and of now: an A/B on the same stored episodes.

    python scripts/dev/delta_iris_action_embedding_ab.py docs/results/delta_iris_action_embedding_ab_h200.json

Before 2026-11-18 the tokenizer's two action embeddings started at N(0, 1), and its two linear layers at torch's
default; now all four start at N(0, 0.02), as in vmicheli/delta-iris. The two sides run as two processes beside each
other, so their times mean nothing. Each collects the same episodes with random actions, trains the tokenizer on them,
then, with that tokenizer, the world model. Everything is measured on other episodes, at equal numbers of updates:

    pixel_error            mean squared error of reconstructed frames
    shuffled_error         the same with the tokens of another pair of frames: what the tokens are worth
    action_share           share of the variance of the code vectors that the action explains, over all pairs of frames
                           with all actions; frame_share: that the pairs explain
    same_tokens            share of tokens that stay as they are when only the action changes
    codes, code_bits       different tokens, and the entropy of their frequencies
    token_loss             cross-entropy of a token in nats, given the tokens before it; token_accuracy
    predicted_error        squared error of frames decoded from the likeliest tokens
    still_error            squared error of the previous frame as a prediction, for comparison
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.buffers.batches import BatchStream
from rl_lab.build import assemble_workflow, build_buffers
from rl_lab.components.nn.quantizers import code_shares, entropy_bits
from rl_lab.components.representation_learners.tokenizer import to_frames
from rl_lab.config.compose import compose_config, resolve_config, to_plain
from rl_lab.environments.make import env_config_options, make_env
from rl_lab.orchestration.collector import Collector
from rl_lab.orchestration.updates import HookRunner
from rl_lab.records import ActMode, Batch, Spec
from rl_lab.run_environments import environment_spec
from rl_lab.tools.doctor import commit, describe_machine
from rl_lab.utils.device import asks_for_tensor_float, resolve_device

SIDES = ("before", "now")
PAIRS = 64  # of frames, with which all actions are tried
HELD_OUT_SEED = 1000  # added to the seed of the episodes that are only measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--task", default="boxing", help="Atari game")
    parser.add_argument("--rows", type=int, default=10_000, help="trained on, of all environments together")
    parser.add_argument("--held-out", type=int, default=3_000, help="rows that are only measured")
    parser.add_argument("--tokenizer-updates", type=int, default=1000)
    parser.add_argument("--world-model-updates", type=int, default=800)
    parser.add_argument("--every", type=int, default=200, help="updates between measurements")
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="if the code is not in a git checkout")
    parser.add_argument("--tiny", action="store_true", help="smallest networks and batches, as a smoke test")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        options.out.write_text(json.dumps(run_side(options)))
    else:
        write(options, both_sides(options))


def both_sides(options: argparse.Namespace) -> dict[str, Any]:
    """Run this file once for each side, at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        files = {side: Path(folder) / f"{side}.json" for side in SIDES}
        words = [word for word in sys.argv[1:] if word != str(options.out)]
        processes = [
            subprocess.Popen([sys.executable, __file__, str(file), *words, "--side", side])
            for side, file in files.items()
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"the sides ended with {codes}")
        return {side: json.loads(file.read_text()) for side, file in files.items()}


def write(options: argparse.Namespace, sides: dict[str, Any]) -> None:
    digests = {json.dumps(side.pop("episodes")) for side in sides.values()}
    if len(digests) > 1:
        raise SystemExit(f"the two sides collected different episodes: {sorted(digests)}")
    result = {
        "title": "Δ-IRIS' tokenizer: action embeddings that start at N(0, 1) (before) and at N(0, 0.02) (now)",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": options.commit or commit() or None,
        "machine": describe_machine(),
        "command": " ".join(
            ["python scripts/dev/delta_iris_action_embedding_ab.py", *map(str, sys.argv[1:])]
        ),
        "note": "Both sides at the same time on one GPU, random actions, measured on held-out episodes.",
        "episodes_sha256": json.loads(digests.pop()),
        "sides": sides,
    }
    options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for side in SIDES:
        for part in ("tokenizer", "world_model"):
            print(side, part, sides[side][part][-1])


# ---------------------------------------------------------------- one side


def run_side(options: argparse.Namespace) -> dict[str, Any]:
    begin = time.time()
    words = ["experiment=delta_iris_atari100k", f"environment.task={options.task}"]
    words += [f"experiment.device={options.device}", f"experiment.seed={options.seed}"]
    words += ["debug=tiny"] if options.tiny else []
    words += [f"environment.num_envs={options.envs}"]
    config = compose_config(words)
    spec = environment_spec(config)
    config = resolve_config(config, spec)
    device = resolve_device(options.device)
    torch.manual_seed(options.seed)
    workflow = assemble_workflow(config, spec, device)
    if options.side == "before":
        start_as_before(workflow.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        rows = {"train": options.rows, "held_out": options.held_out}
        buffers, digests = {}, {}
        for number, (name, count) in enumerate(rows.items()):
            buffers[name] = build_buffers(
                config, spec, workflow.policy_columns(), device, home=Path(folder, name)
            )["replay"]
            digests[name] = collect(
                config, spec, buffers[name], count, seed=options.seed + number * HELD_OUT_SEED
            )
        print(f"{options.side}: episodes after {time.time() - begin:.0f} s", flush=True)
        measure = Measure(workflow, buffers["held_out"], device, options.seed)
        result: dict[str, Any] = {"episodes": digests, "tokenizer": [], "world_model": []}
        parts = {"tokenizer": options.tokenizer_updates, "world_model": options.world_model_updates}
        for part, updates in parts.items():
            runner, stream = make_updates(workflow, part, buffers["train"], device, config, options.seed)
            measured = getattr(measure, part)
            for done in range(updates + 1):
                if done % options.every == 0 or done == updates:
                    row = {"updates": done, **measured(), "seconds": round(time.time() - begin, 1)}
                    result[part].append(row)
                    print(options.side, part, row, flush=True)
                if done < updates:
                    runner.run(stream, {"progress": 0.0, "set": {}}, {"updates": done}, key=None)
        for buffer in buffers.values():
            buffer.close()
    return result


def start_as_before(tokenizer: nn.Module) -> None:
    """Reset to torch's initial weights: N(0, 1) for embeddings, uniform by the number of inputs for linear layers."""
    for name in ("action_plane", "action_grid", "before", "after"):
        getattr(tokenizer, name).reset_parameters()


class RandomActions:
    """A policy for the Collector."""

    act_captures = False

    def __init__(self, actions: int) -> None:
        self.actions = actions

    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {}

    def act(
        self, obs: Any, policy_state: Any, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return torch.randint(self.actions, is_first.shape, generator=mode.generator), {}, {}


def collect(config: Any, spec: Spec, buffer: Any, count: int, *, seed: int) -> str:
    """Store at least `count` rows of random play; returns the hash of what was stored."""
    environment = make_env(**env_config_options(to_plain(config.environment)), seed=seed)
    digest = hashlib.sha256()
    try:
        generator = torch.Generator().manual_seed(seed)
        collector = Collector(environment, device=torch.device("cpu"), generator=generator)
        collector.reset()
        policy = RandomActions(spec.action.choices[0])
        for _ in range(-(-count // environment.num_envs)):
            rows = collector.step(policy, ActMode(sample=True)).trajectory
            assert rows is not None
            arrays = {name: np.asarray(value) for name, value in rows.items()}
            for name in sorted(arrays):
                digest.update(arrays[name].tobytes())
            buffer.add(arrays)
    finally:
        environment.close()
    return digest.hexdigest()


def make_updates(
    workflow: Any, part: str, buffer: Any, device: torch.device, config: Any, seed: int
) -> tuple[HookRunner, BatchStream]:
    hook = workflow.hooks()[f"update_{part}"]
    runner = HookRunner(
        part,
        hook,
        device=device,
        generator=torch.Generator(device).manual_seed(seed),
        capture=True,
        tensor_float=asks_for_tensor_float(config.training.precision),
    )
    return runner, BatchStream(buffer, hook.batch, torch.Generator().manual_seed(seed), device=device)


# ---------------------------------------------------------------- measurements


class Measure:
    """Tokenizer and world model on the same held-out sequences each time."""

    def __init__(self, workflow: Any, buffer: Any, device: torch.device, seed: int) -> None:
        self.workflow, self.device = workflow, device
        generator = torch.Generator().manual_seed(seed)
        spec = workflow.hooks()["update_world_model"].batch
        batch = buffer.sample(spec, generator=generator, out=buffer.make_batch(spec, device=device))
        self.batch: Batch = batch
        frames = to_frames(batch.obs[workflow.tokenizer.key])
        real = torch.ones(frames.shape[:2], dtype=torch.bool, device=device)
        real = real if batch.mask is None else batch.mask
        self.frames, self.action = frames, batch.action[:, :-1]
        self.pair = real[:, :-1] & real[:, 1:]  # (B, T - 1): both frames of a step are real
        kept = self.pair.flatten()
        self.previous = frames[:, :-1].flatten(0, 1)[kept]
        self.following = frames[:, 1:].flatten(0, 1)[kept]
        self.taken = self.action.flatten()[kept]
        self.order = torch.randperm(len(self.taken), generator=generator).to(device)

    @torch.no_grad()
    def tokenizer(self) -> dict[str, float]:
        tokenizer = self.workflow.tokenizer
        with self.workflow.autocast():
            tokens = tokenizer.encode(self.following, self.previous, self.taken)
            error = self._error(tokenizer.decode(tokens, self.previous, self.taken))
            shuffled = self._error(tokenizer.decode(tokens[self.order], self.previous, self.taken))
        shares = code_shares(tokens.flatten(), tokenizer.vocab, None)[1]
        return {
            "pixel_error": error,
            "shuffled_error": shuffled,
            **self._shares(),
            "codes": int((shares > 0).sum()),
            "code_bits": float(entropy_bits(shares)),
            "still_error": self._error(self.previous),
        }

    def _shares(self) -> dict[str, float]:
        """Two-way analysis of variance of the code vectors: PAIRS pairs of frames, each with every action."""
        tokenizer = self.workflow.tokenizer
        chosen = self.order[:PAIRS]
        pairs, actions = len(chosen), tokenizer.action_plane.num_embeddings
        action = torch.arange(actions, device=self.device).repeat(pairs)
        repeated = [part[chosen].repeat_interleave(actions, 0) for part in (self.following, self.previous)]
        with self.workflow.autocast():
            vectors = tokenizer._vectors(*repeated, action).float()
            tokens = tokenizer.encode(*repeated, action).view(pairs, actions, -1)
        vectors = F.normalize(vectors, dim=-1).view(pairs, actions, -1)  # as they are compared with the codes
        total = (vectors - vectors.mean((0, 1))).square().mean((0, 1)).sum()
        by_action = vectors.mean(0).var(0, correction=0).sum() / total
        by_frame = vectors.mean(1).var(0, correction=0).sum() / total
        real = self.taken[chosen].view(-1, 1, 1).expand(-1, 1, tokens.shape[-1])
        same = (tokens == tokens.gather(1, real)).float()
        others = (same.sum(1) - 1.0) / (actions - 1)  # without the action that was taken
        return {
            "action_share": float(by_action),
            "frame_share": float(by_frame),
            "same_tokens": float(others.mean()),
        }

    @torch.no_grad()
    def world_model(self) -> dict[str, float]:
        model, tokenizer = self.workflow.world_model, self.workflow.tokenizer
        was_training = model.training
        model.eval()
        with self.workflow.autocast():
            losses, metrics = model.compute_loss(self.batch, tokenizer)
            tokens = model._changes(tokenizer, self.frames, self.action)
            images = model.encode_frames(self.frames[:, :-1].flatten(0, 1)).unflatten(0, self.action.shape)
            hidden = model.read(model.embed(images, self.action, tokens), None)
            likeliest = model.token_head(hidden[:, :, 1 : 1 + model.tokens]).argmax(-1)
            predicted = likeliest.flatten(0, 1)[self.pair.flatten()]
            error = self._error(tokenizer.decode(predicted, self.previous, self.taken))
        model.train(was_training)
        named = dict(losses.intermediate_losses)
        return {
            "token_loss": float(named["tokens"]) / model.weights["tokens"],
            "token_accuracy": float(metrics["token_accuracy"]),
            "reward_loss": float(named["reward"]) / model.weights["reward"],
            "predicted_error": error,
        }

    def _error(self, frames: torch.Tensor) -> float:
        return float((frames.float() - self.following).square().mean())


if __name__ == "__main__":
    main()
