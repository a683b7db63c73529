"""A trained agent for inference: no environment, buffer or optimizer is built."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.build import assemble_workflow, build_workflow
from rl_lab.config.compose import to_plain
from rl_lab.config.saved import check_same_spec, difference_from
from rl_lab.environments.make import env_config_options, probe
from rl_lab.environments.native import NativeForm
from rl_lab.environments.normalizer import ObservationNormalizer, make_normalizer
from rl_lab.environments.spec import UnusableRow, typed_array
from rl_lab.errors import (
    CheckpointError,
    ConfigError,
    LabError,
    closest,
    one_line,
    one_line_errors,
    unexpected,
)
from rl_lab.records import OBS_PREFIX, ActMode, Spec
from rl_lab.run_folder import RunFolder, find_run, output_root
from rl_lab.utils.checkpoint.loading import Loaded, load_weights
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.utils.checkpoint.manifest import read_manifest
from rl_lab.utils.checkpoint.matching import load_matching, partial_load
from rl_lab.utils.device import resolve_device
from rl_lab.utils.files import absolute, read_json
from rl_lab.utils.progress import point_of
from rl_lab.workflows.context import ControllerManager, WorldModelComponents


class Agent:
    """Acts in any number of environments; its policy state is reset where `is_first` is True."""

    def __init__(
        self,
        workflow: Any,
        spec: Spec,
        device: torch.device,
        config: Any,
        step: int,
        checkpoint: Path | None = None,
        normalizer: ObservationNormalizer | None = None,
        native: Callable[[], NativeForm] | None = None,  # None: it acts only with `scaled`
        updates: int = 0,
    ) -> None:
        self.workflow = workflow
        self.spec = spec  # in the lab's form
        self.device = device
        self.config = config
        self.step = step  # agent decisions in training
        self.updates = updates  # 0: not known
        self.checkpoint = checkpoint  # file of its weights
        self.normalizer = (
            normalizer  # with the observation statistics of the run, if it normalizes observations
        )
        self._load_native = native
        self._native: NativeForm | None = None
        self._state: dict[str, torch.Tensor] | None = None
        self._count = 0  # environments of the policy state
        self._generator = torch.Generator(device).manual_seed(0)

    def __repr__(self) -> str:
        return f"Agent({type(self.workflow).__name__}, {self.spec.name}, {self.weights}, {self.device})"

    @property
    def weights(self) -> str:
        """Which weights it has, and whether training found better ones, in words."""
        return describe_weights(self.checkpoint, self.step, self.updates)

    @property
    def native(self) -> NativeForm:
        """The spaces of the environment that the agent was trained in: `observation_space`, `action_space`."""
        if self._native is None:
            if self._load_native is None:
                raise LabError(
                    "act(): the agent does not know the environment's own spaces: pass scaled=True"
                )
            self._native = self._load_native()
        return self._native

    def reset(self, seed: int = 0) -> None:
        """Reset the policy state and the sampling generator."""
        self._state = None
        self._generator.manual_seed(seed)

    def load(self, path: Path | str, device: torch.device | str | None = None, **choices: bool) -> list[str]:
        """Load weights of another run or checkpoint file; return the loaded parts, as "components.encoder".

        agent.load("runs/other/checkpoints/epoch_12.pt", load_tokenizer=True, load_actor_critic=False)

        choices: load_<part>; True requires it, False skips it, and a part not named is loaded if the file has
        it.
        device: must be the agent's own device; `load_agent` creates an agent on another one.
        """
        if device is not None and resolve_device(str(device)) != self.device:
            raise LabError(
                f"device='{device}' differs from the agent's {self.device}: use load_agent(run, device='{device}')"
            )
        loaded = load_weights(path, getattr(self.workflow, "published_weights", None))
        parts = {
            "components": _networks(self.workflow.context.components),
            "controllers": dict(self.workflow.context.controller_manager.modules()),
        }
        known = {f"load_{name}": name for modules in parts.values() for name in modules}
        for key in choices:
            if key not in known:
                raise LabError(f"{key} is unknown: the agent has no such part.{closest(key, known)}")
        wanted = {known[key]: choice for key, choice in choices.items()}
        spec = {
            kind: [name for name in modules if wanted.get(name, name in loaded.state.get(kind, {}))]
            for kind, modules in parts.items()
        }
        taken = partial_load(loaded.state, spec, parts["components"], parts["controllers"])
        self.workflow.weights_loaded()
        self.step, self.checkpoint, self._state = loaded.step, loaded.path, None
        self.updates = updates_of(loaded)
        return taken

    @torch.no_grad()
    def act(self, obs: Any, is_first: Any = None, *, sample: bool = False, scaled: bool = False) -> Any:
        """Return the action for one observation, or N actions for N observations.

        obs:      an observation as `step` and `reset` of the environment return it, without any wrapper of the lab: an
                  array or a dict, images at the environment's size. N observations have a first axis N. With
                  `environment.pixels`, `image` is the rendered frame.
        is_first: bool, or (N,): whether the observation is the first of an episode. The policy state, which is kept
                  between calls, starts anew there; `reset()` does the same for all environments.
        sample:   sample the action instead of taking the most likely one
        scaled:   observations and actions in the lab's form, that of `rl_lab.make_env`: a dict of flat arrays, images
                  (C, H, W) of the trained size, actions from zero or in [-1, 1]

        The action is one that the environment's `step` takes, in its units: within the bounds of a `Box`, from the
        start of a `Discrete` space. It is meant for `spec.action_repeat` steps of the environment.
        """
        arrays, single = self._from_lab(obs) if scaled else self._from_native(obs, is_first)
        if self.normalizer is not None:
            arrays = self.normalizer(arrays)
        n = len(next(iter(arrays.values())))
        first = self._first(is_first, n)
        if self._state is None:
            self._state, self._count = self.workflow.initial_policy_state(n), n
        tensors = {key: torch.as_tensor(value).to(self.device) for key, value in arrays.items()}
        mode = ActMode(sample=sample, generator=self._generator)
        action, self._state, _ = self.workflow.act(
            tensors, self._state, torch.as_tensor(first).to(self.device), mode
        )
        actions = action.cpu().numpy()
        if scaled:
            return actions[0] if single else actions
        raw = self.native.to_raw(actions)
        return raw[0] if single else np.stack(raw)

    def _first(self, is_first: Any, count: int) -> np.ndarray:
        """Return the flags (N,); a new policy state has only first observations unless the caller says otherwise."""
        if self._state is not None and count != self._count:
            raise LabError(
                f"obs has {count} environments, but the policy state has {self._count}: call reset() first"
            )
        flags = np.asarray(self._state is None if is_first is None else is_first)
        if flags.dtype.kind not in "biu" or flags.shape not in ((), (count,)):
            raise LabError(f"is_first must be a bool or {count} of them, not {is_first!r}")
        return np.array(np.broadcast_to(flags.astype(bool), (count,)))

    def _from_native(self, obs: Any, is_first: Any) -> tuple[dict[str, np.ndarray], bool]:
        """Convert observations of the environment; return arrays (N, …), and whether it was only one."""
        form = self.native
        count = form.count(obs)
        first = self._first(is_first, count or 1)
        return form.to_lab(form.batched(obs) if count is None else obs, first), count is None

    def _from_lab(self, obs: Any) -> tuple[dict[str, np.ndarray], bool]:
        """Check observations of the lab's form; return arrays (N, …), and whether it was only one."""
        arrays = self._as_dict(obs)
        single = self._is_single(arrays)
        return {key: value[None] for key, value in arrays.items()} if single else arrays, single

    def _as_dict(self, obs: Any) -> dict[str, np.ndarray]:
        if not isinstance(obs, Mapping):
            if len(self.spec.observations) != 1:
                raise LabError(f"obs must be a dict with the keys {', '.join(self.spec.observations)}")
            obs = {next(iter(self.spec.observations)): obs}
        missing = [key for key in self.spec.observations if key not in obs]
        if missing:
            raise LabError(f"obs has no {missing}: the agent was trained with {list(self.spec.observations)}")
        try:
            return {
                key: typed_array(key, obs[key], spec.dtype) for key, spec in self.spec.observations.items()
            }
        except UnusableRow as error:
            raise LabError(f"obs is unusable: {error}") from error

    def _is_single(self, arrays: Mapping[str, np.ndarray]) -> bool:
        for key, value in arrays.items():
            shape = self.spec.observations[key].shape
            if value.shape == shape:
                return True
            if value.shape[1:] != shape:
                raise LabError(
                    f"'{OBS_PREFIX}{key}' has shape {value.shape}, but must have {shape} "
                    f"(or (N, {', '.join(map(str, shape))}) for N environments)"
                )
        return False


