"""The environments of a run from its resolved config: their spec, for training, for populations, for evaluation.

Errors in `environment.*` are raised here, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig

from rl_lab.config.compose import to_plain
from rl_lab.environments.make import env_config_options, make_env, probe
from rl_lab.environments.vector import VectorEnv
from rl_lab.errors import ConfigError, LabError, unexpected
from rl_lab.orchestration.evaluator import Evaluator
from rl_lab.records import Spec
from rl_lab.utils import ranks
from rl_lab.utils.seeding import derive_seed


def environment_spec(config: DictConfig) -> Spec:
    """Create the environment once to read its shapes; the evaluation environment must have the same."""
    return probe_environment(config)[0]


def probe_environment(config: DictConfig) -> tuple[Spec, dict[str, Any]]:
    """Like `environment_spec`, and return the data of the environment's `NativeForm` as well."""
    environment = to_plain(config.environment) if "environment" in config else None
    if not isinstance(environment, dict):
        raise ConfigError(
            "environment is missing from the config: choose one, for example environment=cartpole"
        )
    missing = [f"environment.{key}" for key, value in environment.items() if value == "???"]
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be set: the config has no value for it")
    if not isinstance(environment.get("eval") or {}, dict):
        raise ConfigError(f"environment.eval must be a mapping, not {environment['eval']!r}")
    probed = [_probe(env_config_options(environment, evaluation=evaluation)) for evaluation in (False, True)]
    specs = [spec for spec, _ in probed]
    shapes = [(spec.observations, spec.action) for spec in specs]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            "environment.eval must not change the shapes of the training environment, "
            f"but it has {specs[1].to_dict()} instead of {specs[0].to_dict()}"
        )
    return probed[0]


def _probe(options: dict[str, Any]) -> tuple[Spec, dict[str, Any]]:
    try:
        return probe(**options)
    except LabError:
        raise
    except Exception as error:  # an environment's constructor can raise anything
        raise ConfigError(
            f"environment.task={options['task']!r} cannot be created: {unexpected(error)}"
        ) from error


def training_environment(
    config: DictConfig,
    spec: Spec,
    *,
    copy: bool,
    logger: Any,
    say: Callable[[str], None],
    device: torch.device | str = "cpu",  # of batched environments
) -> VectorEnv:
    """Create the training environment and check that its spec is that of the run."""
    options = env_config_options(to_plain(config.environment))
    seed = derive_seed(int(config.experiment.seed), "train", *ranks.own_seed())
    options |= {"batched": bool(config.environment.get("batched")), "device": device}
    environment = make_env(**options, **_video_options(config, logger), seed=seed, copy=copy)
    environment.listen(say)
    if environment.spec.row_columns() != spec.row_columns():
        environment.close()
        raise ConfigError(
            f"{spec.name} must have the observations and actions that the run was created with, "
            f"but it has {environment.spec.to_dict()} instead of {spec.to_dict()}"
        )
    return environment


def _video_options(config: DictConfig, logger: Any) -> dict[str, Any]:
    """Return the make_env options for videos of training episodes, if the config enables them."""
    every, run_dir = config.environment.get("video_every"), getattr(logger, "run_dir", None)
    if not every or run_dir is None:
        return {}
    return {"video_every": every, "video_folder": run_dir / "media" / "episodes" / "train"}


def cluster_options(config: DictConfig, cluster: Any, use: str) -> dict[str, Any]:
    """Return the make_env options for environments on the cluster, or {} without one."""
    if cluster is None:
        return {}
    from rl_lab.remote_parts import environment_options

    return environment_options(config, cluster, use)


def population_environment(
    config: DictConfig,
    training: VectorEnv,
    say: Callable[[str], None],
    num_envs: int | None = None,
    **changes: Any,
) -> VectorEnv:
    """Create environments for the candidates of evolution; they share the run's observation statistics."""
    options = {**env_config_options(to_plain(config.environment)), **changes}
    seed = derive_seed(int(config.experiment.seed), "population", *ranks.own_seed())
    options |= {"seed": seed, "copy": False}
    environment = make_env(**options | ({} if num_envs is None else {"num_envs": num_envs}))
    environment.listen(say, trusted=True)
    environment.normalizer = training.normalizer
    return environment


def build_evaluator(
    config: DictConfig,
    device: torch.device,
    *,
    normalizer: Any = None,  # of training: each evaluation uses its current statistics
    say: Callable[[str], None] = print,
    **changes: Any,
) -> Evaluator:
    """Create an Evaluator with the `environment.eval.*` settings; `changes` are further make_env options."""
    options = {**env_config_options(to_plain(config.environment), evaluation=True), **changes}
    options["normalize_observations"] = normalizer is not None
    if config.environment.get("normalize_observations") and normalizer is None:
        raise ConfigError(
            "environment.normalize_observations is true: pass the run's statistics, normalizer=agent.normalizer"
        )

    def make(seed: int, render: bool) -> Any:
        statistics = None if normalizer is None else normalizer.get_state()
        fixed = {"seed": seed, "render": render, "copy": False, "observation_statistics": statistics}
        environment = make_env(**{**options, **fixed})
        environment.listen(say, trusted=True)
        return environment

    return Evaluator(make, device=device, seed=int(config.experiment.seed))
