"""`rl-lab play RUN`: watch the agent, play in its dream, replay episodes; in a window, a browser or a video."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", help="run folder or checkpoint file (default: the newest run)")
    what = parser.add_argument_group("what to see (default: the agent in the real environment)")
    what.add_argument("-w", "--world-model", action="store_true", help="you play in the world model")
    what.add_argument(
        "-a", "--agent-world-model", action="store_true", help="the agent plays in the world model"
    )
    what.add_argument("-e", "--episodes", action="store_true", help="replay media/episodes")
    what.add_argument("--split", choices=("train", "test", "imagination", "recordings"), help="which of them")
    what.add_argument("--human", action="store_true", help="you play (in the real environment)")
    what.add_argument(
        "--both", action="store_true", help="real and dream side by side, from the same actions"
    )
    look = parser.add_argument_group("how")
    look.add_argument(
        "-r", "--reconstruction", action="store_true", help="panels: original, model input, reconstruction"
    )
    look.add_argument(
        "--header", action="store_true", help="step, action, reward, return, value, … (-h in play.sh)"
    )
    look.add_argument(
        "-s", "--save-mode", action="store_true", help="ask at each episode's end whether to keep it"
    )
    look.add_argument("-f", "--fps", type=float, default=15.0, help="steps a second (default: 15)")
    look.add_argument("--horizon", type=int, default=200, help="steps of a dream (default: 200)")
    look.add_argument("--flush", type=int, help="begin the model's memory anew after so many dreamt frames")
    look.add_argument(
        "--ends", default="sample", help="a dream ends: sample (default), never, or from a probability on"
    )
    look.add_argument("--context", type=int, default=8, help="real frames before a dream (default: 8)")
    look.add_argument(
        "--start", choices=("real", "replay", "episodes"), help="where dreams start (default: real)"
    )
    look.add_argument(
        "--wait", action="store_true", default=None, help="a step for each key, not by the clock"
    )
    agent = parser.add_argument_group("which agent")
    agent.add_argument("--checkpoint", default="last", help="last, best, or a file name under checkpoints/")
    agent.add_argument("--device", default="auto")
    agent.add_argument("--seed", type=int, help="of the episodes (default: new ones every time)")
    choice = agent.add_mutually_exclusive_group()
    choice.add_argument("--sample", dest="sample", action="store_true", default=None, help="sample actions")
    choice.add_argument(
        "--best-action", dest="sample", action="store_false", help="take the likeliest action"
    )
    where = parser.add_argument_group("where (default: a window; without a display, a video)")
    where.add_argument("--web", action="store_true", help="serve a page to play in a browser")
    where.add_argument(
        "--host", default="127.0.0.1", help="address to serve on; any but loopback needs a token"
    )
    where.add_argument("--port", type=int, default=8765, help="0 takes a free one (default: 8765)")
    where.add_argument("--token", help="the page's secret; made and printed where one is needed")
    where.add_argument("--video", action="store_true", help="write a video even though there is a display")
    where.add_argument("--steps", type=int, default=1000, help="longest video, in steps (default: 1000)")


def main(args: argparse.Namespace) -> int:
    from rl_lab.tools.play.launch import launch

    return launch(args)
