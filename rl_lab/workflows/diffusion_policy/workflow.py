"""Diffusion Policy (Chi et al. 2023; real-stanford/diffusion_policy): actions from a denoising diffusion model.

A denoiser is trained on windows of demonstrations to predict the noise that was added to an action sequence, given the
last observations. Acting starts from noise, denoises a sequence in `sampling_steps` steps, executes a part of it, and
plans again (imitation.py). The moving average of the weights acts.
"""

from __future__ import annotations

import torch

from rl_lab.records import ActMode, NoiseSpec
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.diffusion_policy.schedule import NoiseSchedule, denoised
from rl_lab.workflows.diffusion_policy.settings import DiffusionPolicySettings
from rl_lab.workflows.imitation import ImitationWorkflow, Tensors, Windows


class DiffusionPolicyWorkflow(ImitationWorkflow):
    """Controller `policy` is a denoiser: (B, T, A), step (B,), features (B, To, F), dropout seeds -> noise (B, T, A)."""

    settings_type: type[DiffusionPolicySettings] = DiffusionPolicySettings
    settings: DiffusionPolicySettings

    def _bind_context(self, context: WorkflowContext) -> None:
        super()._bind_context(context)
        self.schedule = NoiseSchedule(self.settings.denoising_steps).to(self.device)
        self.steps = self.schedule.sampling_steps(self.settings.sampling_steps)

    def _noise(self) -> dict[str, NoiseSpec]:
        s = self.settings
        noise = {
            "step": NoiseSpec((s.batch_size,)),
            "action": NoiseSpec((s.batch_size, s.horizon, self.spec.action.size), "normal"),
        }
        seeds = getattr(self.policy, "seeds", None)
        return noise if seeds is None else {**noise, "dropout": NoiseSpec(seeds)}

    def _loss(self, windows: Windows, features: torch.Tensor, noise: Tensors) -> torch.Tensor:
        """Mean squared error of the predicted noise, (B,); padded actions count, as published."""
        step = (noise["step"] * self.settings.denoising_steps).long()
        noisy = self.schedule.add_noise(windows.action, noise["action"], step)
        predicted = self.policy(noisy, step, features, noise.get("dropout"))
        return (predicted.float() - noise["action"]).square().mean((1, 2))

    def _plan(self, features: torch.Tensor, mode: ActMode, needed: torch.Tensor) -> torch.Tensor:
        s = self.settings
        shape = (len(features), s.horizon, self.spec.action.size)

        def draw() -> torch.Tensor:
            return torch.randn(shape, generator=mode.generator, device=self.device)

        start = draw()
        noise = [draw() if s.sampler == "ddpm" and step > 0 else None for step in self.steps]
        if torch.compiler.is_exporting():
            zeros = torch.zeros_like(start)
            stacked = torch.stack([zeros if value is None else value for value in noise])
            return self._exported_plan(start, stacked, features, needed)
        sample = start
        for step, drawn in zip(self.steps, noise):
            at = torch.full((len(sample),), step, device=self.device)
            predicted = self.policy(sample, at, features, slow=True).float()
            sample = self.schedule.denoise(s.sampler, sample, predicted, step, s.sampling_steps, drawn)
        return sample

    def _exported_plan(
        self, start: torch.Tensor, noise: torch.Tensor, features: torch.Tensor, needed: torch.Tensor
    ) -> torch.Tensor:
        """`_plan` with its noise (S, M, T, A), as a loop and a condition of the exported graph.

        Else the graph would have the denoiser once for each step, and would run all of it for each action.
        """
        from torch._higher_order_ops.scan import scan

        s = self.settings
        steps = torch.tensor(self.steps, device=self.device)
        table = torch.tensor(
            [self.schedule.coefficients(s.sampler, step, s.sampling_steps) for step in self.steps],
            device=self.device,
        )

        def plan(
            start: torch.Tensor,
            noise: torch.Tensor,
            features: torch.Tensor,
            steps: torch.Tensor,
            table: torch.Tensor,
        ) -> torch.Tensor:
            def one_step(
                sample: torch.Tensor, row: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
            ) -> tuple[torch.Tensor, torch.Tensor]:
                step, coefficients, drawn = row
                predicted = self.policy(sample, step.expand(len(sample)), features, slow=True).float()
                sample = denoised(coefficients.unbind(0), sample, predicted, drawn)
                return sample, step.clone()  # `scan` wants an output of each step, too

            last: torch.Tensor = scan(one_step, start, (steps, table, noise))[0]
            return last

        def keep(start: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            return start.clone()

        planned: torch.Tensor = torch.cond(needed.any(), plan, keep, (start, noise, features, steps, table))
        return planned
