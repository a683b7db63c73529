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
MOST_VALUES = 8  # of a vector observation, in its picture
BORDER = 2  # pixels; green while the model observes, red while it predicts


@torch.no_grad()
def dreamer_report(workflow: DreamerWorkflow, batch: Batch) -> dict[str, Any]:
    """Observe the first half of each sequence, then predict the second half and imagine a rollout.

    open_loop/<name>          (T, C, B·(H + 4), 3·(W + 4)) uint8: truth | model | error, framed, with recorded actions
                              or, of a vector, (3, h, w) uint8: truth and model over time, for one sequence
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
        elif value.is_floating_point():
            report[f"open_loop/{key}"] = values_picture(obs[key][0].flatten(1), value[0].flatten(1), seen)
    return report


def truth_model_error(truth: torch.Tensor, model: torch.Tensor, seen: int) -> torch.Tensor:
    """truth, model: (B, T, C, H, W) uint8 -> video (T, C, B·(H + 4), 3·(W + 4)) uint8; an error of 0 is grey.

    The frame lies around the images, so that it hides nothing of small ones.
    """
    error = ((model.float() - truth.float()) / 2 + 127.5).to(torch.uint8)
    frame = truth.new_zeros((truth.shape[1], truth.shape[2]))  # (T, C)
    if truth.shape[2] == 3:  # colour: red, green, blue
        frame[:seen, 1] = 255
        frame[seen:, 0] = 255
    else:
        frame[:seen] = 255
    dark = torch.zeros_like(frame)
    video = torch.cat([_framed(truth, dark), _framed(model, frame), _framed(error, dark)], -1)
    return video.permute(1, 2, 0, 3, 4).flatten(2, 3).cpu()


def values_picture(truth: torch.Tensor, model: torch.Tensor, seen: int) -> torch.Tensor:
    """truth, model: (T, D) -> picture (3, H, W) uint8: a panel for each of the first MOST_VALUES values over time.

    Grey: the truth; green while the model observes, red while it predicts.
    """
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = min(truth.shape[-1], MOST_VALUES)
    columns = min(count, 2)
    rows = -(-count // columns)
    figure = Figure(
        figsize=(3.6 * columns, 1.4 * rows + 0.3), dpi=100, layout="constrained", facecolor="white"
    )
    canvas = FigureCanvasAgg(figure)
    steps = np.arange(len(truth))
    real, predicted = truth.float().cpu().numpy(), model.float().cpu().numpy()
    for index in range(count):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.plot(steps, real[:, index], color="#9aa0a6", linewidth=3, label="truth")
        axes.plot(
            steps[:seen], predicted[:seen, index], color="#1a9850", linewidth=1.5, label="model observes"
        )
        after = slice(max(seen - 1, 0), None)
        axes.plot(
            steps[after], predicted[after, index], color="#d73027", linewidth=1.5, label="model predicts"
        )
        axes.set_title(f"value {index}", fontsize=8, loc="left")
        axes.tick_params(labelsize=7)
        axes.spines[["right", "top"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, fontsize=7, frameon=False)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def _framed(images: torch.Tensor, color: torch.Tensor) -> torch.Tensor:
    """images: (B, T, C, H, W); color: (T, C) -> (B, T, C, H + 4, W + 4)"""
    size, height, width = len(images), *images.shape[-2:]
    framed = color[None, :, :, None, None].repeat(size, 1, 1, height + 2 * BORDER, width + 2 * BORDER)
    framed[..., BORDER : BORDER + height, BORDER : BORDER + width] = images
    return framed
