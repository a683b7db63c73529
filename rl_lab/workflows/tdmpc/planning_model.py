"""The latent model that TD-MPC's planner searches, the fast value of candidate sequences, and cast weights.

`LatentModel` has the planner's interface (next, reward, value, policy). `RolloutValue` computes the values of
many action sequences with less work. `CastCopy` keeps low-precision copies of the networks for planning.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.controllers.mpc_planner import WORST
from rl_lab.components.nn.normed_mlp import EnsembleMLP, NormedMLP, Weights, cast_wide, pad_to, padding
from rl_lab.components.nn.two_hot import SymlogTwoHot


def control(action: torch.Tensor, *task: torch.Tensor) -> torch.Tensor:
    """Second input of dynamics, reward and value: the action, then the task embedding if there is one."""
    return torch.cat([action, *(part.to(action.dtype) for part in task)], -1) if task else action


class LatentModel:
    """TD-MPC's world model for one plan: with the tasks of N environments and two members of the critic.

    Rows are grouped by environment: (N · S, …), or (N · S, H, …) for H steps at once.
    """

    rewards_on_arrival = False

    def __init__(
        self,
        *,
        dynamics: Any,
        reward_head: Any,
        policy: Any,
        critic: Any,  # with `mean` and `combine`
        online: Any,  # the critic's ensemble, possibly in a lower precision
        pair: Weights,  # weights of two of its members
        termination_head: Any = None,
        task: torch.Tensor | None = None,  # (N, D) embeddings
        mask: torch.Tensor | None = None,  # (N, A)
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        # NormedMLP layers accept an action that is padded with zeros to the width of their weights.
        padded = isinstance(getattr(dynamics, "mlp", None), NormedMLP)
        # With a task embedding after the action, the layer itself pads the input.
        self.action_width = pair[0]["input1"].shape[1] if padded and task is None else None
        if termination_head is None and supports_rollout_value(dynamics, reward_head, pair):
            self.returns = self._returns  # planners use it if the attribute exists
        self._dynamics, self._reward, self._policy = dynamics, reward_head, policy
        self._critic, self._online, self._pair = critic, online, pair
        self._termination = termination_head
        self._task, self._mask = task, mask
        self._rollout_value: RolloutValue | None = None
        self.noise = {"policy": policy.noise, "value": policy.noise}
        if termination_head is not None:
            self.alive = self._alive  # planners use it if the attribute exists

    def next(
        self, latent: torch.Tensor, action: torch.Tensor, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._dynamics(latent, control(action, *self._of_rows(self._task, latent)))

    def _returns(
        self, latent: torch.Tensor, actions: torch.Tensor, weight: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        """Values (R,) of sequences (R, H, A) from latents (N, L), fixed over calls; weight: (R, H + 1)."""
        if self._rollout_value is None:
            self._rollout_value = RolloutValue(
                dynamics=self._dynamics,
                reward_head=self._reward,
                online=self._online,
                pair=self._pair,
                latent=latent,
                actions=actions,
                task=self._of_rows(self._task, actions[:, 0]),
            )
        last = self._rollout_value.roll_out(actions)
        return self._rollout_value.total(self.policy(last, noise), weight, self._critic)

    def reward(
        self, latent: torch.Tensor, action: torch.Tensor, following: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._reward.predict(latent, control(action, *self._of_rows(self._task, latent)))

    def policy(self, latent: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        masks = self._of_rows(self._mask, latent)
        return self._policy.sample(
            latent, noise, *self._of_rows(self._task, latent), mask=masks[0] if masks else None
        )

    def value(self, latent: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Q of the policy's action: the value after the planning horizon."""
        task = self._of_rows(self._task, latent)
        action = self.policy(latent, noise)
        action = cast_wide(action, self.dtype, self.action_width or action.shape[-1])
        logits = self._online(latent, control(action, *task), weights=self._pair)
        return self._critic.combine(self._critic.mean(logits))

    def _alive(self, following: torch.Tensor) -> torch.Tensor:
        """1 if P(termination) ≤ 0.5, else 0, as nicklashansen/tdmpc2 plans."""
        return (self._termination(following, *self._of_rows(self._task, following)) <= 0.0).float()

    def _of_rows(self, value: torch.Tensor | None, latent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Repeat (N, D) for the rows of `latent` (N · S, …, L): a tuple of one (N · S, …, D), or empty."""
        if value is None:
            return ()
        rows = latent.shape[0] // len(value)
        steps = latent.shape[1:-1]
        view = value.view(len(value), 1, *[1] * len(steps), value.shape[-1])
        return (view.expand(-1, rows, *steps, -1).flatten(0, 1).to(latent.dtype),)


# ---------------------------------------------------------------- fast value of action sequences

ALIGNED = 16  # row widths are a multiple of it, for vector loads and tensor cores


class SharedStartMLP:
    """An MLP of (latent, control) that computes the first layer's part of the starting latents only once."""

    def __init__(self, mlp: NormedMLP, start: torch.Tensor, controls: int, width: int) -> None:
        """start: (N, L); controls: size of a control; width: padded size of an input row."""
        self.layers: list[Any] = list(mlp.layers)
        self.first = self.layers[0]
        weights = self.first.weight0[:, : start.shape[1]], self.first.weight1[:, :controls]
        self.weight = pad_to(torch.cat(weights, 1), width)  # (units, width)
        self.start_part = F.linear(start, weights[0], self.first.bias)  # (N, units)

    def first_layer(self, controls: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The first layer at the starting latents: controls (R, C) -> (R, units)."""
        groups = len(self.start_part)
        x = F.linear(controls, self.weight[:, -controls.shape[1] :]).unflatten(0, (groups, -1))
        grouped_out = None if out is None else out.unflatten(0, (groups, -1))
        return self.first.finish_groups(x, self.start_part, grouped_out).flatten(0, 1)

    def next_layer(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The first layer at the next steps: input rows (R, width) -> (R, units)."""
        return self.first.finish(F.linear(rows, self.weight, self.first.bias), out)

    def remaining(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """All layers after the first."""
        for layer in self.layers[1:-1]:
            x = layer(x)
        return self.layers[-1](x, out=out)


class RolloutValue:
    """Values of S sequences of H actions for each of N environments; R = N · S rows, grouped by environment.

    All sequences of an environment start from the same latent, in every iteration of the planner. So the
    latent part of the first layers is computed once per environment. Later steps read latent, action and task
    as one row of `inputs`, which the dynamics write to directly: no copies, one matrix product per layer.
    """

    def __init__(
        self,
        *,
        dynamics: Any,  # with an `mlp`
        reward_head: Any,  # with an `mlp` and a `regression`
        online: EnsembleMLP,  # the critic's ensemble
        pair: Weights,  # weights of two of its members
        latent: torch.Tensor,  # (N, L)
        actions: torch.Tensor,  # (R, H, A); only the shape is used
        task: tuple[torch.Tensor, ...],  # empty, or one (R, D)
    ) -> None:
        rows, self.steps, self.actions = actions.shape
        self.latent = latent.shape[1]
        controls = self.actions + sum(part.shape[1] for part in task)
        used = self.latent + controls
        width = used + padding(used, ALIGNED)
        # (H + 1, R, width): latent, action, task, zeros. The first latents are neither written nor read.
        self.inputs = latent.new_empty(self.steps + 1, rows, width)
        self.inputs[..., used:] = 0.0
        for part in task:
            self.inputs[..., self.latent + self.actions : used] = part
        self.dynamics = SharedStartMLP(dynamics.mlp, latent, controls, width)
        self.reward = SharedStartMLP(reward_head.mlp, latent, controls, width)
        self.regression = reward_head.regression
        self.online = online
        first = pair[0]
        weight = torch.cat([first["input0"][:, : self.latent], first["input1"][:, :controls]], 1)
        weight = F.pad(weight, (0, 0, 0, width - used))
        others = {name: value for name, value in first.items() if not name.startswith("input")}
        self.pair: Weights = [{"input0": weight, **others}, *pair[1:]]
        self.bias = pair[-1]["bias"].squeeze(1)[:, : online.outputs].contiguous()
        self.unbiased: Weights = [*self.pair[:-1], {"input0": self.pair[-1]["input0"]}]

    def roll_out(self, actions: torch.Tensor) -> torch.Tensor:
        """actions: (R, H, A) -> last latents (R, L), a view of `inputs`."""
        self.inputs[:-1, :, self.latent : self.latent + self.actions] = actions.transpose(0, 1)
        mlp = self.dynamics
        for t in range(self.steps):
            x = mlp.next_layer(self.inputs[t]) if t else mlp.first_layer(self.inputs[0, :, self.latent :])
            mlp.remaining(x, out=self.inputs[t + 1, :, : self.latent])
        return self.inputs[-1, :, : self.latent]

    def reward_logits(self) -> torch.Tensor:
        """Reward logits of the last rollout, (H, R, bins)."""
        mlp, steps, rows = self.reward, self.steps, self.inputs.shape[1]
        hidden = self.inputs.new_empty(steps, rows, mlp.first.outputs)
        mlp.first_layer(self.inputs[0, :, self.latent :], hidden[0])
        if steps > 1:
            mlp.next_layer(self.inputs[1:-1].flatten(0, 1), hidden[1:].flatten(0, 1))
        return mlp.remaining(hidden.flatten(0, 1)).unflatten(0, (steps, rows))

    def total(
        self,
        action: torch.Tensor,  # (R, A) the policy's actions in the last latents
        weight: torch.Tensor,  # (R, H + 1) discounts
        critic: Any,  # with `mean` and `combine`
    ) -> torch.Tensor:
        """Value of the last rollout: Σ_t weight_t · reward_t + weight_H · Q(z_H, action), (R,)."""
        self.inputs[-1, :, self.latent : self.latent + self.actions] = action
        rewards, last = self.reward_logits(), self.inputs[-1]
        if self.online.fast and isinstance(self.regression, SymlogTwoHot) and critic.reduce == "mean":
            from rl_lab.components.kernels.two_hot import two_hot_return

            values = self.online(last, weights=self.unbiased)
            return two_hot_return(rewards, values, self.bias, self.regression.centers, weight, WORST)
        value = critic.combine(critic.mean(self.online(last, weights=self.pair)))
        sums = (weight[:, :-1].t() * self.regression.mean(rewards).float()).sum(0)
        return (sums + weight[:, -1] * value.float()).nan_to_num(nan=WORST, neginf=WORST)


def supports_rollout_value(dynamics: Any, reward_head: Any, pair: Weights) -> bool:
    """Whether dynamics and reward head are NormedMLPs and all three networks take (latent, control)."""
    nets = [getattr(part, "mlp", None) for part in (dynamics, reward_head)]
    supported = [isinstance(net, NormedMLP) and len(net.inputs) == 2 and len(net.layers) > 1 for net in nets]
    return all(supported) and "input1" in pair[0] and len(pair) > 1


# ---------------------------------------------------------------- networks in lower precision

WIDTH = 8  # widths are padded to a multiple of it: tensor cores load 8 two-byte values at once


class CastCopy:
    """Copies of networks that compute in `dtype`; `refresh` copies the current weights with a few kernels.

    Planning reads each weight many times without changing it. One cast per plan replaces a cast before each
    matrix product, and activations stay in low precision. With float32, `parts` are the original networks.
    Weights with odd widths are padded with zeros (`widen`), otherwise the products use slow kernels. Buffers
    (the bins of a two-hot code) keep their dtype. The copies are not saved in checkpoints.
    """

    def __init__(self, parts: Mapping[str, nn.Module], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._sources: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._widened: list[tuple[torch.Tensor, torch.Tensor]] = []  # (slice of the copy, source)
        if dtype == torch.float32:
            self.parts = dict(parts)
            return
        self.parts = {name: copy.deepcopy(part).requires_grad_(False) for name, part in parts.items()}
        for name, part in self.parts.items():
            for module in part.modules():
                widen: Any = getattr(module, "widen", None)
                if widen is not None:
                    widen(WIDTH)
            for source, target in zip(parts[name].parameters(), part.parameters(), strict=True):
                target.data = target.data.to(dtype)
                if target.shape == source.shape:
                    self._sources.append(source.detach())
                    self._targets.append(target.data)
                else:
                    unpadded = target.data[tuple(slice(size) for size in source.shape)]
                    self._widened.append((unpadded, source.detach()))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        for target, source in self._widened:
            target.copy_(source)
