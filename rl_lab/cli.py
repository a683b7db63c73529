"""The command `rl-lab`. Each verb is imported when it is used, so that help answers at once."""

from __future__ import annotations

import argparse
import faulthandler
import io
import os
import re
import select
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn, TextIO

from rl_lab.errors import LabError, closest, unexpected

# verb -> (module with add_arguments and main, one line of help)
VERBS = {
    "train": ("rl_lab.tools.train", "train an experiment: rl-lab train +experiment=NAME key=value …"),
    "resume": ("rl_lab.tools.resume", "go on with a run: rl-lab resume RUN [key=value …]"),
    "eval": ("rl_lab.tools.evaluate", "play evaluation episodes with a trained agent"),
    "play": ("rl_lab.tools.play", "watch the agent, or play in its dream: rl-lab play RUN [-w] [--web]"),
    "report": (
        "rl_lab.tools.report.command",
        "curves, scores and dreams of runs as one HTML page; --serve keeps it live",
    ),
    "collect": ("rl_lab.tools.collect", "store episodes of a policy as a data set (not in this version yet)"),
    "bench": ("rl_lab.tools.bench", "measure a part of the lab: rl-lab bench loop"),
    "list": ("rl_lab.tools.listing", "experiments, workflows, components, environments, sizes"),
    "doctor": ("rl_lab.tools.doctor", "what this machine has, and the line that installs what is missing"),
}
COMING = ("collect",)


def help_text() -> str:
    lines = ["usage: rl-lab VERB [arguments] [--debug]", "", "RL Lab: one laboratory for world-model RL.", ""]
    lines += [f"  {verb:<8} {text}" for verb, (_, text) in VERBS.items()]
    lines += ["", "rl-lab VERB --help says more; --debug shows the traceback of an error."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status."""
    _write_by_lines()
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    # A crash inside a driver or a simulator would end a run without a word.
    if not faulthandler.is_enabled():
        faulthandler.enable()
    _current_folder_last()
    try:
        return _answer(words)
    except LabError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads(sys.stdout):
            return 0
        if debug:
            raise
        print(f"error: {_out_of_memory(error) or unexpected(error)}", file=sys.stderr)
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            if _nobody_reads(stream):
                # What is still in the buffer would fail once more when the interpreter ends, with a status of its own.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _current_folder_last() -> None:
    """A user's own modules (an environment, a workflow) are found in the current folder, but after all that is installed:
    a file there called torch.py or queue.py must not take the place of the real module. `python -m` puts it first.
    """
    try:
        here = os.getcwd()
    except OSError:  # the folder was deleted
        return
    if sys.path[:1] in ([""], [here]):
        del sys.path[0]
    if here not in sys.path:
        sys.path.append(here)


class Parser(argparse.ArgumentParser):
    """Mistakes in arguments are errors like any other: one message, with the closest right spelling."""

    def error(self, message: str) -> NoReturn:
        options = [option for action in self._actions for option in action.option_strings]
        wrong = re.search(r"unrecognized arguments: (-\S+)", message)
        hint = closest(wrong[1].partition("=")[0], options) if wrong else ""
        raise LabError(f"{message}.{hint} {self.prog} --help says what it takes")


def _answer(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] == "--version":
        from rl_lab import __version__

        print(__version__)
        return 0
    return _run_verb(words[0], words[1:])


def _run_verb(verb: str, words: list[str]) -> int:
    if verb not in VERBS:
        raise LabError(f"no verb '{verb}'.{closest(verb, VERBS)}")
    if verb in COMING:
        raise LabError(f"rl-lab {verb} is not in this version yet")
    module = import_module(VERBS[verb][0])
    parser = Parser(prog=f"rl-lab {verb}", description=VERBS[verb][1], allow_abbrev=False)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    module.add_arguments(parser)
    return int(module.main(parser.parse_args(words)))


def _write_by_lines() -> None:
    """Into a pipe or a file Python writes by blocks: the address of a page, or how far a run is, would wait in one."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _nobody_reads(stream: TextIO) -> bool:
    """Whether the reader of an output has left (`rl-lab list | head -1`), or its terminal is gone."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # it reports errors unasked
    except (AttributeError, OSError, ValueError):  # a system without poll, an output without a file
        return False
    return bool(poll.poll(0))


def _out_of_memory(error: Exception) -> str:
    """For verbs that do not train (training says more); "" for any other error."""
    if not isinstance(error, MemoryError) and "out of memory" not in str(error):
        return ""
    text = str(error).splitlines()[0] if str(error) else "the machine has no memory left"
    return f"out of memory: {text} Choose --device cpu where the verb has it, or free the device"


if __name__ == "__main__":
    sys.exit(main())
