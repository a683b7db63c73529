"""`rl-lab data info|convert|check PATH`: describe stored episodes, change their format, find faults."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_lab.errors import ConfigError, LabError, closest
from rl_lab.records import Spec

if TYPE_CHECKING:
    from rl_lab.buffers.formats.dataset import Dataset
    from rl_lab.buffers.formats.episode import PlainEpisode

EPILOG = """examples:
  rl-lab data formats                                         what can be read and written
  rl-lab data info datasets/walker                            columns, lengths, returns
  rl-lab data info runs/pong --sheet frames.png               and a contact sheet of its images
  rl-lab data check demos.hdf5 --env robot/lift               every value, and whether it fits an environment
  rl-lab data convert datasets/walker walker.hdf5 --to robomimic
  rl-lab data convert theirs datasets/ours --min-return 300 --rename observation_state=vector"""

FRAMES, SIDE = 8, 96  # of a contact sheet: frames of each episode, pixels of a frame


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("action", nargs="?", choices=("info", "convert", "check", "formats"))
    parser.add_argument("path", nargs="?", help="a data set, a run, or a checkpoint")
    parser.add_argument("target", nargs="?", help="of convert: a new folder or file")
    parser.add_argument(
        "--from", dest="source_format", metavar="FORMAT", help="default: recognized by its files"
    )
    parser.add_argument(
        "--to", dest="target_format", metavar="FORMAT", default="lab", help="of convert (default: lab)"
    )
    parser.add_argument("--env", metavar="TASK", help="suite/task or Gymnasium id that the data must fit")
    parser.add_argument("--episodes", type=int, metavar="N", help="use the first N episodes")
    parser.add_argument(
        "--min-return", type=float, metavar="R", help="of convert: only episodes with at least R"
    )
    parser.add_argument("--keep", metavar="A,B", help="of convert: only these observations")
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="of convert: an observation; may be repeated",
    )
    parser.add_argument(
        "--units", choices=("lab", "environment"), help="of actions that convert writes (minari)"
    )
    parser.add_argument("--images", choices=("video", "png"), help="how convert stores images (lerobot)")
    parser.add_argument("--sheet", metavar="FILE", help="of info: write a contact sheet of the images (.png)")


def main(args: argparse.Namespace) -> int:
    if args.action is None:
        raise ConfigError("an action is missing: info, convert, check or formats (rl-lab data --help)")
    if args.action == "formats":
        return formats()
    if not args.path:
        raise ConfigError(f"PATH is missing: rl-lab data {args.action} PATH")
    if args.target and args.action != "convert":
        raise ConfigError(f"{args.target}: rl-lab data {args.action} takes one path")
    if args.episodes is not None and args.episodes < 1:
        raise ConfigError(f"--episodes must be at least 1, not {args.episodes}")
    return {"info": info, "check": check, "convert": convert}[args.action](args)


def formats() -> int:
    from rl_lab.buffers.formats.dataset import FORMATS

    for each in FORMATS.values():
        needs = f"; needs {each.package} (extra {each.extra})" if each.package else ""
        print(f"{each.name:<10} {'reads, writes' if each.writable else 'reads':<14} {each.text}{needs}")
    return 0


def read(args: argparse.Namespace) -> Dataset:
    from rl_lab.buffers.formats.dataset import open_dataset

    return open_dataset(args.path, args.source_format)


def count_of(args: argparse.Namespace, dataset: Dataset) -> int:
    return len(dataset) if args.episodes is None else min(args.episodes, len(dataset))


# --- info -------------------------------------------------------------------------------------------


def info(args: argparse.Namespace) -> int:
    from rl_lab.tools.terminal import WorkProgress, number, print_table
    from rl_lab.utils.media import save_image

    with read(args) as dataset:
        spec, count = dataset.spec, count_of(args, dataset)
        returns = getattr(dataset, "returns", None)
        if returns is not None and args.episodes is None:
            totals = np.asarray(returns())
        else:
            with WorkProgress("reading", count) as progress:
                totals = np.array([_total(dataset, index, progress) for index in range(count)])
        lengths = dataset.lengths[:count]
        print(f"{dataset.path}: format {dataset.format}, {count:,} episodes, {int(lengths.sum()):,} steps")
        rows = [[name, f"{s.dtype} {s.shape}"] for name, s in spec.observations.items()]
        action = spec.action
        bounds = f", {list(action.low)} to {list(action.high)} in the environment" if action.low else ""
        what = (
            f"{action.kind}, {'×'.join(map(str, action.choices))} choices" if action.choices else action.kind
        )
        rows.append(["action", f"{action.dtype} {action.shape}: {what}{bounds}"])
        print_table(rows, header=("column", "type and shape"))
        print_table(
            [
                [name, *(number(float(f(values))) for f in (np.mean, np.std, np.median, np.min, np.max))]
                for name, values in (("return", totals), ("length", lengths))
            ],
            header=("", "mean", "std", "median", "min", "max"),
            right=range(1, 6),
        )
        for line in (*_described(dataset.metadata), *dataset.notes()):
            print(line)
        if args.sheet:
            print(save_image(Path(args.sheet).with_suffix(""), contact_sheet(dataset, count)))
    return 0


def _total(dataset: Dataset, index: int, progress: Any) -> float:
    progress.step()
    return dataset.episode(index).total_reward


def _described(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about where the data comes from."""
    collected = metadata.get("collect")
    if collected:
        settings = ", ".join(f"{k} {v}" for k, v in collected.items() if v not in (None, {}, False, 0.0))
        yield f"collected: {settings}"
    summary = metadata.get("summary") or {}
    if summary.get("complete") is False:
        yield "not complete: the collection was stopped, and the same rl-lab collect command continues it"
    if summary.get("rejected"):
        yield f"{summary['rejected']:,} of {summary['attempts']:,} episodes were rejected by the filter"
    if "source" in metadata and isinstance(metadata["source"], str):
        yield f"from {metadata['source']}"


