"""Configs of saved runs: which keys may change on resume, and whether the config is still the trained one."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rl_lab.config.algorithm_keys import workflow_class
from rl_lab.errors import ConfigError
from rl_lab.records import REFUSED, Spec
from rl_lab.run_folder import describe_differences
from rl_lab.utils.files import json_safe
from rl_lab.workflows.settings import unknown_keys

# Keys that may change on resume: duration, output and speed of a run, not what it computes.
SAFE_ON_RESUME = (
    "training.total_timesteps",
    "training.global_batch",
    "algorithm.grad_acc_steps",
    "training.log",
    "training.evaluate",
    "training.report",
    "training.checkpoint",
    "training.on_nonfinite",
    "training.on_save_failure",
    "training.on_side_failure",
    "training.on_damaged_replay",
    "training.profile",
    "training.stop_when",
    "callbacks",
    "training.resume_path",
    "training.threads",
    "experiment.device",
    "logging",
    "wandb",
    "launch",
    "environment.workers",
    "environment.timeout",
    "environment.python",
    "environment.host",
    "environment.restarts",
    "environment.history_limit",
    "environment.video_every",
    "buffers.*.storage",
    "buffers.*.folder",
    "buffers.*.path",
    "environment.eval",
    "run_dir",
    "output_root",
)


# Modules of the layout before 2026-11-18 in saved configs -> modules that have their classes now.
MOVED = {
    "rl_lab.buffers.episode_priorities": "rl_lab.buffers.episodes.samplers",
    "rl_lab.buffers.stored_episodes": "rl_lab.buffers.episodes.buffer",
    "rl_lab.components.controllers.explorer": "rl_lab.components.controllers.random_policy",
    "rl_lab.components.controllers.policy_prior": "rl_lab.components.controllers.tdmpc",
    "rl_lab.components.controllers.q_ensemble": "rl_lab.components.controllers.tdmpc",
    "rl_lab.components.dynamics.delta_token_model": "rl_lab.components.dynamics.token_world_model",
    "rl_lab.components.dynamics.frame_token_model": "rl_lab.components.dynamics.token_world_model",
    "rl_lab.components.dynamics.gru_backbone": "rl_lab.components.dynamics.backbones",
    "rl_lab.components.dynamics.pretrained_backbone": "rl_lab.components.dynamics.backbones",
    "rl_lab.components.dynamics.latent_dynamics": "rl_lab.components.dynamics.deterministic_mlp",
    "rl_lab.components.nn.ema_quantizer": "rl_lab.components.nn.quantizers",
    "rl_lab.components.nn.frame_trunks": "rl_lab.components.controllers.recurrent_actor_critic",
    "rl_lab.components.nn.fsq": "rl_lab.components.nn.quantizers",
    "rl_lab.components.nn.latent_heads": "rl_lab.components.nn.heads",
    "rl_lab.components.nn.perceptual": "rl_lab.components.nn.losses",
    "rl_lab.components.nn.reconstruction_losses": "rl_lab.components.nn.losses",
    "rl_lab.components.nn.task_embedding": "rl_lab.components.representation_learners.latent_encoders",
    "rl_lab.components.nn.vector_quantizer": "rl_lab.components.nn.quantizers",
    "rl_lab.components.nn.weight_decay": "rl_lab.components.nn.optim",
    "rl_lab.components.representation_learners.decoder": "rl_lab.components.representation_learners.decoders",
    "rl_lab.components.representation_learners.dict_encoder": "rl_lab.components.representation_learners.encoders",
    "rl_lab.components.representation_learners.frame_tokenizer": "rl_lab.components.representation_learners.tokenizer",
    "rl_lab.components.representation_learners.latent_encoder": "rl_lab.components.representation_learners.latent_encoders",
    "rl_lab.components.representation_learners.latent_image_encoder": "rl_lab.components.representation_learners.latent_encoders",
    "rl_lab.components.representation_learners.mlp_encoder": "rl_lab.components.representation_learners.encoders",
    "rl_lab.workflows.dreamer_mpc": "rl_lab.workflows.dreamer.mpc",
}


# Keys that configs before 2026-11-18 gave to every algorithm: those of the root config, then those of debug=tiny.
FOR_EVERY_ALGORITHM = {
    *("batch_size", "batch_length", "train_ratio"),
    *("imagination_horizon", "imagination_last", "episode_length", "seed_steps", "pretrain_updates"),
    *("updates_per_env_step", "fast_render", "dream_context"),
    *("tokenizer", "world_model", "actor_critic", "epochs", "plan", "evolution", "stages", "size"),
}


def drop_unread(config: dict[str, Any]) -> list[str]:
    """Remove keys that every algorithm got and the workflow of this plain config does not have; their paths."""
    schema = getattr(workflow_class(config), "settings_type", None)
    section = config.get("algorithm")
    if schema is None or not isinstance(section, dict):
        return []
    dropped = []
    for path, _ in list(unknown_keys(schema, section, "algorithm")):
        _, *parents, key = path.split(".")
        if (parents or [key])[0] in FOR_EVERY_ALGORITHM:
            node = section
            for parent in parents:
                node = node[parent]
            del node[key]
            dropped.append(path)
    return dropped


def current_targets(config: Any) -> Any:
    """Return a plain config with every `_target_` of the earlier layout replaced by its current path."""
    if isinstance(config, Mapping):
        return {
            key: _current(value) if key == "_target_" and isinstance(value, str) else current_targets(value)
            for key, value in config.items()
        }
    return [current_targets(item) for item in config] if isinstance(config, list) else config


def _current(target: str) -> str:
    module, _, name = target.rpartition(".")
    return f"{MOVED[module]}.{name}" if module in MOVED else target


def is_safe(path: str) -> bool:
    return any(fnmatch(path, safe) or fnmatch(path, f"{safe}.*") for safe in SAFE_ON_RESUME)


TELLING = ("experiment.name", "environment.task", "workflow._target_")  # what another run differs in


def refuse_unsafe(differences: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise ConfigError if a resume would change keys that must stay; the message names the most telling ones."""
    unsafe = sorted((path for path in differences if not is_safe(path)), key=lambda p: (p not in TELLING, p))
    if not unsafe:
        return
    old, new = differences[unsafe[0]]
    others = ", ".join(unsafe[1:5]) + (f" and {len(unsafe) - 5} more" if len(unsafe) > 5 else "")
    also = f" (and {others} differ)" if others else ""
    raise ConfigError(
        f"{unsafe[0]} was {old!r} in this run and cannot become {new!r} on resume{also}: start a new run in "
        f"another run_dir (load.path=… loads the weights), or change only {', '.join(SAFE_ON_RESUME)}"
    )


