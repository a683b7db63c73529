"""`rl-lab resume RUN`: continue training from the newest intact checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_lab.errors import LabError

if TYPE_CHECKING:
    from rl_lab.run_folder import RunFolder


def add_trust(parser: Any) -> None:
    """Add --trust to the parser, or the group, of a verb that builds what the config of a run names."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="the run was made elsewhere and has classes of its own: import and run them (SECURITY.md)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", help="run folder (default: the newest under ./outputs)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="allowed changes, e.g. training.total_timesteps"
    )
    add_trust(parser)


def main(args: argparse.Namespace) -> int:
    from rl_lab.run_folder import find_run, output_root
    from rl_lab.training import ignore_output_errors, resume

    overrides = list(args.overrides)
    if args.run and "=" in args.run:
        overrides.insert(0, args.run)
        args.run = None
    folder = find_run(args.run, output_root(None))
    check_newest(args.run, folder)
    result = resume(folder.path, overrides, trust=args.trust)
    if not result.interrupted:  # that has been printed
        for line in result.summary():
            ignore_output_errors(print)(line)
    return 0


def check_newest(given: str | None, folder: RunFolder) -> None:
    """Raise LabError if a checkpoint file is given that the run does not continue from."""
    if given is None or not given.endswith(".pt"):
        return
    from rl_lab.utils.checkpoint.loading import manifests

    saved = manifests(folder.checkpoints)
    name = Path(given).name
    if saved and name != "last.pt" and name.partition(".")[0] != saved[0].stem:
        raise LabError(
            f"{given}: a run continues from its newest checkpoint, here {saved[0].stem}.pt. Leave the file out, or "
            f"start a new run from it: rl-lab train training.resume_path={given}"
        )