@one_line_errors()
def load_agent(
    run: Path | str | None = None, *, checkpoint: str = "last", device: str = "auto", trust: bool = False
) -> Agent:
    """Load the agent of a run: its folder, or a checkpoint file in it; None: the newest run in ./outputs.

    run may also be an exported agent: its folder, its address on a hub ("hf://owner/name", "hf://owner/name@revision")
    or one that comes with RL Lab ("example://bounce").

    checkpoint: "last" (or "latest"), "best", a step number, a file name under checkpoints/, or a path.
    trust:      build parts that are not registered, such as own classes, also of a run that was not made here
                (SECURITY.md)
    """
    folder = find_run(run, output_root(None))
    path = Path(run) if run is not None and str(run).endswith(".pt") else checkpoint_path(folder, checkpoint)
    return agent_from(folder, path, device, trust=trust)


def agent_from(folder: RunFolder, checkpoint: Path, device: str = "auto", *, trust: bool = False) -> Agent:
    config = folder.load_config(trust=trust, environment=False)  # an agent acts without it
    folder.check_links(replay=False, trust=trust)
    spec = folder.load_spec()
    where = resolve_device(device)
    loaded = CheckpointManager.load_file(checkpoint, weights=True)
    check_same_spec(folder.spec_file, loaded.info.get("spec"), spec)
    changed = difference_from(loaded.info.get("config"), to_plain(config))
    if changed:
        warnings.warn(f"{folder.config_file} has changed: {changed}", stacklevel=2)
    try:
        agent = _assemble(config, spec, where, loaded)
    except LabError:
        raise
    except Exception as error:  # an intact state or config that belongs to something else
        raise CheckpointError(
            f"{loaded.path} does not fit {folder.config_file}, so no agent was loaded: {unexpected(error)}"
        ) from error
    agent._load_native = functools.partial(load_native_form, folder, config, spec, loaded.info.get("native"))
    return agent


