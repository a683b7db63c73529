"""`rl-lab push FOLDER owner/name`: send an exported agent to the Hugging Face Hub."""

from __future__ import annotations

import argparse

from rl_lab.errors import LabError
from rl_lab.tools.resume import add_trust


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("agent", help="folder of rl-lab export; a run is exported first")
    parser.add_argument("repository", help="owner/name; created if it does not exist")
    parser.add_argument(
        "--private", action="store_true", help="only you can read a repository that is created"
    )
    parser.add_argument("--message", default="", help="of the commit")
    add_trust(parser)


def main(args: argparse.Namespace) -> int:
    from rl_lab.hub import HUB, upload
    from rl_lab.run_folder import find_run, output_root
    from rl_lab.tools.export.card import name_address
    from rl_lab.tools.export.command import export

    name = args.repository.removeprefix(HUB)
    folder = find_run(args.agent, output_root(None))
    if folder.borrowed:
        raise LabError(f"{args.agent} is an address: push the folder of an agent that you exported")
    if not folder.exported:
        found = export(args.agent, trust=args.trust)
        for line in found["remarks"]:
            print(line)
        folder = find_run(found["folder"], output_root(None))
    folder.load_config(trust=args.trust, environment=False)
    folder.check_links(trust=args.trust)
    name_address(folder.path, f"{HUB}{name}")
    print(upload(folder.path, name, private=args.private, message=args.message))
    print(f"use it: rl_lab.load_agent('{HUB}{name}') · rl-lab play {HUB}{name} -w --web")
    return 0
