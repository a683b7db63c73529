"""The acting policy as an ONNX model: its memory and its noise are inputs, its action and the new memory outputs.

    policy = OnnxPolicy("agent.onnx", seed=0)      # runs with onnxruntime, without torch's modules
    action = policy.act({"vector": obs}, is_first=True)

    obs/<name>      (1, …)   an observation in the lab's form, as `Agent.act(scaled=True)` takes it
    is_first        (1,)     whether the observation is the first of an episode: the memory starts anew
    memory/<name>   (1, …)   the policy state; next_memory/<name> is that of the next step
    noise/<i>                uniform in [0, 1) or standard normal, where the policy draws numbers: for its latent
                             state, a plan, an action. A policy that executes several actions of a plan names a memory
                             as `countdown`: noise is used when that is 0 or is_first is true, else give any
    action          (1, …)   from zero, or in [-1, 1]

All of it is described in the model's metadata (`rl_lab`, JSON). The model is made for one environment.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from rl_lab.environments.normalizer import EPSILON
from rl_lab.environments.spec import FLOAT32_MAX
from rl_lab.errors import LabError, MissingPackageError, install_line, one_line
from rl_lab.records import ActMode

if TYPE_CHECKING:
    from rl_lab.agent import Agent

TOLERANCE = 1e-4  # of the model against the agent, over an episode
STEPS = 200  # of that episode, at most
DRAWS = {torch.rand: "uniform", torch.randn: "normal"}
TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
    "tensor(uint8)": np.uint8,
}
Tensors = dict[str, torch.Tensor]


class NoiseAsInput(TorchFunctionMode):
    """Replaces the random numbers that `act` draws by given tensors; without them it records what is drawn."""

    def __init__(self, given: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.given = None if given is None else list(given)
        self.drawn: list[dict[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in DRAWS:
            return func(*args, **(kwargs or {}))
        if self.given is not None:
            return self.given.pop(0)
        value = func(*args, **(kwargs or {}))
        self.drawn.append({"kind": DRAWS[func], "shape": list(value.shape)})
        return value


class Acting(torch.nn.Module):
    """`act` of a workflow with flat tensors: observations, is_first, memory and noise, in this order."""

    def __init__(self, agent: Agent, names: dict[str, list[str]], mode: ActMode) -> None:
        super().__init__()
        self.workflow = workflow = agent.workflow
        self.normalizer = agent.normalizer
        self.names = names
        self.mode = mode
        parts = workflow.context.components, workflow.context.controller_manager
        modules = [dict(parts[0].items()), dict(parts[1].modules())]
        # Registered, so that the exporter finds their weights.
        self.parts = torch.nn.ModuleList(
            part for group in modules for part in group.values() if isinstance(part, torch.nn.Module)
        )

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(tensors)
        obs = {name: self._normalized(name, given.pop(0)) for name in self.names["obs"]}
        is_first = given.pop(0)
        memory = {name: given.pop(0) for name in self.names["memory"]}
        # Without its torch.no_grad, whose switches the exporter cannot have around a loop: there are no gradients here.
        act = inspect.unwrap(type(self.workflow).act)
        with NoiseAsInput(given):
            action, state, _ = act(self.workflow, obs, memory, is_first, self.mode)
        return (action, *(state[name] for name in self.names["memory"]))

    def _normalized(self, name: str, obs: torch.Tensor) -> torch.Tensor:
        """Apply the run's observation statistics, as `ObservationNormalizer` does."""
        if self.normalizer is None or name not in self.normalizer.mean:
            return obs
        mean = torch.from_numpy(self.normalizer.mean[name])
        scale = 1.0 / torch.from_numpy(self.normalizer.variance(name) + EPSILON).sqrt()
        bound = FLOAT32_MAX if self.normalizer.clip is None else self.normalizer.clip
        return ((obs.double() - mean) * scale).clamp(-bound, bound).float()


@dataclass
class OnnxExport:
    """What was written, and how far it is from the agent over an episode."""

    path: Path
    steps: int
    action_error: float
    memory_error: float

    @property
    def sentence(self) -> str:
        return (
            f"{self.path}: {self.path.stat().st_size / 1e6:.2f} MB; over {self.steps} steps with its own memory its "
            f"actions differ from the agent's by at most {self.action_error:.1e}, its memory by {self.memory_error:.1e}"
        )