def updates_of(loaded: Loaded) -> int:
    """Return the updates before a checkpoint; 0 if it does not say, as weights that older versions saved."""
    totals = loaded.state.get("phase_state", {}).get("totals", {})
    return int(loaded.info.get("updates", totals.get("updates", 0)))


def describe_weights(checkpoint: Path | None, step: int, updates: int = 0) -> str:
    """Return "weights of step 12,002; best.pt (step 9,006) scored 500.0 in training: checkpoint best".

    A run on stored data alone has updates instead of steps.
    """
    own = f"weights of {point_of(step, updates)}"
    if checkpoint is None:
        return own
    try:
        best = read_manifest(checkpoint.parent / "best.json")
    except (LabError, OSError):  # no evaluation yet, or a file that was copied alone
        return own
    score = best["info"].get("best_return")
    if score is None:
        return own
    its_updates = int(best["info"].get("updates", updates))
    if best["step"] == step and (step or its_updates == updates):
        return f"{own}, which had the best evaluation in training ({score:,.1f})"
    where = point_of(best["step"], its_updates)
    return f"{own}; best.pt ({where}) scored {score:,.1f} in training: checkpoint best"


def load_native_form(folder: RunFolder, config: Any, spec: Spec, saved: Any = None) -> NativeForm:
    """Return the form of the run's environment: from its checkpoint (`saved`), which has a checksum, or its file.

    A run that was saved without either creates the environment once.
    """
    if saved is not None:
        data = saved
    elif folder.form_file.is_file():
        data = read_json(folder.form_file)
    else:
        try:
            _, data = probe(**env_config_options(to_plain(config.environment)))
        except Exception as error:
            raise LabError(
                f"{folder.form_file} is missing, since the run was saved by an older version, and its environment "
                f"cannot be created here ({unexpected(error)}): use act(…, scaled=True)"
            ) from error
    try:
        form = NativeForm(data)
    except (LabError, KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise ConfigError(f"{folder.form_file} is damaged: {one_line(error)}") from error
    if (form.spec.observations, form.spec.action) != (spec.observations, spec.action):
        raise ConfigError(
            f"{folder.form_file} does not fit {folder.spec_file}: it gives {form.spec.to_dict()}, so restore both"
        )
    return form


def _assemble(config: Any, spec: Spec, where: torch.device, loaded: Loaded) -> Agent:
    def load(components: WorldModelComponents, controllers: ControllerManager) -> None:
        load_matching(_networks(components), loaded.state["components"], prefix="components")
        load_matching(dict(controllers.modules()), loaded.state["controllers"], prefix="controllers")

    bare = build_workflow(config)
    if not bare.can_act:
        raise LabError(f"{loaded.path}: {bare.cannot_act}")
    workflow = assemble_workflow(config, spec, where, optimizers=False, load=load)
    workflow.set_state(loaded.state["workflow_custom"])
    workflow.context.components.eval()
    workflow.context.controller_manager.eval()
    normalizer = _normalizer(config, spec, loaded.state.get("observation_statistics"))
    step = int(loaded.state["global_step"])
    return Agent(workflow, spec, where, config, step, loaded.path, normalizer, updates=updates_of(loaded))


def _networks(components: WorldModelComponents) -> dict[str, torch.nn.Module]:
    return {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}


def _normalizer(config: Any, spec: Spec, statistics: Any) -> ObservationNormalizer | None:
    """Return the observation normalizer of the run with its saved statistics; None if it has none."""
    environment = config.environment
    wanted = bool(environment.get("normalize_observations", False))
    if wanted and statistics is None:
        raise CheckpointError(
            "environment.normalize_observations is true, but the checkpoint has no observation statistics"
        )
    return make_normalizer(spec, wanted, environment.get("normalize_clip", 10.0), statistics)


def checkpoint_path(folder: RunFolder, name: str) -> Path:
    """Return the checkpoint file for a name: last, latest, best, 20000, step_000020000, or a path.

    A relative path starts at the current folder or, if there is no such file, at the run folder.
    """
    if folder.exported:
        return folder.weights  # an exported agent has one set of weights
    if name in ("last", "latest"):
        return folder.checkpoints  # the newest intact one
    stem = f"step_{int(name):09d}" if name.isdigit() else name.removesuffix(".pt")
    path = folder.checkpoints / f"{stem}.pt"
    if path.is_file() or path.with_suffix(".json").is_file():  # a manifest may refer to another file
        return path
    for elsewhere in (absolute(name), folder.path / name):
        if elsewhere.suffix == ".pt" and elsewhere.is_file():
            return elsewhere
    known = {file.stem for kind in ("*.pt", "step_*.json") for file in folder.checkpoints.glob(kind)}
    raise CheckpointError(f"no checkpoint '{name}' in {folder.path}.{closest(stem, known)}")
