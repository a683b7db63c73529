"""The environments of a run: those trained in, those evaluated in, those of a population."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig

from rl_lab.compose import to_plain
from rl_lab.environments.make import env_config_options, make_env, probe_spec
from rl_lab.environments.vector import VectorEnv
from rl_lab.errors import ConfigError, LabError, unexpected
from rl_lab.orchestration.evaluator import Evaluator
from rl_lab.records import Spec
from rl_lab.utils.seeding import derive_seed


def environment_spec(config: DictConfig) -> Spec:
    """Shapes of the config's environment, from one that is made and closed; evaluation must offer the same."""
    environment = to_plain(config.environment) if "environment" in config else None
    if not isinstance(environment, dict):
        raise ConfigError("the config has no environment: choose one, for example environment=cartpole")
    missing = [f"environment.{key}" for key, value in environment.items() if value == "???"]
    if missing:
        raise ConfigError(f"the config needs a value for {', '.join(missing)}")
    if not isinstance(environment.get("eval") or {}, dict):
        raise ConfigError(f"environment.eval must be a group of keys, not {environment['eval']!r}")
    specs = [_probe(env_config_options(environment, evaluation=evaluation)) for evaluation in (False, True)]
    shapes = [(spec.observations, spec.action) for spec in specs]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            "environment.eval makes an environment of another shape than the one trained in: "
            f"{specs[1].to_dict()} instead of {specs[0].to_dict()}"
        )
    return specs[0]


def _probe(options: dict[str, Any]) -> Spec:
    try:
        return probe_spec(**options)
    except LabError:
        raise
    except Exception as error:  # whatever an environment's own constructor does with its options
        raise ConfigError(
            f"the environment {options['task']!r} cannot be made: {unexpected(error)}"
        ) from error


def training_environment(
    config: DictConfig, spec: Spec, *, copy: bool, logger: Any, say: Callable[[str], None]
) -> VectorEnv:
    """What the run trains in; it must be what the run was made for."""
    options = env_config_options(to_plain(config.environment))
    seed = derive_seed(int(config.experiment.seed), "train")
    environment = make_env(**options, **_films(config, logger), seed=seed, copy=copy)
    environment.listen(say)
    if environment.spec.row_columns() != spec.row_columns():
        environment.close()
        raise ConfigError(
            f"{spec.name} offers other observations or actions than the run was made with: "
            f"{environment.spec.to_dict()} instead of {spec.to_dict()}"
        )
    return environment


def _films(config: DictConfig, logger: Any) -> dict[str, Any]:
    """Options of make_env for videos of training episodes, where the config asks for them."""
    every, run_dir = config.environment.get("video_every"), getattr(logger, "run_dir", None)
    if not every or run_dir is None:
        return {}
    return {"video_every": every, "video_folder": run_dir / "media" / "episodes" / "train"}


def population_environment(
    config: DictConfig, training: VectorEnv, say: Callable[[str], None], num_envs: int | None = None
) -> VectorEnv:
    """Environments for candidates of evolution; what they see counts for the run's observation statistics."""
    options = env_config_options(to_plain(config.environment))
    options |= {"seed": derive_seed(int(config.experiment.seed), "population"), "copy": False}
    environment = make_env(**options | ({} if num_envs is None else {"num_envs": num_envs}))
    environment.listen(say, trusted=True)
    environment.normalizer = training.normalizer
    return environment


def build_evaluator(
    config: DictConfig,
    device: torch.device,
    *,
    normalizer: Any = None,  # of training: each evaluation sees with its statistics of that moment
    say: Callable[[str], None] = print,
    **changes: Any,
) -> Evaluator:
    """Evaluation with `environment.eval.*` settings; `changes` are further make_env options."""
    options = {**env_config_options(to_plain(config.environment), evaluation=True), **changes}
    options["normalize_observations"] = normalizer is not None
    if config.environment.get("normalize_observations") and normalizer is None:
        raise ConfigError(
            "this run normalizes observations: evaluation needs its statistics, normalizer=agent.normalizer"
        )

    def make(seed: int, render: bool) -> Any:
        statistics = None if normalizer is None else normalizer.get_state()
        fixed = {"seed": seed, "render": render, "copy": False, "observation_statistics": statistics}
        environment = make_env(**{**options, **fixed})
        environment.listen(say, trusted=True)
        return environment

    return Evaluator(make, device=device, seed=int(config.experiment.seed))
