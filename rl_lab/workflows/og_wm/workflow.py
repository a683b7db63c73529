"""World Models (Ha, Schmidhuber 2018): a VAE (V), an MDN-RNN (M), a linear controller (C) evolved by CMA-ES.

V encodes each image as z. M keeps a memory h and predicts a mixture density of the next z. C is one linear
layer on [z, h]. `ControllerEvolution` (ask, act, tell) evolves it with CMA-ES in the environment,
`DreamEvolution` in M's dream. The stages are hooks; phases run them in order:

    collect · update_vae · encode · update_mdn · evolve, or evolve_in_dream

In a phase, `update_world_model` is update_vae or update_mdn_on_images, and `update_controller` is evolve or
evolve_in_dream, by the phase's name (`resolve_hook`).

`encode` runs V once on each stored image and stores mean and log variance as columns, so M trains without
images. The acting controller is the mean of the CMA-ES distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rl_lab.components.nn.training_step import (
    NonFiniteGuard,
    accumulated_loss,
    optimizer_step,
)
from rl_lab.components.representation_learners.conv_vae import sample_normal
from rl_lab.errors import ConfigError
from rl_lab.records import (
    ActMode,
    AnyHook,
    ArraySpec,
    Batch,
    BatchSpec,
    EvolveHook,
    Hook,
    ImaginedStep,
    NoiseSpec,
    Spec,
    TransformHook,
    UpdateResult,
)
from rl_lab.utils.device import autocast, resolve_precision
from rl_lab.utils.ranks import count_over_ranks
from rl_lab.utils.seeding import derive_seed
from rl_lab.workflows.base import PhaseConfig, PolicyState, WorldModelWorkflow
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.og_wm.report import REPORT_ROWS, REPORT_SEQUENCES, world_models_report
from rl_lab.workflows.og_wm.settings import WorldModelsSettings

Tensors = Mapping[str, torch.Tensor]
Metrics = dict[str, torch.Tensor]
ENCODE_BATCH = 512  # images per call of V in `encode` and `dream_start`


class OriginalWorldModelsWorkflow(WorldModelWorkflow):
    """Components vae, mdn_rnn; controllers controller, cma_es, explorer; optimizers vae, mdn_rnn."""

    settings_type: type[WorldModelsSettings] = WorldModelsSettings
    phase_settings = ("algorithm.temperature",)

    def initialize(self, context: WorkflowContext) -> None:
        self._bind_context(context)

    def _bind_context(self, context: WorkflowContext) -> None:
        self.spec = context.spec
        self.device = torch.device(context.device)
        self.settings = self.settings_type.from_config(context.config.algorithm)
        self.autocast = partial(
            autocast, resolve_precision(str(context.config.training.precision), self.device), self.device
        )
        self.vae = context.component("vae", "observe", "observe_sequence", "decode", "observations", "losses")
        self.mdn_rnn = context.component(
            "mdn_rnn", "observe", "observe_sequence", "reset_state", "predict", "losses"
        )
        self.controller = context.controller(
            "controller", "act", "act_population", "get_vector", "set_vector"
        )
        self.cma_es = context.controller("cma_es", "start", "ask", "tell", "get_state", "set_state")
        self.explorer = context.controller("explorer", "initial_state", "act")
        self._check_widths()
        modules = {"vae": self.vae, "mdn_rnn": self.mdn_rnn}
        self.optimizers = {name: context.optimizer(name) for name in modules}
        for name, module in modules.items():
            context.check_trained({name: module.parameters()}, {name: self.optimizers[name]}, name)
        self.guards = {name: NonFiniteGuard().to(self.device) for name in self.optimizers}
        self.temperature = self.settings.temperature  # of all dreams; a phase may `set` it
        self.evolving = ""  # the phase and iteration that `cma_es` was started for
        seed = derive_seed(int(context.config.experiment.seed), "cma_es")
        self.evolution = ControllerEvolution(self, seed)
        self.dream_evolution = DreamEvolution(self, seed)

    def _check_widths(self) -> None:
        latent = self.vae.latent
        if self.mdn_rnn.latent != latent:
            raise ConfigError(
                f"components.mdn_rnn.latent is {self.mdn_rnn.latent}, but the VAE has {latent} latents: "
                f"set components.mdn_rnn.latent={latent}"
            )
        features = latent + len(self.settings.memory.replace("none", "")) * self.mdn_rnn.hidden
        if self.controller.features != features:
            raise ConfigError(
                f"controllers.controller.features is {self.controller.features}, but with "
                f"algorithm.memory={self.settings.memory} the controller gets {features} features: "
                f"set controllers.controller.features={features}"
            )

    # ---------------------------------------------------------------- hooks

    def hooks(self) -> dict[str, AnyHook]:
        s, latent = self.settings, self.vae.latent
        codes = ("mu", "logvar", "action", "reward", "terminated", "is_first")
        # `encode` reads the buffer itself. Its batch is the first one declared, which `report` gets.
        report = BatchSpec(REPORT_SEQUENCES, REPORT_ROWS, boundary="pad")
        images = BatchSpec(s.batch_size, 1, keys=tuple(f"obs/{key}" for key in self.vae.keys))
        # L predictions need L + 1 rows. A sequence ends with its episode.
        sampler = "first" if s.sequences == "start" else "uniform"
        sequences = BatchSpec(s.batch_size, s.batch_length + 1, boundary="pad", sampler=sampler, keys=codes)
        with_images = replace(sequences, keys=(*(images.keys or ()), *codes[2:]))
        starts = BatchSpec(s.evolution.episodes, s.dream_context, boundary="pad", pad="left", keys=codes)
        noise = NoiseSpec((s.batch_size, s.batch_length + 1, latent), "normal")
        return {
            "encode": TransformHook(self._encode_rows, batch=report),
            "update_vae": Hook(
                self._vae_step,
                batch=images,
                noise={"latent": NoiseSpec((s.batch_size, 1, latent), "normal")},
                prefix="train/vae",
            ),
            "update_mdn": Hook(self._mdn_step, batch=sequences, noise={"latent": noise}, prefix="train/mdn"),
            "update_mdn_on_images": Hook(
                self._mdn_step_on_images, batch=with_images, noise={"latent": noise}, prefix="train/mdn"
            ),
            "evolve": EvolveHook(self.evolution, prefix="controller"),
            "evolve_in_dream": EvolveHook(self.dream_evolution, batch=starts, prefix="controller"),
        }

    def resolve_hook(self, name: str, phase: str) -> str:
        """`update_world_model` trains V or M, and `update_controller` evolves in a dream or not, by the phase."""
        words = phase.lower()
        if name == "update_controller":
            return "evolve_in_dream" if "dream" in words else "evolve"
        if name != "update_world_model":
            return name
        trains_vae, trains_mdn = "vae" in words, "mdn" in words or "rnn" in words
        if trains_vae == trains_mdn:
            raise ConfigError(
                f"phase '{phase}': update_world_model trains V in a phase with vae in its name and M in one with "
                "mdn: rename the phase, or use the hooks update_vae, encode and update_mdn"
            )
        # A phase for M may follow without `encode`, so V encodes the images of each batch.
        return "update_vae" if trains_vae else "update_mdn_on_images"

    def _vae_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        """Train V: reconstruction error + KL with tolerance."""

        def loss(part: Batch, part_noise: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Metrics]:
            with self.autocast():
                losses, metrics = self.vae.losses(part.obs, part_noise["latent"])
            means = {name: loss.mean() for name, loss in losses.items()}
            return torch.stack(list(means.values())).sum(), {**_named(means), **metrics}

        parameters = list(self.vae.parameters())
        return self._finish(
            "vae", self.vae, *accumulated_loss(loss, batch, noise, parameters, self.settings.grad_acc_steps)
        )

    def _mdn_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        """Train M with teacher forcing: predict latent, reward and end of the next row from z and action."""
        return self._train_mdn(sample_normal(batch["mu"], batch["logvar"], noise["latent"]), batch)

    def _mdn_step_on_images(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        """As `_mdn_step`, with the codes of the current V instead of the stored ones; slower by one pass of V."""
        return self._train_mdn(self.encode_sequence(batch.obs, noise["latent"])["z"], batch)

    def _train_mdn(self, z: torch.Tensor, batch: Batch) -> UpdateResult:
        """z: (B, L + 1, latent)"""
        assert batch.mask is not None
        parts = self.settings.grad_acc_steps
        count = count_over_ranks(batch.mask[:, 1:].float().sum())

        def loss(part: Batch, part_noise: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Metrics]:
            z = part_noise["z"]
            state = self.mdn_rnn.reset_state(len(z))
            h, _ = self.mdn_rnn.observe_sequence(state, z[:, :-1], part.action[:, :-1])
            losses = self.mdn_rnn.losses(
                self.mdn_rnn.predict(h),
                z[:, 1:],
                part.reward[:, 1:],
                part.terminated[:, 1:],
                done_weight=self.settings.done_weight,
            )
            assert part.mask is not None
            real = part.mask[:, 1:].float()  # the padding is at the end
            share = count if parts == 1 else count / parts
            means = {name: (loss * real).sum() / share for name, loss in losses.items()}
            scaled = [self.settings.loss_scales[name] * mean for name, mean in means.items()]
            return torch.stack(scaled).sum(), {**_named(means), "real_steps": real.mean()}

        found = accumulated_loss(loss, batch, {"z": z}, list(self.mdn_rnn.parameters()), parts)
        return self._finish("mdn_rnn", self.mdn_rnn, *found)

    def _finish(self, name: str, part: torch.nn.Module, loss: torch.Tensor, metrics: Metrics) -> UpdateResult:
        step_metrics, _ = optimizer_step(
            loss,
            [self.optimizers[name]],
            {name: list(part.parameters())},
            guard=self.guards[name],
            limit_gradients=self._limit_gradients if name == "mdn_rnn" else None,
        )
        return UpdateResult({**metrics, **step_metrics})

    def _limit_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Clip gradients by value, as the original does for M."""
        limit = self.settings.gradient_limit
        if limit:
            torch._foreach_clamp_min_(gradients, -limit)
            torch._foreach_clamp_max_(gradients, limit)

    def _encode_rows(self, batch: Batch) -> dict[str, torch.Tensor]:
        latent = self.encode_sequence(batch.obs)
        return {"mu": latent["mu"], "logvar": latent["logvar"]}

    # ---------------------------------------------------------------- V, M and acting

    @torch.no_grad()
    def encode(self, obs: Tensors, noise: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """V on (N, C, H, W) images: z, mu, logvar, each (N, latent)."""
        with self.autocast():
            return dict(self.vae.observe(obs, noise))

    @torch.no_grad()
    def encode_sequence(self, obs: Tensors, noise: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """V on (B, T, C, H, W) images, in batches of `ENCODE_BATCH`."""
        size, rows = next(iter(obs.values())).shape[:2]
        flat = {key: obs[key].flatten(0, 1) for key in self.vae.keys}
        flat_noise = None if noise is None else noise.flatten(0, 1)
        parts = [
            self.encode(
                {key: value[i : i + ENCODE_BATCH] for key, value in flat.items()},
                None if flat_noise is None else flat_noise[i : i + ENCODE_BATCH],
            )
            for i in range(0, size * rows, ENCODE_BATCH)
        ]
        return {key: torch.cat([part[key] for part in parts]).unflatten(0, (size, rows)) for key in parts[0]}

    def features(self, z: torch.Tensor, state: Tensors) -> torch.Tensor:
        """Input of C (N, F): z and, depending on `algorithm.memory`, M's memory from *before* this z."""
        names = {"h": ("h",), "hc": ("h", "c"), "none": ()}[self.settings.memory]
        return torch.cat([z, *(state[name] for name in names)], -1)

    @torch.no_grad()
    def update_memory(self, policy_state: Tensors, is_first: torch.Tensor) -> dict[str, torch.Tensor]:
        """M's memory after the last z and action; zeros where an episode starts. h, c: (N, hidden)"""
        before = {key: policy_state[key] for key in ("h", "c")}
        after = self.mdn_rnn.observe(before, policy_state["z"], policy_state["action"])
        keep = (~is_first).float().unsqueeze(-1)
        return {key: value * keep for key, value in after.items()}

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        """M's memory from *before* the last z and action, this z and action, and the explorer's state."""
        dtype = torch.float32 if self.spec.action.kind == "continuous" else torch.int64
        return {
            **self.mdn_rnn.reset_state(num_envs),
            "z": torch.zeros(num_envs, self.vae.latent, device=self.device),
            "action": torch.zeros(num_envs, *self.spec.action.shape, dtype=dtype, device=self.device),
            **self.explorer.initial_state(num_envs, self.device),
        }

    def policy_columns(self) -> dict[str, ArraySpec]:
        column = ArraySpec((self.vae.latent,), "float32")
        return {"mu": column, "logvar": column}

    @torch.no_grad()
    def act(
        self, obs: dict[str, torch.Tensor], policy_state: PolicyState, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, PolicyState, dict[str, torch.Tensor]]:
        size = len(is_first)
        if mode.epsilon >= 1.0:  # pure exploration needs no network; `encode` fills the columns later
            action, explorer = self._explore(policy_state, is_first, mode)
            zeros = torch.zeros(size, self.vae.latent, device=self.device)
            state = {**self.mdn_rnn.reset_state(size), "z": zeros, "action": action, **explorer}
            return action, state, {"mu": zeros, "logvar": zeros}
        latent = self.encode(obs, self._latent_noise(size, mode))
        memory = self.update_memory(policy_state, is_first)
        action = self.controller.act(self.features(latent["z"], memory), mode)
        explorer = {key: policy_state[key] for key in ("explored", "left")}
        if mode.epsilon > 0.0:
            exploration, explorer = self._explore(policy_state, is_first, mode)
            explore = torch.rand(size, generator=mode.generator, device=self.device) < mode.epsilon
            action = torch.where(explore.view(-1, *[1] * (action.ndim - 1)), exploration, action)
        state = {**memory, "z": latent["z"], "action": action, **explorer}
        return action, state, {"mu": latent["mu"], "logvar": latent["logvar"]}

    def _latent_noise(self, size: int, mode: ActMode) -> torch.Tensor | None:
        """Noise to sample z, as in the original; None (z is the mean) if the mode does not sample."""
        if not mode.sample:
            return None
        return torch.randn(size, self.vae.latent, generator=mode.generator, device=self.device)

    def _explore(
        self, policy_state: PolicyState, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        action, explorer = self.explorer.act(policy_state, is_first, mode.generator)
        if self.spec.action.kind == "continuous":
            action = self.controller.from_unit(action)  # a rectified brake is 0 half of the time
        return action, explorer

    # ---------------------------------------------------------------- dreams

    @torch.no_grad()
    def dream_start(self, batch: Batch, *, generator: torch.Generator | None = None) -> PolicyState:
        size, rows = batch.reward.shape
        noise = torch.randn(size, rows, self.vae.latent, generator=generator, device=self.device)
        if all(key in batch.obs for key in self.vae.keys):
            z = self.encode_sequence(batch.obs, noise)["z"]
        else:
            z = sample_normal(batch["mu"], batch["logvar"], noise)
        state = self.mdn_rnn.reset_state(size)
        for t in range(rows - 1):
            state = self.mdn_rnn.observe(state, z[:, t], batch.action[:, t], batch.is_first[:, t])
            if batch.mask is not None:  # padding before a short history must not change the memory
                state = {key: value * batch.mask[:, t, None] for key, value in state.items()}
        keep = (~batch.is_first[:, -1]).float().unsqueeze(-1)
        return {"z": z[:, -1], **{key: value * keep for key, value in state.items()}}

    @torch.no_grad()
    def dream_observation(self, state: PolicyState) -> dict[str, torch.Tensor]:
        with self.autocast():
            return dict(self.vae.observations(self.vae.decode(state["z"])))

    def dreamed_observations(self, spec: Spec) -> list[str]:
        return list(self.vae.keys)

    @torch.no_grad()
    def dream_act(self, state: PolicyState, mode: ActMode) -> tuple[torch.Tensor, PolicyState]:
        return self.controller.act(self.features(state["z"], state), mode), state

    @torch.no_grad()
    def dream_step(
        self, state: PolicyState, action: torch.Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[PolicyState, ImaginedStep]:
        state, reward, done = self.dream_latent(state, action, self.dream_noise(len(action), generator))
        return state, ImaginedStep(reward, self.end_chance(done), self.dream_observation(state))

    def end_chance(self, done_logit: torch.Tensor) -> torch.Tensor:
        """Probability of the end. Training multiplies its odds by `done_weight`; this divides by it."""
        return torch.sigmoid(done_logit - math.log(self.settings.done_weight))

    def dream_noise(self, size: int, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Uniform and normal noise for one step of `size` dreams, (size, latent) each."""
        shape = (size, self.vae.latent)
        uniform = torch.rand(shape, generator=generator, device=self.device)
        return uniform, torch.randn(shape, generator=generator, device=self.device)

    def dream_latent(
        self, state: Tensors, action: torch.Tensor, noise: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[PolicyState, torch.Tensor, torch.Tensor]:
        """One step at `self.temperature`, not decoded: next state, reward (B,), logit of the end (B,)."""
        memory = self.mdn_rnn.observe({key: state[key] for key in ("h", "c")}, state["z"], action)
        prediction = self.mdn_rnn.predict(memory["h"])
        z = prediction.latent.sample(*noise, self.temperature)
        zeros = torch.zeros(len(z), device=z.device)
        reward = zeros if prediction.reward is None else prediction.reward
        done = zeros - torch.inf if prediction.done_logit is None else prediction.done_logit
        return {"z": z, **memory}, reward, done

    # ---------------------------------------------------------------- report and checkpoint

    def report(self, batch: Batch) -> dict[str, Any]:
        return world_models_report(self, batch)

    def get_state(self) -> dict[str, Any]:
        return {
            "guards": {name: guard.state_dict() for name, guard in self.guards.items()},
            "evolution": self.evolution.get_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        for name, guard in self.guards.items():
            if name in state.get("guards", {}):
                guard.load_state_dict(state["guards"][name])
        if "evolution" in state:
            self.evolution.set_state(state["evolution"])


def _named(means: Tensors) -> Metrics:
    return {f"loss/{key}": mean.detach() for key, mean in means.items()}


# ---------------------------------------------------------------- evolution of the controller

ALIVE_CHECK = 32  # dreamed steps between checks whether all dreams have ended


class ControllerEvolution:
    """The `step` of the hook `evolve` (see orchestration/evolution.py). Both hooks share one CMA-ES strategy.

    When a different phase starts to evolve (or the same one in the next round of a group), V and M may have
    changed: the strategy restarts around the current controller.
    """

    dreams = False

    def __init__(self, workflow: OriginalWorldModelsWorkflow, seed: int) -> None:
        self.workflow = workflow
        self.seed = seed
        settings = workflow.settings.evolution
        self.episodes_per_candidate = settings.episodes
        self.num_envs = settings.num_envs
        self.common_episodes = settings.common_episodes
        self.early_stop = settings.early_stop

    # ---------------------------------------------------------------- ask, act, tell

    def begin(self, phase: PhaseConfig) -> None:
        """Called before each generation."""
        workflow = self.workflow
        workflow.temperature = workflow.phase_value(phase, "algorithm.temperature")
        stage = f"{phase['name']}/{phase['iteration']}"
        if stage != workflow.evolving:
            workflow.evolving = stage
            workflow.cma_es.start(workflow.controller.get_vector(), derive_seed(self.seed, stage))

    def ask(self) -> torch.Tensor:
        candidates: torch.Tensor = self.workflow.cma_es.ask()
        return candidates.to(self.workflow.device)

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        return self.workflow.initial_policy_state(num_envs)

    def act(
        self,
        candidates: torch.Tensor,  # (N, D), one per environment
        obs: dict[str, torch.Tensor],
        policy_state: PolicyState,
        is_first: torch.Tensor,
        mode: ActMode,
    ) -> tuple[torch.Tensor, PolicyState]:
        """One pass of V and M for all environments; all controllers run as one batched matrix product."""
        workflow = self.workflow
        z = workflow.encode(obs, workflow._latent_noise(len(is_first), mode))["z"]
        memory = workflow.update_memory(policy_state, is_first)
        action = workflow.controller.act_population(candidates, workflow.features(z, memory))
        return action, {**memory, "z": z, "action": action}

    def tell(self, candidates: torch.Tensor, fitness: torch.Tensor) -> dict[str, float]:
        """Update CMA-ES with the fitness and set the controller to the mean of its distribution."""
        strategy, controller = self.workflow.cma_es, self.workflow.controller
        strategy.tell(fitness)
        controller.set_vector(strategy.mean)
        return {"step_size": strategy.step_size, "weight_norm": float(controller.get_vector().norm())}

    # ---------------------------------------------------------------- checkpoint

    def get_state(self) -> dict[str, Any]:
        workflow = self.workflow
        strategy = workflow.cma_es.get_state() if workflow.evolving else {}
        return {"stage": workflow.evolving, "strategy": strategy}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.workflow.evolving = str(state["stage"])
        if self.workflow.evolving:
            self.workflow.cma_es.set_state(state["strategy"])


class DreamEvolution(ControllerEvolution):
    """The `step` of `evolve_in_dream`: candidates act in M's dream, all from the same starts."""

    dreams = True

    @torch.no_grad()
    def evaluate(
        self, candidates: torch.Tensor, batch: Batch, generator: torch.Generator
    ) -> tuple[torch.Tensor, int]:
        """candidates: (P, D); batch: (E, T) rows to start after -> mean dreamed return (P,), dreamed steps.

        A dream ends when P(end) > 0.5. Starts and noise are the same for all candidates.
        """
        workflow = self.workflow
        count = len(candidates)
        start = workflow.dream_start(batch, generator=generator)
        episodes = len(start["z"])
        state = {
            key: value.repeat(count, 1) for key, value in start.items()
        }  # (P·E, …), grouped by candidate
        # A dream that starts at the end of an episode has return 0 for every candidate.
        alive = (~batch.terminated[:, -1]).float().repeat(count)
        returns = torch.zeros_like(alive)
        steps = torch.zeros((), device=workflow.device)
        for step in range(workflow.settings.imagination_horizon):
            features = workflow.features(state["z"], state).unflatten(0, (count, episodes))
            action = workflow.controller.act_population(candidates, features).flatten(0, 1)
            uniform, normal = workflow.dream_noise(episodes, generator)
            noise = (uniform.repeat(count, 1), normal.repeat(count, 1))
            state, reward, done = workflow.dream_latent(state, action, noise)
            steps += alive.sum()
            returns += reward * alive
            alive = alive * (done <= 0).float()
            if step % ALIVE_CHECK == ALIVE_CHECK - 1 and not bool(alive.any()):
                break
        return returns.view(count, episodes).mean(1), int(steps)
