"""What sequences of actions bring in a latent model, with less work than step by step: for planners' many rounds.

Every sequence of an environment starts from the same latent, in every round. So the first step's share of it in the
first layers is computed once for each environment, and only the actions' share for each sequence. From there on
latents and controls lie side by side in one table that the dynamics write to: no copies, one product per layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rl_lab.components.controllers.mpc_planner import WORST
from rl_lab.components.nn.ensemble import EnsembleMLP, Weights
from rl_lab.components.nn.fast_path import fast
from rl_lab.components.nn.kernels.two_hot_return import two_hot_return
from rl_lab.components.nn.normed_mlp import NormedMLP, missing, pad_to
from rl_lab.components.nn.symlog_two_hot import SymlogTwoHot

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
