"""Report of Dreamer: open-loop predictions of replayed sequences, and imagined rollouts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rl_lab.records import Batch, Imagined
from rl_lab.workflows.base import imagined_report

if TYPE_CHECKING:
    from rl_lab.workflows.dreamer.workflow import DreamerWorkflow


SEQUENCES = 6  # stacked vertically in an open-loop video
ROLLOUTS = 8  # side by side in an imagination video
BORDER = 2  # pixels; green while the model observes, red while it predicts


@torch.no_grad()
def dreamer_report(workflow: DreamerWorkflow, batch: Batch) -> dict[str, Any]:
    """Observe the first half of each sequence, then predict the second half and imagine a rollout.

    open_loop/<name>          (T, C, B·H, 3·W) uint8: images, truth | model | error, with recorded actions
    open_loop_error/<name>    mean squared error of the predicted half, of pixels in [0, 1] or in symlog space
    imagination/<name>, imagination_return   of rollouts with the policy's actions: see `imagined_report`

    The noise has its own generators with fixed seeds: a report is reproducible and does not change training.
    """
    context = workflow.settings.replay_context
    length = batch.reward.shape[1] - context
    seen = max(1, length // 2)
    start = Batch({key: value[:, : context + seen] for key, value in batch.columns.items()})
    first = Batch({key: value[:ROLLOUTS] for key, value in start.columns.items()})
    generator = torch.Generator(workflow.device).manual_seed(0)
    imagined = training_rollouts(workflow, first, length, generator)
    return {
        **_open_loop(workflow, batch, start, seen),
        **imagined_report(imagined, discount=workflow.settings.discount),
    }


@torch.no_grad()
def training_rollouts(
    workflow: DreamerWorkflow, batch: Batch, horizon: int, generator: torch.Generator
) -> Imagined:
    """Decoded rollouts from the end of each sequence, computed as in training: replay context, fused steps."""
    rssm, actor, decoder = workflow.rssm, workflow.actor, workflow.decoder
    draw = partial(rssm.draw_noise, generator=generator)
    with workflow.autocast():
        rows = batch.reward.shape[1] - workflow.settings.replay_context
        states, _ = workflow.infer(batch, draw(len(batch), rows))
        spec = actor.noise_spec(horizon, len(batch))
        action_noise = (torch.rand if spec.kind == "uniform" else torch.randn)(
            spec.shape, generator=generator, device=workflow.device
        )
        prior_noise = draw(horizon, len(batch))
        start = {key: value[:, -1] for key, value in states.items()}
        feature, action = workflow.rollout(start, prior_noise, action_noise)
        deter, stoch = feature.split([rssm.deter, rssm.stoch * rssm.classes], -1)
        states = {"deter": deter, "stoch": stoch.unflatten(-1, (rssm.stoch, rssm.classes))}
        return Imagined(
            states,
            action,
            reward=workflow.reward_head.predict(feature),
            cont=workflow.continues(feature),
            obs=decoder.observations(decoder(states, feature)),
        )


def _open_loop(workflow: DreamerWorkflow, batch: Batch, start: Batch, seen: int) -> dict[str, Any]:
    """start: the observed rows of `batch`: the context and the next `seen` rows of each sequence."""
    context = workflow.settings.replay_context
    size, length = len(batch.reward), batch.reward.shape[1] - context
    generator = torch.Generator(workflow.device).manual_seed(0)
    rssm, decoder = workflow.rssm, workflow.decoder
    with workflow.autocast():
        noise = rssm.draw_noise(size, length, generator=generator)
        states, _ = workflow.infer(start, noise[:, :seen])
        state = {key: value[:, -1] for key, value in states.items()}
        predicted: dict[str, list[torch.Tensor]] = {key: [] for key in states}
        for t in range(seen, length):
            state = rssm.imagine_step(state, batch.action[:, context + t - 1], noise[:, t])
            for key, value in state.items():
                predicted[key].append(value)
        states = {key: torch.cat([value, torch.stack(predicted[key], 1)], 1) for key, value in states.items()}
        prediction = decoder(states, rssm.feature(states))
    obs = {key: value[:, context:] for key, value in batch.obs.items()}
    report: dict[str, Any] = {}
    for key, loss in decoder.losses(prediction, obs).items():
        report[f"open_loop_error/{key}"] = float(loss[:, seen:].mean() / prediction[key][0, 0].numel())
    for key, value in decoder.observations(prediction).items():
        if value.dtype == torch.uint8 and value.ndim == 5:
            report[f"open_loop/{key}"] = truth_model_error(obs[key][:SEQUENCES], value[:SEQUENCES], seen)
    return report


def truth_model_error(truth: torch.Tensor, model: torch.Tensor, seen: int) -> torch.Tensor:
    """truth, model: (B, T, C, H, W) uint8 -> video (T, C, B·H, 3·W) uint8; an error of 0 is grey."""
    error = ((model.float() - truth.float()) / 2 + 127.5).to(torch.uint8)
    video = torch.cat([truth, _bordered(model, seen), error], -1)  # (B, T, C, H, 3W)
    return video.permute(1, 2, 0, 3, 4).flatten(2, 3).cpu()


def _bordered(images: torch.Tensor, seen: int) -> torch.Tensor:
    images = images.clone()
    height, width = images.shape[-2:]
    edge = torch.ones(height, width, dtype=torch.bool, device=images.device)
    edge[BORDER : height - BORDER, BORDER : width - BORDER] = False
    images[..., edge] = 0
    if images.shape[2] == 3:  # colour: red, green, blue
        images[:, :seen, 1, edge] = 255
        images[:, seen:, 0, edge] = 255
    else:
        images[:, :seen, :, edge] = 255
    return images
