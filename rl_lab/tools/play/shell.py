"""Entry point of play.sh with the short flags of IRIS' script: `-h` is the header, `--help` is help.

python -m rl_lab.tools.play.shell [RUN] [-w|-a|-e] [-r] [-h] [-s] [-f FPS] [options of rl-lab play]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

SHORT = "waerhs"


def long_flags(words: Sequence[str]) -> list[str]:
    """Expand `-h` and bundles such as `-wh` for `rl-lab play`."""
    result: list[str] = []
    for word in words:
        if len(word) > 1 and word[0] == "-" and word[1] != "-" and set(word[1:]) <= set(SHORT):
            result += ["--header" if letter == "h" else f"-{letter}" for letter in word[1:]]
        else:
            result.append(word)
    return result


def main(words: Sequence[str] | None = None) -> int:
    from rl_lab.cli import main as command

    return command(["play", *long_flags(sys.argv[1:] if words is None else words)])


if __name__ == "__main__":
    sys.exit(main())