def contact_sheet(dataset: Dataset, count: int, *, episodes: int = 8) -> np.ndarray:
    """Return a picture with a row of frames, from first to last, of each of a few episodes, (H, W, 3) uint8."""
    from PIL import Image

    from rl_lab.buffers.formats.episode import is_image
    from rl_lab.utils.media import to_frames

    names = [name for name, spec in dataset.spec.observations.items() if is_image(spec)]
    if not names:
        raise LabError(f"--sheet: {dataset.path} has no images, only {', '.join(dataset.spec.observations)}")
    shown = np.unique(np.linspace(0, count - 1, min(episodes, count)).astype(int))
    lines = []
    for index in shown.tolist():
        frames = dataset.episode(index).observations[names[0]]
        times = np.linspace(0, len(frames) - 1, FRAMES).astype(int)
        pictures = to_frames(frames[times], names[0])
        line = [
            np.asarray(Image.fromarray(p).resize((SIDE, SIDE), Image.Resampling.NEAREST)) for p in pictures
        ]
        lines.append(np.concatenate([np.pad(p, ((1, 1), (1, 1), (0, 0))) for p in line], axis=1))
    return np.concatenate(lines, axis=0)


# --- check ------------------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> int:
    """Read every value; print a line for each faulty episode; the status is 1 if there is one."""
    from rl_lab.buffers.formats.dataset import stored_rows
    from rl_lab.tools.terminal import WorkProgress

    with read(args) as dataset:
        spec = environment_spec(args.env) if args.env else dataset.spec
        count, faults = count_of(args, dataset), 0
        with WorkProgress("checking", count) as progress:
            for index in range(count):
                try:
                    stored_rows(dataset, index, spec)
                except LabError as error:
                    print(error)
                    faults += 1
                progress.step(f"{faults} faults" if faults else "")
        notes = dataset.notes()
        for note in notes:
            print(note)
        lost = sum("lost" in note for note in notes)
        if faults or lost:
            print(f"{dataset.path}: {faults + lost:,} faults in {count:,} episodes")
            return 1
        fits = f", and they fit {spec.name}" if args.env else ""
        print(
            f"{dataset.path}: {count:,} episodes, {int(dataset.lengths[:count].sum()):,} steps are intact{fits}"
        )
        return 0


