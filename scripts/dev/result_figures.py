"""Draws the figures of the documentation from the files in docs/results and the configs, all in one style.

    python scripts/dev/result_figures.py                   # all of them
    python scripts/dev/result_figures.py tdmpc2_dog_run    # some, by the name of the picture
    python scripts/dev/result_figures.py --picture FILE NAME NAME …   # other curves that keep_result.py kept

In every learning curve: training episodes are a thin blue line (a wider one is their running mean), evaluations are orange
circles, new episodes at the end a green square with the 95 % interval of the mean, published values pink diamonds, or a
dashed pink line where a value belongs to no step of ours.
"""

from __future__ import annotations

import argparse
import csv
import json
import textwrap
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.tools.report.curves import Curve
from rl_lab.tools.report.figures import COLORS, DASHED, figure_file, legend, smoothed, step_axis
from rl_lab.tools.report.timeline import phases_of

RESULTS = Path(__file__).parents[2] / "docs" / "results"
IMAGES = RESULTS.parent / "images"
TRAINING, EVALUATION, NEW, PUBLISHED = COLORS[:4]
DEMO, SPEEDS, CURRICULA = "demo_curve", "update_times", "curricula"


@dataclass(frozen=True)
class Panel:
    """One kept curve; title, published points and line if the kept files do not say them."""

    name: str
    title: str = ""
    published: dict[int, float] = field(default_factory=dict)  # frames -> return
    line: tuple[float, str] | None = None  # published value without a step of ours, and its name


FIGURES: dict[str, list[Panel]] = {
    "delta_iris_boxing": [Panel("delta_iris_boxing")],
    "delta_iris_pendulum_small": [Panel("delta_iris_pendulum_small")],
    "delta_iris_up_n_down": [Panel("delta_iris_up_n_down")],
    "dreamer_atari100k_12m": [
        Panel(f"dreamer_{game}_12m") for game in ("assault", "breakout", "krull", "road_runner")
    ],
    # Published with 200m, mean of five seeds: danijar/dreamerv3 @ e3f0224, scores/atari100k-dreamerv3.json.gz
    "dreamer_learning_h200": [
        Panel("dreamer_boxing_12m", "Dreamer 12m, Boxing", published={360_000: 75.0, 400_000: 79.4}),
        Panel("dreamer_walker_walk_2024", "Dreamer 12m, walker-walk from state (2024 preset)"),
    ],
    "dreamer_pong_crafter": [
        Panel("dreamer_pong_12m", "Dreamer 12m, Pong"),
        Panel("dreamer_crafter_12m", "Dreamer 12m, Crafter"),
    ],
    "dreamer_walker_walk": [
        Panel("dreamer_walker_walk_2023_alone"),
        Panel("dreamer_walker_walk_2023_entropy"),
        Panel("dreamer_walker_walk_2023_wide"),
        Panel("dreamer_walker_walk_2024_tf32"),
    ],
    "dreamer_walker_walk_pixels": [Panel("dreamer_walker_walk_pixels")],
    # Ha and Schmidhuber 2018: the last generation, 64 candidates of 16 rollouts each
    "og_wm_carracing_h200": [
        Panel("og_wm_carracing_h200", line=(906.0, "published, last generation (16 times the rollouts)"))
    ],
    "tdmpc2_dog_run": [Panel("tdmpc2_dog_run")],
    "tdmpc2_learning_h200": [Panel("tdmpc2_walker_walk"), Panel("tdmpc2_cheetah_run")],
}
SAME_AXES = ("dreamer_walker_walk",)  # curves of one task, to be compared


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help="pictures; with --picture: kept curves, the panels of one picture"
    )
    parser.add_argument("--picture", type=Path, help="draw the named curves into this file")
    options = parser.parse_args()
    if options.picture:
        draw(options.picture, [Panel(name) for name in options.names])
        return
    own = {DEMO: draw_demo, SPEEDS: draw_speeds, CURRICULA: draw_curricula}
    for name in options.names or [*FIGURES, *own]:
        if name in own:
            own[name]((IMAGES if name == CURRICULA else RESULTS) / f"{name}.png")
        elif name in FIGURES:
            draw(RESULTS / f"{name}.png", FIGURES[name], same_axes=name in SAME_AXES)
        else:
            parser.error(f"no picture {name}: choose from {', '.join([*FIGURES, *own])}")