def export_onnx(agent: Agent, path: Path, *, seed: int = 0) -> OnnxExport:
    """Write the model and compare it with the agent; LabError if it differs by more than TOLERANCE."""
    _require()
    if agent.device.type != "cpu":
        raise LabError(f"--onnx needs the agent on the CPU, not on {agent.device}: add --device cpu")
    workflow = agent.workflow
    mode = ActMode(sample=bool(agent.config.training.evaluate.sample))
    traced = mode
    if hasattr(workflow, "act_variant"):  # how many environments plan now: a graph decides it by itself
        traced = replace(mode, variant=1)
    with torch.no_grad():
        memory = {name: value.clone() for name, value in workflow.initial_policy_state(1).items()}
        obs = _zero_observations(agent)
        is_first = torch.ones(1, dtype=torch.bool)
        workflow.before_act(traced)
        recorder = NoiseAsInput()
        with recorder:
            _, state, _ = workflow.act(obs, memory, is_first, traced)
    memory = {name: value for name, value in memory.items() if name in state}
    names = {"obs": list(obs), "memory": list(memory)}
    noise = [_draw(entry, torch.Generator().manual_seed(0)) for entry in recorder.drawn]
    inputs = [f"obs/{name}" for name in obs] + ["is_first"]
    inputs += [f"memory/{name}" for name in memory] + [f"noise/{index}" for index in range(len(noise))]
    outputs = ["action"] + [f"next_memory/{name}" for name in memory]
    example = (*obs.values(), is_first, *memory.values(), *noise)
    acting = Acting(agent, names, traced)
    acting.eval()
    program = _trace(acting, example, inputs, outputs)
    facts = {
        "workflow": type(workflow).__name__,
        "task": agent.spec.name,
        "step": agent.step,
        "sample": mode.sample,
        "noise": recorder.drawn,
        "countdown": getattr(workflow, "countdown", None),
        "spec": agent.spec.to_dict(),
        "action_repeat": agent.spec.action_repeat,
        # Initial values: a memory need not start at zero.
        "memory": {name: value.tolist() for name, value in memory.items()},
    }
    _save(program, path, facts)
    return compare(agent, path, mode, seed=seed)


def _require() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            raise MissingPackageError(f"--onnx needs the package '{name}': {install_line('onnx')}") from error


def _zero_observations(agent: Agent) -> Tensors:
    return {
        name: torch.zeros(1, *spec.shape, dtype=getattr(torch, spec.dtype))
        for name, spec in agent.spec.observations.items()
    }


def _draw(entry: dict[str, Any], generator: torch.Generator) -> torch.Tensor:
    draw = torch.rand if entry["kind"] == "uniform" else torch.randn
    return draw(entry["shape"], generator=generator)


def _trace(module: Acting, example: tuple[torch.Tensor, ...], inputs: list[str], outputs: list[str]) -> Any:
    try:
        with torch.no_grad(), _quiet():
            return torch.onnx.export(
                module, example, input_names=inputs, output_names=outputs, dynamo=True, verbose=False
            )
    except Exception as error:  # the exporter raises many types of errors
        name = type(module.workflow).__name__
        raise LabError(
            f"--onnx: the policy of {name} cannot be written as an ONNX model: {one_line(error)}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints its progress and warns about opset versions."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _save(program: Any, path: Path, facts: dict[str, Any]) -> None:
    import onnx

    model = program.model_proto
    graphs = [model.graph, *model.functions]
    while graphs:  # each node has the lines of code that it comes from: mostly larger than the weights
        for node in graphs.pop().node:
            del node.metadata_props[:]
            graphs += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    entry = model.metadata_props.add()
    entry.key, entry.value = "rl_lab", json.dumps(facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))


# --- Running it ---