def environment_spec(task: str) -> Spec:
    from rl_lab.environments.make import probe_spec

    return probe_spec(task)


# --- convert ----------------------------------------------------------------------------------------


def convert(args: argparse.Namespace) -> int:
    """Write the episodes in another format. The target appears when it is complete."""
    from time import perf_counter

    from rl_lab.buffers.formats.dataset import create_dataset
    from rl_lab.tools.terminal import WorkProgress

    if not args.target:
        raise ConfigError("TARGET is missing: rl-lab data convert PATH TARGET")
    names = parse_renames(args.rename)
    keep = args.keep.split(",") if args.keep else None
    options = {key: value for key in ("units", "images") if (value := getattr(args, key)) is not None}
    with read(args) as dataset:
        spec = environment_spec(args.env) if args.env else changed_spec(dataset.spec, names, keep)
        count = count_of(args, dataset)
        description = {
            "source": str(dataset.path),
            "source_format": dataset.format,
            **_carried(dataset.metadata),
        }
        started = perf_counter()
        try:
            writer = create_dataset(Path(args.target), spec, args.target_format, description, **options)
        except TypeError:
            raise ConfigError(
                f"--{next(iter(options))} does not apply to the format {args.target_format}"
            ) from None
        with writer, WorkProgress("converting", count) as progress:
            for index in range(count):
                episode = changed(dataset.episode(index), names, keep)
                if args.min_return is None or episode.total_reward >= args.min_return:
                    try:
                        writer.add(episode)
                    except ConfigError as error:
                        raise dataset.fault(index, error) from None
                progress.step()
            target = writer.finish()
        seconds = perf_counter() - started
        notes = dataset.notes()
    for note in notes:
        print(note)
    print(
        f"{target}: format {args.target_format}, {writer.episodes:,} episodes, {writer.steps:,} steps, "
        f"{writer.steps / max(seconds, 1e-9):,.0f} steps/s"
    )
    return 0


def _carried(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stays true of converted data."""
    return {key: metadata[key] for key in ("collect", "summary") if key in metadata}


def parse_renames(words: list[str]) -> dict[str, str]:
    names = {}
    for word in words:
        old, equals, new = word.partition("=")
        if not (old and equals and new):
            raise ConfigError(f"--rename {word}: write OLD=NEW")
        names[old] = new
    return names


def changed_spec(spec: Spec, names: Mapping[str, str], keep: list[str] | None) -> Spec:
    for name in (*names, *(keep or ())):
        if name not in spec.observations and name not in names.values():
            raise ConfigError(f"no observation is called '{name}'.{closest(name, spec.observations)}")
    observations = {names.get(name, name): each for name, each in spec.observations.items()}
    if len(observations) < len(spec.observations):
        raise ConfigError("--rename gives two observations the same name")
    if keep:
        observations = {name: observations[names.get(name, name)] for name in keep}
        observations = {names.get(name, name): each for name, each in observations.items()}
    return replace(spec, observations=observations)


def changed(episode: PlainEpisode, names: Mapping[str, str], keep: list[str] | None) -> PlainEpisode:
    if not names and not keep:
        return episode
    wanted = {names.get(name, name) for name in keep} if keep else None
    observations = {names.get(name, name): value for name, value in episode.observations.items()}
    if wanted is not None:
        observations = {name: value for name, value in observations.items() if name in wanted}
    return replace(episode, observations=observations)