def draw(picture: Path, panels: list[Panel], *, same_axes: bool = False) -> None:
    """Write one picture with a panel per curve."""
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    with figure_file(picture, 6.0 if columns == 1 else 9.0, 2.7 * rows + 0.6) as figure:
        grid = np.atleast_1d(
            figure.subplots(rows, columns, squeeze=False, sharex=same_axes, sharey=same_axes)
        ).ravel()
        handles: dict[str, Any] = {}
        for axes, panel in zip(grid, panels):
            handles |= draw_panel(axes, panel)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[::columns]:
            axes.set_ylabel("return")
        legend(figure, list(handles.values()), list(handles), "outside lower left")
    print(f"drawn: {picture}")


def draw_panel(axes: Any, panel: Panel) -> dict[str, Any]:
    """Draw one kept curve; returns the handles of the legend by name."""
    kept = json.loads((RESULTS / f"{panel.name}.json").read_text(encoding="utf-8"))
    with (RESULTS / f"{panel.name}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    handles: dict[str, Any] = {}
    training = column(rows, "train_return")
    if len(training):
        handles |= draw_training(axes, training)
    evaluation = column(rows, "eval_return")
    if len(evaluation):
        handles |= draw_evaluation(axes, evaluation)
    finals = kept.get("final_evaluations", {})
    finals = finals.values() if finals else [kept["evaluation"]] if "evaluation" in kept else []
    for final in finals:
        handles |= draw_new(axes, final, rows)
    published = {int(frames): float(value) for frames, value in kept.get("published_by_frames", {}).items()}
    if points := sorted((published | panel.published).items()):
        handles["published"] = axes.plot(*zip(*points), "D", color=PUBLISHED, markersize=5)[0]
    if panel.line:
        value, name = panel.line
        handles[name] = axes.axhline(value, color=PUBLISHED, linestyle=DASHED, linewidth=1.4)
    axes.set_title(textwrap.fill(panel.title or kept.get("title", panel.name), 54), loc="left")
    axes.set_xlabel("environment frames")
    step_axis(axes, 5)
    return handles


def draw_training(axes: Any, curve: Curve) -> dict[str, Any]:
    axes.plot(curve.x, curve.y, color=TRAINING, alpha=0.3, linewidth=0.8)
    mean = smoothed(curve)
    return {"training episodes": axes.plot(mean.x, mean.y, color=TRAINING, alpha=0.9, linewidth=1.5)[0]}


def draw_evaluation(axes: Any, curve: Curve) -> dict[str, Any]:
    options = {"color": EVALUATION, "linewidth": 1.0, "marker": "o", "markersize": 5}
    return {"evaluation": axes.plot(curve.x, curve.y, **options)[0]}


def draw_new(axes: Any, final: dict[str, Any], rows: list[dict[str, str]]) -> dict[str, Any]:
    """The mean of `rl-lab eval` with its 95 % interval, or its standard error where none was kept."""
    mean = float(final["return_mean"])
    if "return_intervals" in final:
        low, high = final["return_intervals"]["mean"]
    else:
        reach = 1.96 * float(final["return_std"]) / len(final["returns"]) ** 0.5
        low, high = mean - reach, mean + reach
    per_step = float(rows[-1]["frames"]) / float(rows[-1]["step"])
    place = [final["step"] * per_step]
    drawn = axes.errorbar(
        place, [mean], [[mean - low], [high - mean]], fmt="s", color=NEW, markersize=5, capsize=3
    )
    return {"new episodes, mean and 95 %": drawn}


def column(rows: list[dict[str, str]], name: str) -> Curve:
    """A column over frames; values of the same frame, which some phases log, are averaged."""
    points = sorted((float(row["frames"]), float(row[name])) for row in rows if row.get(name))
    merged = [(x, float(np.mean([y for _, y in same]))) for x, same in groupby(points, key=lambda p: p[0])]
    return Curve(np.array([x for x, _ in merged]), np.array([y for _, y in merged]))


def draw_demo(picture: Path) -> None:
    """The run of `make demo` on CartPole, from demo_cartpole.json."""
    kept = json.loads((RESULTS / "demo_cartpole.json").read_text(encoding="utf-8"))
    rows, most = kept["curve"], 500.0  # the longest episode of CartPole-v1

    def curve(key: str) -> Curve:
        found = [(float(row["step"]), float(row[key])) for row in rows if key in row]
        return Curve(*(np.array(values) for values in zip(*found)))

    training, evaluation, spread = (
        curve(key) for key in ("collect/return_mean", "eval/return_mean", "eval/return_std")
    )
    with figure_file(picture, 9.0, 3.8) as figure:
        axes = figure.add_subplot()
        handles = draw_training(axes, training)
        low, high = evaluation.y - spread.y, np.minimum(evaluation.y + spread.y, most)
        band = axes.fill_between(evaluation.x, low, high, color=EVALUATION, alpha=0.15, linewidth=0)
        handles |= draw_evaluation(axes, evaluation)
        handles["± standard deviation over its episodes"] = band
        final = kept["evaluation"]
        name = f"{final['episodes']} new episodes with the {final['checkpoint']} weights"
        handles[name] = axes.plot([final["step"]], [final["return_mean"]], "s", color=NEW, markersize=7)[0]
        handles["the maximum"] = axes.axhline(most, color=COLORS[-1], linestyle=DASHED, linewidth=1.0)
        axes.set_title(f"make demo: Dreamer on CartPole-v1, one seed ({kept['date']})", loc="left")
        axes.set_xlabel("environment steps (agent decisions)")
        axes.set_ylabel("episode return")
        step_axis(axes)
        legend(figure, list(handles.values()), list(handles), "outside lower left")
    print(f"drawn: {picture}")


# Update -> file and row of ours in milliseconds, the authors' code on the same GPU (of the file's `original_ms` or note).
UPDATES: dict[str, tuple[str, str, float]] = {
    "Dreamer 12m, update": ("dreamer_h200", "dreamer/12m/update_ms", 40.0),
    "Dreamer 200m, update": ("dreamer_h200", "dreamer/200m/update_ms", 115.0),
    "TD-MPC2 5m, update": ("tdmpc_h200", "tdmpc2/5m/update_ms", 8.45),
    "TD-MPC2 5m, one plan": ("tdmpc_h200", "tdmpc2/5m/plan_1_ms", 3.61),
    "Δ-IRIS Crafter, tokenizer": ("iris_h200", "iris/delta_crafter/tokenizer_ms", 137.4),
    "Δ-IRIS Crafter, world model": ("iris_h200", "iris/delta_crafter/world_model_ms", 53.8),
    "Δ-IRIS Crafter, actor-critic": ("iris_h200", "iris/delta_crafter/actor_critic_ms", 560.0),
    "IRIS, tokenizer": ("iris_h200", "iris/iris/tokenizer_ms", 130.1),
    "IRIS, world model": ("iris_h200", "iris/iris/world_model_ms", 101.9),
    "IRIS, actor-critic": ("iris_h200", "iris/iris/actor_critic_ms", 2611.7),
}


def draw_speeds(picture: Path) -> None:
    """Time of an update as a share of that of the authors' code."""
    with figure_file(picture, 9.0, 0.36 * len(UPDATES) + 0.9) as figure:
        axes = figure.add_subplot()
        for place, (file, row, original) in enumerate(UPDATES.values()):
            rows = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["rows"]
            ours = next(float(item["value"]) for item in rows if item["name"] == row)
            axes.barh(place, 1.0, color="#e6e8eb", height=0.72)
            axes.barh(place, ours / original, color=TRAINING, height=0.72)
            text = f"{ours:,.3g} of {original:,.4g} ms: {original / ours:.1f} times as fast"
            axes.text(ours / original + 0.01, place, text, va="center", fontsize=8)
        axes.set_yticks(range(len(UPDATES)), list(UPDATES))
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("time, as a share of the authors' code (grey) on the same H200")
        axes.set_title("Updates beside the authors' code", loc="left")
    print(f"drawn: {picture}")


# Experiments whose phases are drawn as a timeline.
TIMELINES = ("dreamer_cartpole", "dreamer_catch_pretrained", "iris_atari100k", "og_wm_carracing")


def draw_curricula(picture: Path) -> None:
    """The phases of some experiments, one bar each; repeated ones are shown once, with their count."""
    from rl_lab.config.compose import compose_config, to_plain

    shades = {"online": TRAINING, "offline": EVALUATION, "eval_only": NEW}
    with figure_file(picture, 9.0, 0.75 * len(TIMELINES) + 0.9) as figure:
        axes = figure.add_subplot()
        for place, name in enumerate(TIMELINES):
            config = compose_config([f"experiment={name}"])
            phases = list(phases_of(to_plain(config.training.phases)))
            width = 1.0 / len(phases)
            for number, phase in enumerate(phases):
                color = shades[phase.type]
                axes.barh(place, width * 0.97, left=number * width, color=color, alpha=0.85, height=0.62)
                text = f"{phase.name}\n{phase.duration}"
                axes.text(
                    (number + 0.48) * width, place, text, ha="center", va="center", fontsize=7, color="white"
                )
        axes.set_yticks(range(len(TIMELINES)), list(TIMELINES))
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xticks([])
        axes.grid(visible=False)
        names = {"online": "online: collects", "offline": "offline: only updates"}
        bars = [axes.barh([0], [0], color=shades[kind]) for kind in names]
        legend(figure, bars, list(names.values()), "outside lower left")
        axes.set_title("Phases in their order (widths are not durations)", loc="left")
    print(f"drawn: {picture}")


if __name__ == "__main__":
    main()