class OnnxPolicy:
    """Acts with a model of `export_onnx` and onnxruntime; noise is drawn as the agent draws it."""

    def __init__(self, path: Path | str, *, seed: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.facts = json.loads(self.session.get_modelmeta().custom_metadata_map["rl_lab"])
        self.inputs = {entry.name: entry.type for entry in self.session.get_inputs()}
        self.outputs = [entry.name for entry in self.session.get_outputs()]
        self.countdown = self.facts.get("countdown")  # a memory: only while it is 0 noise is used
        self._generator = torch.Generator()
        self.memory: dict[str, np.ndarray] = {}
        self.reset(seed)

    def reset(self, seed: int = 0) -> None:
        """Start with the first memory and reset the generator of the noise."""
        self._generator.manual_seed(seed)
        self.memory = {
            name: np.array(value, dtype=TYPES.get(self.inputs.get(f"memory/{name}", ""), np.float32))
            for name, value in self.facts["memory"].items()
        }

    def act(self, obs: dict[str, np.ndarray], is_first: bool = False) -> np.ndarray:
        """obs: name -> (…) in the lab's form. Returns the action, and keeps the memory."""
        given: dict[str, np.ndarray] = {f"obs/{name}": value[None] for name, value in obs.items()}
        given["is_first"] = np.array([is_first])
        given |= {f"memory/{name}": value for name, value in self.memory.items()}
        draw = is_first or self.countdown is None or not self.memory[self.countdown].all()
        noise = [
            _draw(entry, self._generator).numpy() if draw else np.zeros(entry["shape"], np.float32)
            for entry in self.facts["noise"]
        ]
        given |= {f"noise/{index}": value for index, value in enumerate(noise)}
        # The exporter leaves out inputs that do not change the result.
        results = self.session.run(None, {name: given[name] for name in self.inputs})
        found = dict(zip(self.outputs, results))
        self.memory = {name: found[f"next_memory/{name}"] for name in self.memory}
        return np.asarray(found["action"][0])


def compare(agent: Agent, path: Path, mode: ActMode, *, seed: int = 0) -> OnnxExport:
    """Run one episode with the agent, and the model beside it on the same observations, each with its own memory."""
    policy = OnnxPolicy(path, seed=seed)
    workflow, generator = agent.workflow, torch.Generator().manual_seed(seed)
    state = workflow.initial_policy_state(1)
    own = replace(mode, generator=generator)
    worst = {"action": 0.0, "memory": 0.0}
    steps = 0
    for obs, is_first, step in _episode(agent, seed):
        arrays = {name: value[None] for name, value in obs.items()}
        seen = arrays if agent.normalizer is None else agent.normalizer(arrays)
        tensors = {name: torch.as_tensor(value) for name, value in seen.items()}
        with torch.no_grad():
            acted, state, _ = workflow.act(tensors, state, torch.tensor([is_first]), own)
        expected = acted[0].numpy()
        worst["action"] = max(worst["action"], _difference(expected, policy.act(obs, is_first)))
        for name, value in policy.memory.items():
            worst["memory"] = max(worst["memory"], _difference(state[name].numpy(), value))
        steps += 1
        step(expected)
    if max(worst.values()) > TOLERANCE:
        path.unlink()
        raise LabError(
            f"--onnx: over {steps} steps the model's actions differ from the agent's by {worst['action']:.1e} and its "
            f"memory by {worst['memory']:.1e}, more than {TOLERANCE:g}: it was deleted"
        )
    return OnnxExport(path, steps, worst["action"], worst["memory"])


def _difference(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.max(np.abs(first.astype(np.float64) - second.astype(np.float64)), initial=0.0))


def _episode(agent: Agent, seed: int) -> Iterator[tuple[dict[str, np.ndarray], bool, Any]]:
    """Yield observation, is_first and a function that takes the action: from the environment, or random ones."""
    from rl_lab.run_environments import build_evaluator

    try:
        evaluator = build_evaluator(
            agent.config, agent.device, num_envs=1, workers=0, normalizer=agent.normalizer
        )
        environment = evaluator.make_environment(seed, False)
    except LabError:  # it is not installed here
        yield from _random_observations(agent, seed)
        return
    try:
        environment.normalizer = None  # agent and model normalize
        obs, _ = environment.reset(seed=seed)
        ended = False
        for index in range(STEPS):
            taken: list[np.ndarray] = []
            yield {name: np.array(value[0]) for name, value in obs.items()}, index == 0, taken.append
            obs, _, terminated, truncated, _ = environment.step(taken[0][None])
            ended = bool(terminated[0] or truncated[0])
            if ended:
                return
    finally:
        environment.close()


def _random_observations(agent: Agent, seed: int) -> Iterator[tuple[dict[str, np.ndarray], bool, Any]]:
    rng = np.random.default_rng(seed)
    for index in range(STEPS):
        obs = {
            name: rng.integers(0, 256, spec.shape, dtype=np.uint8)
            if spec.dtype == "uint8"
            else rng.normal(size=spec.shape).astype(spec.dtype)
            for name, spec in agent.spec.observations.items()
        }
        yield obs, index == 0, lambda action: None
