"""The command `rl-lab`. The module of a verb is imported when it is used, so that `--help` is fast."""

from __future__ import annotations

import argparse
import contextlib
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
from rl_lab.utils.untrusted import in_run_folder, printable

# verb -> (module with add_arguments and main, one line of help)
VERBS = {
    "train": ("rl_lab.tools.train", "train an experiment: rl-lab train +experiment=NAME key=value …"),
    "check": ("rl_lab.tools.check_env", "try your own environment: rl-lab check my_env:MyEnv"),
    "resume": ("rl_lab.tools.resume", "continue a run: rl-lab resume RUN [key=value …]"),
    "eval": ("rl_lab.tools.evaluate", "evaluate a trained agent"),
    "play": ("rl_lab.tools.play", "watch an agent, or play in its world model: rl-lab play RUN [-w] [--web]"),
    "report": (
        "rl_lab.tools.report.command",
        "curves, scores and imagined rollouts of runs as one HTML page; --serve keeps it up to date",
    ),
    "suite": ("rl_lab.tools.suite.command", "run a benchmark of several tasks and seeds: rl-lab suite NAME"),
    "sweep": ("rl_lab.tools.sweep.command", "search hyperparameters: rl-lab sweep key=1,2 … --trials 30"),
    "collect": (
        "rl_lab.tools.collect.command",
        "store episodes of an agent, an expert, the random policy or a person as a data set",
    ),
    "data": ("rl_lab.tools.data", "describe, convert or check a data set: rl-lab data info PATH"),
    "export": (
        "rl_lab.tools.export.command",
        "write an agent as a folder to take away: weights, config, card; --onnx: as an ONNX model",
    ),
    "push": (
        "rl_lab.tools.export.push",
        "send an exported agent to the Hugging Face Hub: rl-lab push DIR owner/name",
    ),
    "bench": ("rl_lab.tools.bench", "run a benchmark: rl-lab bench loop"),
    "list": ("rl_lab.tools.listing", "list experiments, workflows, components, environments and sizes"),
    "envs": (
        "rl_lab.tools.envs",
        "make, list and remove interpreters for simulators: rl-lab envs create metaworld",
    ),
    "doctor": (
        "rl_lab.tools.doctor",
        "check this machine, and print the commands that install missing packages",
    ),
}


def help_text() -> str:
    lines = [
        "usage: rl-lab VERB [arguments] [--debug]",
        "",
        "RL Lab: world-model reinforcement learning.",
        "",
    ]
    lines += [f"  {verb:<8} {text}" for verb, (_, text) in VERBS.items()]
    lines += ["", "Run rl-lab VERB --help for its arguments; --debug shows the traceback of an error."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status."""
    _prepare_output()
    args = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    if debug:
        os.environ["RL_LAB_DEBUG"] = "1"  # functions for notebooks keep the errors that caused an error, too
    # Without it a crash inside a driver or a simulator would end a run without any message.
    if not faulthandler.is_enabled():
        with contextlib.suppress(
            AttributeError, OSError, RuntimeError, ValueError
        ):  # stderr is closed, or no file
            faulthandler.enable()
    _move_current_folder_last()
    try:
        return _dispatch(args)
    except LabError as error:
        if debug:
            raise
        print(printable(f"error: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_closed(sys.stdout):
            return 0
        if debug:
            raise
        print(
            printable(f"error: {_out_of_memory(error) or _file_error(error) or unexpected(error)}"),
            file=sys.stderr,
        )
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            if not _can_flush(stream):
                # Flushing the buffer at interpreter exit would fail again and change the exit status.
                with contextlib.suppress(AttributeError, OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _move_current_folder_last() -> None:
    """Put the current folder, which may have modules of the user, last on the import path.

    `python -m` puts it first: a file called torch.py or queue.py there would replace the real module. Inside a run
    folder, which may be a stranger's, it is removed, and worker processes do not search it either.
    """
    try:
        here = os.getcwd()
    except OSError:  # the folder was deleted
        return
    if sys.path[:1] in ([""], [here]):
        del sys.path[0]
    if in_run_folder(here):
        sys.path[:] = [path for path in sys.path if path not in ("", here)]
        os.environ["PYTHONSAFEPATH"] = (
            "1"  # else `python -c`, as multiprocessing starts it, searches here first
        )
    elif here not in sys.path:
        sys.path.append(here)


def _require_current_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise LabError(
            f"the current folder does not exist any more ({error.strerror}): change to one that does, with cd"
        ) from error


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments as a LabError: one message, with the closest known option."""

    words: Sequence[str] = ()  # of the command line

    def error(self, message: str) -> NoReturn:
        options = [option for action in self._actions for option in action.option_strings]
        wrong = re.search(r"unrecognized arguments: (.*)", message, re.DOTALL)
        flags = [word for word in wrong[1].split() if word.startswith("-")] if wrong else []
        hint = ""
        if flags:
            from rl_lab.config.compose import known_choices
            from rl_lab.config.short_names import wrong_flags

            verb = self.prog.rpartition(" ")[2]
            hint = wrong_flags(verb, flags, self.words, options, known_choices("environment"))
            hint = hint or f" Known: {', '.join(sorted(options))}"
        end = "" if not hint or hint.endswith("?") else "."
        raise LabError(f"{message}.{hint}{end} Run {self.prog} --help for its arguments")


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if args[0] == "--version":
        from rl_lab import __version__

        print(__version__)
        return 0
    return _run_verb(args[0], args[1:])


def _run_verb(verb: str, args: list[str]) -> int:
    if verb not in VERBS:
        raise LabError(f"rl-lab has no verb '{verb}'.{closest(verb, VERBS)}")
    _require_current_folder()
    module = import_module(VERBS[verb][0])
    parser = Parser(prog=f"rl-lab {verb}", description=VERBS[verb][1], allow_abbrev=False)
    parser.words = args
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    module.add_arguments(parser)
    # `rl-lab train seed=1 --config-dir mine debug=tiny`: words before and after an option. bench hands on what follows.
    parse = parser.parse_args if verb == "bench" else parser.parse_intermixed_args
    return int(module.main(parse(args)))


def _prepare_output() -> None:
    """Flush stdout after every line, and replace characters that the terminal's encoding lacks.

    In a pipe or a file Python would delay output until a block is full. With LC_ALL=C it is ASCII.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")


def _can_flush(stream: TextIO | None) -> bool:
    """Return whether the output can still be written: the disk may be full, or the reader gone."""
    if stream is None:
        return True
    try:
        stream.flush()
    except (OSError, ValueError):
        return False
    return not _is_closed(stream)


def _is_closed(stream: TextIO | None) -> bool:
    """Return whether the reader has exited (`rl-lab list | head -1`) or the terminal is closed."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # type: ignore[union-attr]  # errors are always reported
    except (AttributeError, OSError, ValueError):  # no poll on this system, or no file descriptor
        return False
    return bool(poll.poll(0))


def _file_error(error: Exception) -> str:
    """Return a message for an error of the file system about a file, or "" for any other error."""
    if not isinstance(error, OSError) or error.filename is None:
        return ""
    return f"{error.filename} cannot be used: {error.strerror or type(error).__name__}"


def _out_of_memory(error: Exception) -> str:
    """Return a message for out of memory (training has a longer one), or "" for any other error."""
    if not isinstance(error, MemoryError) and "out of memory" not in str(error):
        return ""
    text = str(error).splitlines()[0] if str(error) else "the machine has no memory left"
    return f"out of memory: {text} Use --device cpu if the verb has it, or free memory of the device"


if __name__ == "__main__":
    sys.exit(main())