def difference_from(trained: Mapping[str, Any] | None, config: Mapping[str, Any]) -> str:
    """Return a sentence about the first key that differs from the config of a checkpoint, or "".

    Without this check a run whose config.yaml was edited or damaged would silently continue as a different
    run.
    trained: the config in the checkpoint's manifest; older manifests have none.
    """
    if trained is None:
        return ""
    before: dict[str, Any] = current_targets(trained)
    after = json_safe(config)
    after.get("environment", {}).pop(REFUSED, None)
    if _workflow(before) == _workflow(after):  # `drop_unread` imports it, and only `config` has been checked
        drop_unread(before)
        drop_unread(after)
    for path, (old, new) in sorted(
        describe_differences(before, after).items(), key=lambda item: str(item[0])
    ):
        if not is_safe(path):
            return f"{path} is {new!r}, but the checkpoint was trained with {old!r}"
    return ""


def _workflow(config: Any) -> Any:
    node = config.get("workflow") if isinstance(config, Mapping) else None
    return node.get("_target_") if isinstance(node, Mapping) else None


def check_same_spec(file: Path, trained: Mapping[str, Any] | None, spec: Spec) -> None:
    """Raise ConfigError if the saved spec of a run differs from that of its checkpoint."""
    if trained is not None and trained != json_safe(spec.to_dict()):
        raise ConfigError(
            f"{file} has changed: it has {spec.to_dict()}, but the checkpoint was trained with {trained}"
        )


def check_same_config(file: Path, trained: Mapping[str, Any] | None, config: Mapping[str, Any]) -> None:
    difference = difference_from(trained, config)
    if difference:
        raise ConfigError(f"{file} has changed: {difference}; undo the change, or start a new run")
