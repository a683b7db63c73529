"""TD-MPC's parts as a planner sees them: next, reward, value, policy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.controllers.mpc_planner import WORST
from rl_lab.components.nn.ensemble import EnsembleMLP, Weights
from rl_lab.components.nn.fast_path import fast
from rl_lab.components.nn.kernels.two_hot_return import two_hot_return
from rl_lab.components.nn.normed_mlp import NormedMLP, cast_wide, missing, pad_to
from rl_lab.components.nn.two_hot import SymlogTwoHot

# --------------------
# What sequences of actions bring in a latent model, with less work than step by step: for planners' many rounds.
#
# Every sequence of an environment starts from the same latent, in every round. So the first step's share of it in the
# first layers is computed once for each environment, and only the actions' share for each sequence. From there on
# latents and controls lie side by side in one table that the dynamics write to: no copies, one product per layer.


ALIGNED = 16  # rows of the table are a multiple of it: what vector loads and matrix units like


class FirstStep:
    """A network of (latent, control) bound to the latents that sequences start from."""

    def __init__(self, mlp: NormedMLP, start: torch.Tensor, controls: int, width: int) -> None:
        """start: (N, L); controls: their number; width: of a table's rows."""
        self.layers: list[Any] = list(mlp.layers)
        self.first = self.layers[0]
        weights = self.first.weight0[:, : start.shape[1]], self.first.weight1[:, :controls]
        self.joint = pad_to(torch.cat(weights, 1), width)  # (units, width)
        self.share = F.linear(start, weights[0], self.first.bias)  # (N, units)

    def begin(self, controls: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The first layer at the start: controls (R, C) -> (R, units)."""
        groups = len(self.share)
        x = F.linear(controls, self.joint[:, -controls.shape[1] :]).unflatten(0, (groups, -1))
        where = None if out is None else out.unflatten(0, (groups, -1))
        return self.first.finish_groups(x, self.share, where).flatten(0, 1)

    def go_on(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The first layer at rows of the table, (R, width) -> (R, units)."""
        return self.first.finish(F.linear(rows, self.joint, self.first.bias), out)

    def rest(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The other layers."""
        for layer in self.layers[1:-1]:
            x = layer(x)
        return self.layers[-1](x, out=out)


class LatentReturns:
    """Bound to the latents of N environments, for S sequences of H actions each; R = N · S rows by environment."""

    def __init__(
        self,
        *,
        dynamics: Any,  # with an `mlp`
        reward_head: Any,  # with an `mlp` and a `regression`
        online: EnsembleMLP,  # the critic's
        pair: Weights,  # of two of its members
        latent: torch.Tensor,  # (N, L)
        actions: torch.Tensor,  # (R, H, A), for their shape
        task: tuple[torch.Tensor, ...],  # one (R, D), or none
    ) -> None:
        rows, self.steps, self.actions = actions.shape
        self.latent = latent.shape[1]
        controls = self.actions + sum(part.shape[1] for part in task)
        used = self.latent + controls
        width = used + missing(used, ALIGNED)
        # (H + 1, R, width): latent, action, task, zeros; the first latents are not written, nobody reads them.
        self.table = latent.new_empty(self.steps + 1, rows, width)
        self.table[..., used:] = 0.0
        for part in task:
            self.table[..., self.latent + self.actions : used] = part
        self.dynamics = FirstStep(dynamics.mlp, latent, controls, width)
        self.reward = FirstStep(reward_head.mlp, latent, controls, width)
        self.regression = reward_head.regression
        self.online = online
        first = pair[0]
        inputs = torch.cat([first["input0"][:, : self.latent], first["input1"][:, :controls]], 1)
        inputs = F.pad(inputs, (0, 0, 0, width - used))
        rest = {name: value for name, value in first.items() if not name.startswith("input")}
        self.pair: Weights = [{"input0": inputs, **rest}, *pair[1:]]
        self.bias = pair[-1]["bias"].squeeze(1)[:, : online.outputs].contiguous()
        self.unbiased: Weights = [*self.pair[:-1], {"input0": self.pair[-1]["input0"]}]

    def roll_out(self, actions: torch.Tensor) -> torch.Tensor:
        """actions: (R, H, A) -> where they lead to, (R, L), in the table."""
        self.table[:-1, :, self.latent : self.latent + self.actions] = actions.transpose(0, 1)
        net = self.dynamics
        for t in range(self.steps):
            x = net.go_on(self.table[t]) if t else net.begin(self.table[0, :, self.latent :])
            net.rest(x, out=self.table[t + 1, :, : self.latent])
        return self.table[-1, :, : self.latent]

    def reward_logits(self) -> torch.Tensor:
        """Of the last rollout, (H, R, bins)."""
        net, steps, rows = self.reward, self.steps, self.table.shape[1]
        hidden = self.table.new_empty(steps, rows, net.first.outputs)
        net.begin(self.table[0, :, self.latent :], hidden[0])
        if steps > 1:
            net.go_on(self.table[1:-1].flatten(0, 1), hidden[1:].flatten(0, 1))
        return net.rest(hidden.flatten(0, 1)).unflatten(0, (steps, rows))

    def total(
        self,
        action: torch.Tensor,  # (R, A) the policy's in the last latents
        weight: torch.Tensor,  # (R, H + 1) discounts
        critic: Any,  # for `mean` and `combine`
    ) -> torch.Tensor:
        """Σ weight · reward + weight_H · value of the last rollout, (R,)."""
        self.table[-1, :, self.latent : self.latent + self.actions] = action
        rewards, end = self.reward_logits(), self.table[-1]
        if fast() and isinstance(self.regression, SymlogTwoHot) and critic.reduce == "mean":
            values = self.online(end, weights=self.unbiased)
            return two_hot_return(rewards, values, self.bias, self.regression.centers, weight, WORST)
        value = critic.combine(critic.mean(self.online(end, weights=self.pair)))
        sums = (weight[:, :-1].t() * self.regression.mean(rewards).float()).sum(0)
        return (sums + weight[:, -1] * value.float()).nan_to_num(nan=WORST, neginf=WORST)


def can_be_joined(dynamics: Any, reward_head: Any, pair: Weights) -> bool:
    """Whether all three are layers of our own on (latent, control)."""
    nets = [getattr(part, "mlp", None) for part in (dynamics, reward_head)]
    fit = [isinstance(net, NormedMLP) and len(net.inputs) == 2 and len(net.layers) > 1 for net in nets]
    return all(fit) and "input1" in pair[0] and len(pair) > 1


def control(action: torch.Tensor, *task: torch.Tensor) -> torch.Tensor:
    """What dynamics, reward and value see beside the latent: the action, and the task's embedding where there is one."""
    return torch.cat([action, *(part.to(action.dtype) for part in task)], -1) if task else action


class LatentModel:
    """A latent world model bound to the tasks of N environments and to two members of its critic.

    Rows are grouped by environment: (N · S, …), or (N · S, H, …) for several steps at once.
    """

    rewards_on_arrival = False

    def __init__(
        self,
        *,
        dynamics: Any,
        reward_head: Any,
        policy: Any,
        critic: Any,  # for `mean` and `combine`
        online: Any,  # the critic's ensemble, perhaps in another number format
        pair: Weights,  # of two of its members
        termination_head: Any = None,
        task: torch.Tensor | None = None,  # (N, D) embeddings
        mask: torch.Tensor | None = None,  # (N, A)
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        # Layers of our own take an action with zeros behind it, as wide as their weights.
        own_layers = isinstance(getattr(dynamics, "mlp", None), NormedMLP)
        # With a task beside the action, the layer itself sees to the width.
        self.action_width = pair[0]["input1"].shape[1] if own_layers and task is None else None
        if termination_head is None and can_be_joined(dynamics, reward_head, pair):
            self.returns = self._returns  # planners look whether there is one
        self._dynamics, self._reward, self._policy = dynamics, reward_head, policy
        self._critic, self._online, self._pair = critic, online, pair
        self._termination = termination_head
        self._task, self._mask = task, mask
        self._work: LatentReturns | None = None
        self.noise = {"policy": policy.noise, "value": policy.noise}
        if termination_head is not None:
            self.alive = self._alive  # planners look whether there is one

    def next(
        self, latent: torch.Tensor, action: torch.Tensor, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._dynamics(latent, control(action, *self._of_rows(self._task, latent)))

    def _returns(
        self, latent: torch.Tensor, actions: torch.Tensor, weight: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        """From N latents, the same in every call, R sequences: (N, L), (R, H, A), weight (R, H + 1) -> (R,)."""
        if self._work is None:
            self._work = LatentReturns(
                dynamics=self._dynamics,
                reward_head=self._reward,
                online=self._online,
                pair=self._pair,
                latent=latent,
                actions=actions,
                task=self._of_rows(self._task, actions[:, 0]),
            )
        end = self._work.roll_out(actions)
        return self._work.total(self.policy(end, noise), weight, self._critic)

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
        """The critic's opinion of what the policy would do."""
        task = self._of_rows(self._task, latent)
        action = self.policy(latent, noise)
        action = cast_wide(action, self.dtype, self.action_width or action.shape[-1])
        logits = self._online(latent, control(action, *task), weights=self._pair)
        return self._critic.combine(self._critic.mean(logits))

    def _alive(self, following: torch.Tensor) -> torch.Tensor:
        """1 where the episode goes on, 0 where its end is likelier: as the original plans."""
        return (self._termination(following, *self._of_rows(self._task, following)) <= 0.0).float()

    def _of_rows(self, value: torch.Tensor | None, latent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(N, D) for each row of (N · S, …, L): a tuple of one (N · S, …, D), empty where there is no such thing."""
        if value is None:
            return ()
        rows = latent.shape[0] // len(value)
        steps = latent.shape[1:-1]
        spread = value.view(len(value), 1, *[1] * len(steps), value.shape[-1])
        return (spread.expand(-1, rows, *steps, -1).flatten(0, 1).to(latent.dtype),)


# --------------------
# Modules in another number format, kept beside the ones that are trained.


WIDTH = 8  # numbers of two bytes that a matrix unit loads at once


class CastCopy:
    """`parts[name]` computes in `dtype`; `refresh` brings its weights up to date in a few kernels.

    Acting reads every weight many times and changes none: one cast per call instead of one in front of every product,
    and activations that stay in the small format throughout. In the format of the originals it is the originals.
    Weights of odd widths get zeros beside them (`widen`): without, products in the small format take the slow way.
    Buffers (bins of a two-hot code) keep theirs. Nothing of it belongs into a checkpoint.
    """

    def __init__(self, parts: Mapping[str, nn.Module], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._sources: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._widened: list[tuple[torch.Tensor, torch.Tensor]] = []  # (a part of the copy, its source)
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
                    room = target.data[tuple(slice(size) for size in source.shape)]
                    self._widened.append((room, source.detach()))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        for target, source in self._widened:
            target.copy_(source)
