"""`rl-lab envs create|list|remove`: interpreters for simulators whose packages do not fit into one installation."""

from __future__ import annotations

import argparse

from rl_lab.environments.interpreters import places
from rl_lab.errors import LabError
from rl_lab.tools.terminal import print_table

EPILOG = """examples:
  rl-lab envs list                                      what there is, and what it takes on the disk
  rl-lab envs create metaworld                          then: environment.python=metaworld
  rl-lab envs create old_gym --python /usr/bin/python3.8
  rl-lab envs remove metaworld"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("action", nargs="?", choices=("create", "list", "remove"), default="list")
    parser.add_argument("names", nargs="*", metavar="NAME", help="interpreters, as in rl-lab envs list")
    parser.add_argument(
        "--python", metavar="PATH", help="of create: make it with this Python (default: the one of rl-lab)"
    )


def main(args: argparse.Namespace) -> int:
    if args.action == "list":
        print_table(rows(), header=("name", "state", "MB", "contents"), right=(2,))
        print(f"in {places.cache_folder()}; rl-lab envs create NAME, then environment.python=NAME")
        return 0
    if not args.names:
        raise LabError(f"rl-lab envs {args.action}: name one of {', '.join(places.known_names())}")
    for name in args.names:
        if args.action == "create":
            places.create(name, python=args.python)
        else:
            print(f"{name} removed, {places.remove(name) / 1e6:,.0f} MB freed")
    return 0


def rows() -> list[tuple[str, str, str, str]]:
    """Return name, state, size and contents of each interpreter that is known or on this machine."""
    here = dict(places.created())
    result = []
    for name in sorted({*places.known_names(), *here}):
        known = name in places.known_names()
        size = f"{places.disk_bytes(here[name]) / 1e6:,.0f}" if name in here else ""
        state = places.state(name) if known else "unknown"
        result.append(
            (name, state, size, places.describe(name) if known else "no list of this RL Lab has it")
        )
    return result
