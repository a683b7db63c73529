"""`rl-lab play RUN`: watch the agent, play in its world model or replay episodes (window, browser, video)."""

from __future__ import annotations

import argparse

from rl_lab.tools.resume import add_trust


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        help="run folder, checkpoint file, hf://owner/name or example://name (default: the newest run)",
    )
    what = parser.add_argument_group("mode (default: the agent in the real environment)")
    what.add_argument("-w", "--world-model", action="store_true", help="you play in the world model")
    what.add_argument(
        "-a", "--agent-world-model", action="store_true", help="the agent plays in the world model"
    )
    what.add_argument("-e", "--episodes", action="store_true", help="replay the recorded episodes of the run")
    what.add_argument(
        "--split", choices=("train", "test", "imagination", "recordings"), help="episodes to replay"
    )
    what.add_argument("--human", action="store_true", help="you play in the real environment")
    what.add_argument(
        "--both",
        action="store_true",
        help="real environment and world model side by side, with the same actions",
    )
    display = parser.add_argument_group("display")
    display.add_argument(
        "-r", "--reconstruction", action="store_true", help="panels: original, model input, reconstruction"
    )
    display.add_argument(
        "--header", action="store_true", help="step, action, reward, return, value, … (-h in play.sh)"
    )
    display.add_argument(
        "-s", "--save-mode", action="store_true", help="ask at the end of each episode whether to keep it"
    )
    display.add_argument("-f", "--fps", type=float, default=15.0, help="steps per second (default: 15)")
    display.add_argument("--horizon", type=int, default=200, help="maximum steps of a dream (default: 200)")
    display.add_argument("--flush", type=int, help="reset the model's state after this many imagined frames")
    display.add_argument(
        "--ends", default="sample", help="end of a dream: sample (default), never, or a probability threshold"
    )
    display.add_argument(
        "--context", type=int, help="real frames before a dream (default: 8; fewer if episodes are short)"
    )
    display.add_argument(
        "--start",
        choices=("real", "replay", "episodes"),
        help="source of start frames of dreams (default: real)",
    )
    display.add_argument(
        "--wait", action="store_true", default=None, help="one step per key press instead of timed steps"
    )
    agent = parser.add_argument_group("agent")
    agent.add_argument("--checkpoint", default="last", help="last, best, or a file name under checkpoints/")
    agent.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    agent.add_argument("--seed", type=int, help="seed of the episodes (default: random)")
    add_trust(agent)
    choice = agent.add_mutually_exclusive_group()
    choice.add_argument("--sample", dest="sample", action="store_true", default=None, help="sample actions")
    choice.add_argument(
        "--best-action", dest="sample", action="store_false", help="take the most likely action"
    )
    choice.add_argument(
        "--temperature", type=float, help="sample actions at this temperature; 0 takes the most likely action"
    )
    where = parser.add_argument_group("output (default: a window; without a display, a video)")
    where.add_argument("--web", action="store_true", help="serve a page to play in a browser")
    where.add_argument(
        "--open", action="store_true", help="with --web: also open the page in this machine's browser"
    )
    where.add_argument(
        "--host", default="127.0.0.1", help="address to serve on; any but loopback needs a token"
    )
    where.add_argument("--port", type=int, default=8765, help="0 takes a free port (default: 8765)")
    where.add_argument("--token", help="token of the page (default: generated and printed if one is needed)")
    where.add_argument("--video", action="store_true", help="write a video even if there is a display")
    where.add_argument(
        "--steps",
        type=int,
        help="steps of a video, over several episodes (default: one episode, at least 100 steps)",
    )


def main(args: argparse.Namespace) -> int:
    from rl_lab.tools.play.launch import launch

    return launch(args)
