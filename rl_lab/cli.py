"""The command `rl-lab`. Each verb is imported when it is used, so that help answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from rl_lab.errors import LabError, closest

# verb -> (module with add_arguments and main, one line of help)
VERBS = {
    "train": ("rl_lab.tools.train", "train an experiment: rl-lab train +experiment=NAME key=value …"),
    "resume": ("rl_lab.tools.resume", "go on with a run: rl-lab resume RUN [key=value …]"),
    "eval": ("rl_lab.tools.evaluate", "play evaluation episodes with a trained agent"),
    "play": ("rl_lab.tools.play", "watch the agent, or play in its dream (not in this version yet)"),
    "report": ("rl_lab.tools.report", "curves and one HTML page from runs"),
    "collect": ("rl_lab.tools.collect", "store episodes of a policy as a data set (not in this version yet)"),
    "bench": ("rl_lab.tools.bench", "measure a part of the lab: rl-lab bench loop"),
    "list": ("rl_lab.tools.listing", "experiments, workflows, components, environments, sizes"),
    "doctor": ("rl_lab.tools.doctor", "what this machine has, and the line that installs what is missing"),
}
COMING = ("play", "collect")


def help_text() -> str:
    lines = ["usage: rl-lab VERB [arguments] [--debug]", "", "RL Lab: one laboratory for world-model RL.", ""]
    lines += [f"  {verb:<8} {text}" for verb, (_, text) in VERBS.items()]
    lines += ["", "rl-lab VERB --help says more; --debug shows the traceback of an error."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] == "--version":
        from rl_lab import __version__

        print(__version__)
        return 0
    # A user's own modules (an environment, a workflow) lie where they stand.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return _run_verb(words[0], words[1:])
    except LabError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except RuntimeError as error:
        if debug or "out of memory" not in str(error):
            raise
        print(f"error: {_out_of_memory(error)}", file=sys.stderr)
        return 1


def _run_verb(verb: str, words: list[str]) -> int:
    if verb not in VERBS:
        raise LabError(f"no verb '{verb}'.{closest(verb, VERBS)}")
    if verb in COMING:
        raise LabError(f"rl-lab {verb} is not in this version yet")
    module = import_module(VERBS[verb][0])
    parser = argparse.ArgumentParser(prog=f"rl-lab {verb}", description=VERBS[verb][1])
    module.add_arguments(parser)
    return int(module.main(parser.parse_args(words)))


def _out_of_memory(error: RuntimeError) -> str:
    import torch

    peak = ""
    if torch.cuda.is_available():
        peak = f" Peak so far: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB."
    first = str(error).splitlines()[0]
    return (
        f"out of memory: {first}{peak} Turn down algorithm.batch_size or batch_length, choose a smaller size=, "
        "keep replay in host memory (buffers.replay.storage=host), or set training.precision=bfloat16"
    )


if __name__ == "__main__":
    sys.exit(main())
