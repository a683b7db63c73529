"""Variants of IRIS' tokenizer on the same stored and held-out episodes, at equal numbers of updates.

    rl-lab bench tokenizers --set catch                    # small images, on a CPU
    rl-lab bench tokenizers --set boxing --updates 250     # 64×64, on a GPU

Random play is stored; each variant trains its tokenizer on it and then a transformer on its tokens, with the same
numbers of updates, frames and random numbers. Everything is measured on episodes that were not trained on:

    pixel_error      mean squared error of reconstructed frames
    codes_used       share of all codes that occur; code_bits: entropy of their frequencies
    token_ce         cross-entropy of a token in nats, given all before it; frame_ce: of all tokens of a frame
    reward_ce        cross-entropy of the reward's sign in nats
    open_1, 5, 15    squared error of a frame imagined with the real actions, 1, 5, 15 steps after the last real one
    ms               one update of the tokenizer, median; memory_mb: largest memory of an update (on a CPU: what autograd
                     saves, weights, gradients and optimizer)

`pretrained_*` first trains on another game. `--table` and `--figure` write what docs/experiments/iris_variants.md shows.
All files are written after every variant; a variant that FILE of `--json FILE` has from a call of the same commit, machine
and options (but --only) is not measured again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.batches import BatchStream
from rl_lab.build import assemble_workflow, build_buffers
from rl_lab.components.nn.quantizers import code_shares, entropy_bits
from rl_lab.components.representation_learners.tokenizer import to_frames
from rl_lab.config.compose import compose_config, resolve_config, to_plain
from rl_lab.environments.make import make_configured_env
from rl_lab.errors import LabError, one_line, require_choice
from rl_lab.orchestration.collector import Collector
from rl_lab.orchestration.updates import HookRunner
from rl_lab.records import ActMode, Batch
from rl_lab.run_environments import environment_spec
from rl_lab.tools.bench import ResultFile
from rl_lab.utils.device import asks_for_tensor_float, resolve_device
from rl_lab.utils.files import make_folder

STEPS = (1, 5, 15)  # of open-loop prediction
HELD_OUT_SEED, OTHER_SEED = 1000, 2000  # added to the seed of the episodes
QUANTIZER = "components/quantizer@components.tokenizer.quantizer"
LOSS = "+components/reconstruction_loss@components.tokenizer.losses.more"
CRITIC = (
    "{_target_: rl_lab.components.nn.return_critic.ReturnCritic, _partial_: true, weight: 0.1, horizon: 4}"
)


@dataclass
class Set:
    """Where episodes come from, and the sizes of networks and batches."""

    words: list[str]
    other: list[str]  # the other game of `pretrained_*`
    codes: dict[str, list[str]]  # words of quantizers with as many codes
    rows: int = 4000
    held_out: int = 1500
    updates: int = 400


SETS = {
    "catch": Set(
        [
            *("experiment=iris_catch", "environment.length=10", "environment.workers=0"),
            *("algorithm.size.levels=3", "algorithm.size.tokens=4", "algorithm.size.codes=64"),
            *(
                "algorithm.blocks=16",
                "algorithm.world_model.batch_length=16",
                "algorithm.world_model.batch_size=8",
            ),
            *("algorithm.tokenizer.batch_length=8", "algorithm.tokenizer.batch_size=8"),
        ],
        ["environment.cells=8"],
        {"fsq": ["levels=[8,8]"], "lfq": ["dim=6"], "residual": ["codes=8", "stages=2"]},
    ),
    "boxing": Set(
        [
            *("experiment=iris_atari100k", "environment.task=boxing", "environment.num_envs=16"),
            *("algorithm.tokenizer.batch_length=8", "algorithm.tokenizer.batch_size=32"),
            "algorithm.world_model.batch_size=32",
        ],
        ["environment.task=pong"],
        {"fsq": ["levels=[8,8,8]"], "lfq": ["dim=9"], "residual": ["codes=8", "stages=3"]},
        rows=10000,
        held_out=4000,
        updates=250,
    ),
}


@dataclass
class Variant:
    """words: of the config. pretrain: first on the other game. trained: on this game, too."""

    words: list[str] = field(default_factory=list)
    pretrain: bool = False
    trained: bool = True
    note: str = ""


def tokenizer_variants(kind: str, diffusers: str | None) -> dict[str, Variant]:
    def quantizer(name: str) -> Variant:
        sizes = SETS[kind].codes.get(name, [])
        return Variant([f"{QUANTIZER}={name}", *(f"components.tokenizer.quantizer.{size}" for size in sizes)])

    def loss(name: str, *more: str) -> Variant:
        return Variant([f"{LOSS}={name}", *(f"components.tokenizer.losses.more.{word}" for word in more)])

    variants = {
        "vq": Variant(note="IRIS"),
        "ema": quantizer("ema"),
        "fsq": quantizer("fsq"),
        "lfq": quantizer("lfq"),
        "residual": quantizer("residual"),
        "continuous": Variant(
            [
                *(f"{QUANTIZER}=none", "algorithm.size.codes=0"),
                "+components.world_model.code=${algorithm.size.code}",
            ],
            note="no codes: token_ce is a squared error",
        ),
        "l2": loss("l2", "weight=10.0"),
        "worst_pixel": loss("worst_pixel", "weight=0.1"),
        "ssim": loss("ssim"),
        "change": loss("change"),
        "hinge_gan": loss("hinge_gan", "weight=0.05"),
        "value_aware": Variant([f"+components.tokenizer.critic={CRITIC}"]),
        "pretrained_frozen": Variant(pretrain=True, trained=False, note="trained on another game only"),
        "pretrained_tuned": Variant(pretrain=True, note="first trained on another game"),
    }
    if kind != "catch":  # VGG16 halves images four times
        variants["perceptual"] = loss("perceptual", "width=16")
        variants["perceptual"].note = "random weights: architecture only"
    if diffusers:
        words = ["components/tokenizer=diffusers", f"components.tokenizer.path={diffusers}"]
        variants["diffusers"] = Variant(
            [*words, "components.tokenizer.trained=true"], note="VQModel of a folder"
        )
    return variants


def run(argv: list[str], file: ResultFile | None = None) -> list[dict[str, Any]]:
    parser = make_parser("tokenizers")
    parser.add_argument("--diffusers", help="folder of diffusers' VQModel, for one more row")
    options = filled(parser.parse_args(argv))
    variants = tokenizer_variants(options.set, options.diffusers)
    results = Results("tokenizers", parser, options, variants, file)
    with tempfile.TemporaryDirectory() as folder:
        stored = Stored(options, Path(folder))
        for name, variant in results.missing().items():
            results.add(name, attempt(name, lambda chosen=variant: one_row(options, chosen, stored)))
        stored.close()
    return results.rows()


def one_row(options: argparse.Namespace, variant: Variant, stored: Stored) -> dict[str, Any]:
    """Train and measure one variant."""
    begin = time.perf_counter()
    lab = Lab(options, variant.words, stored)
    times, memory = list[float](), float("nan")
    if variant.pretrain:
        lab.train("tokenizer", stored.buffer("other"), options.updates)
    if variant.trained:
        times, memory = lab.train("tokenizer", stored.buffer("train"), options.updates)
    measured = lab.measure_tokenizer(stored.held_out(lab))
    lab.train("world_model", stored.buffer("train"), options.updates)
    measured |= lab.measure_world_model(stored.held_out(lab))
    measured |= {"ms": statistics.median(times) if times else float("nan"), "memory_mb": memory}
    measured |= {"parameters": lab.parameters("tokenizer"), "seconds": time.perf_counter() - begin}
    return {**measured, "note": variant.note, "frames": lab.frames}


def attempt(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row of a variant; if it fails, a row that says so, so that a long run goes on."""
    print(f"{name} …", flush=True)
    try:
        return measure()
    except (LabError, KeyboardInterrupt):
        raise
    except Exception as error:  # a kernel, a library
        traceback.print_exc()
        return {"failed": 1, "note": f"failed: {one_line(error)}"}


# ---------------------------------------------------------------- options and results


def make_parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"rl-lab bench {name}", description="variants on the same episodes")
    parser.add_argument("--set", choices=sorted(SETS), default="catch", help="episodes and sizes")
    parser.add_argument("--updates", type=int, help="of each part")
    parser.add_argument("--rows", type=int, help="stored rows that are trained on")
    parser.add_argument("--held-out", type=int, help="stored rows that are only measured")
    parser.add_argument("--only", help="variants, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="smallest networks and batches, as a smoke test")
    parser.add_argument("--table", type=Path, help="write a Markdown table here, after every variant")
    parser.add_argument("--figure", type=Path, help="write a picture here, after every variant")
    return parser


def filled(options: argparse.Namespace) -> argparse.Namespace:
    """Fill in the options of the set."""
    for name in ("updates", "rows", "held_out"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(SETS[options.set], name))
    return options


COLUMNS = {
    "pixel_error": "pixel error",
    "codes_used": "codes used",
    "code_bits": "bits",
    "token_ce": "token CE",
    "frame_ce": "frame CE",
    "reward_ce": "reward CE",
    **{f"open_{n}": f"open loop {n}" for n in STEPS},
    "ms": "ms",
    "memory_mb": "MB",
    "parameters": "trained",
}
UNITS = {
    "codes_used": "share",
    "code_bits": "bits",
    "ms": "ms",
    "memory_mb": "MB",
    "parameters": "parameters",
    "weights": "parameters",
    "seconds": "s",
    "failed": "variant",
}


class Results:
    """What was measured, by variant: written after each, and read from the file of an earlier call."""

    def __init__(
        self,
        bench: str,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        variants: dict[str, Variant],
        file: ResultFile | None,
    ) -> None:
        self.bench, self.options, self.variants = bench, options, variants
        self.file = ResultFile(bench) if file is None else file
        self.names = options.only.split(",") if options.only else list(variants)
        for name in self.names:
            require_choice("--only", name, variants)
        self.found: dict[str, dict[str, Any]] = {}
        self.tensors: dict[str, torch.Tensor] = {}  # frames of each variant; what all variants share
        earlier = self.file.earlier()
        if earlier is not None:
            words, rows, tensors = earlier
            if self._alike(filled(parser.parse_args(words))):
                self._restore(rows, tensors)
            else:
                print(f"{self.file.path}: its rows are measured again: its options are {' '.join(words)}")

    def _alike(self, other: argparse.Namespace) -> bool:
        left, right = dict(vars(self.options)), dict(vars(other))
        for name in ("only", "table", "figure"):
            del left[name], right[name]
        return left == right

    def _restore(self, rows: Sequence[Mapping[str, Any]], tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        for row in rows:
            _, _, name, key = row["name"].split("/")
            variant = self.variants.get(name)
            result = self.found.setdefault(name, {"note": variant.note if variant else "bound"})
            result[key] = float("nan") if row["value"] is None else row["value"]
        self.found = {name: row for name, row in self.found.items() if "failed" not in row}
        for name in self.found.keys() & {key.removeprefix("frames/") for key in tensors}:
            frames = tensors[f"frames/{name}"].numpy() / np.float32(255)
            self.found[name]["frames"] = (frames[0], frames[1])

    def missing(self) -> dict[str, Variant]:
        """The chosen variants that are not measured yet."""
        kept = [name for name in self.names if name in self.found]
        if kept:
            print(f"{self.file.path}: has {', '.join(kept)}", flush=True)
        return {name: self.variants[name] for name in self.names if name not in self.found}

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Keep and print a variant's row; write all files, so that a stopped run leaves what it has."""
        found = {**self.found, name: row}
        order = [*(other for other in found if other not in self.variants), *self.variants]
        self.found = {other: found[other] for other in order if other in found}
        shown = {key: round(value, 5) for key, value in row.items() if isinstance(value, int | float)}
        print(name, shown, flush=True)
        if "frames" in row:
            frames = torch.from_numpy(np.stack(row["frames"])) * 255
            self.tensors[f"frames/{name}"] = frames.round().clamp(0, 255).to(torch.uint8)
        self.file.write(self.rows(), self.tensors)
        for target in filter(None, (self.options.table, self.options.figure)):
            make_folder(target.parent)
        if self.options.table:
            self.options.table.write_text(markdown(self.found))
        if self.options.figure and any("frames" in other for other in self.found.values()):
            picture(self.options.figure, self.bench, self.found)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `rl-lab bench`."""
        rows = []
        for variant, measured in self.found.items():
            for key, value in measured.items():
                if isinstance(value, int | float):  # the notes are in docs/experiments/iris_variants.md
                    unit = "nats" if key.endswith("_ce") else UNITS.get(key, "mean square")
                    name = f"{self.bench}/{self.options.set}/{variant}/{key}"
                    rows.append({"name": name, "value": value, "unit": unit})
        return rows


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    columns = [key for key in COLUMNS if any(np.isfinite(row.get(key, np.nan)) for row in results.values())]
    lines = [
        "| | " + " | ".join(COLUMNS[key] for key in columns) + " | |",
        "| --- |" + " ---: |" * len(columns) + " --- |",
    ]
    for name, row in results.items():
        cells = [number(row.get(key, float("nan"))) for key in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {row['note']} |")
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Three significant digits; a dash for what was not measured."""
    if not np.isfinite(value):
        return "-"
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def picture(file: Path, bench: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    """At the left frames (above the true ones) for each variant, at the right its open-loop errors."""
    from matplotlib.figure import Figure

    names = [name for name in results if "frames" in results[name]]
    figure = Figure(figsize=(11, 0.55 * len(names) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    truth = results[names[0]]["frames"][0]
    strips = [truth, *(results[name]["frames"][1] for name in names)]  # (n, C, H, W) each
    side = truth.shape[-1]
    image = np.concatenate([np.concatenate(list(strip), -1) for strip in strips], -2).transpose(1, 2, 0)
    left.imshow(image.clip(0, 1), interpolation="nearest", aspect="auto")
    for n in range(1, len(strips)):
        left.axhline(side * n - 0.5, color="white", linewidth=1.5)
    for n in range(1, len(truth)):
        left.axvline(side * n - 0.5, color="white", linewidth=1.5)
    left.set_yticks([side * (n + 0.5) - 0.5 for n in range(len(strips))], ["true", *names])
    left.set_xticks([side * (n + 0.5) - 0.5 for n in range(len(truth))], list(SHOWN[: len(truth)]))
    left.set_xlabel("steps after the first frame of the sequence")
    left.set_title("reconstructed frames" if bench == "tokenizers" else "frames imagined from the first one")
    places = np.arange(len(names))
    for n, step in enumerate(STEPS):
        values = [results[name].get(f"open_{step}", np.nan) for name in names]
        right.barh(places + 0.27 * (n - 1), values, 0.25, label=f"{step} steps")
    right.set_yticks(places, names)
    right.invert_yaxis()
    right.set_title("open-loop squared error")
    figure.legend(loc="outside lower right", ncols=len(STEPS))
    figure.savefig(file, dpi=110)


# ---------------------------------------------------------------- stored episodes


class RandomActions:
    """A policy for the Collector."""

    act_captures = False

    def __init__(self, actions: int) -> None:
        self.actions = actions

    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {}

    def act(
        self, obs: Any, policy_state: Any, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return torch.randint(self.actions, is_first.shape, generator=mode.generator), {}, {}


class Stored:
    """Random play of this game and of another one, collected when first asked for."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.buffers: dict[str, Any] = {}
        self._held_out: Batch | None = None

    def buffer(self, name: str) -> Any:
        if name not in self.buffers:
            self.buffers[name] = self._collect(name)
        return self.buffers[name]

    def _collect(self, name: str) -> Any:
        options = self.options
        words = SETS[options.set].other if name == "other" else []
        config, spec = composed(options, words)
        seed = options.seed + {"train": 0, "held_out": HELD_OUT_SEED, "other": OTHER_SEED}[name]
        buffer = build_buffers(config, spec, {}, torch.device("cpu"), home=self.folder / name)["replay"]
        environment = make_configured_env(to_plain(config.environment), seed=seed)
        try:
            generator = torch.Generator().manual_seed(seed)
            collector = Collector(environment, device=torch.device("cpu"), generator=generator)
            collector.reset()
            policy = RandomActions(spec.action.choices[0])
            count = options.held_out if name == "held_out" else options.rows
            for _ in range(-(-count // environment.num_envs)):
                rows = collector.step(policy, ActMode(sample=True)).trajectory
                assert rows is not None
                buffer.add({key: np.asarray(value) for key, value in rows.items()})
        finally:
            environment.close()
        return buffer

    def held_out(self, lab: Lab) -> Batch:
        """The same sequences for every variant: 64, or 32 of large images."""
        if self._held_out is None:
            spec = lab.workflow.hooks()["update_world_model"].batch
            generator = torch.Generator().manual_seed(self.options.seed)
            buffer = self.buffer("held_out")
            batches = [buffer.sample(spec, generator=generator) for _ in range(64 // spec.size or 1)]
            columns = {
                name: torch.cat([batch.columns[name] for batch in batches]).to(lab.device)
                for name in batches[0].columns
            }
            masks = [batch.mask for batch in batches if batch.mask is not None]
            self._held_out = Batch(columns, mask=torch.cat(masks).to(lab.device) if masks else None)
        return self._held_out

    def close(self) -> None:
        for buffer in self.buffers.values():
            buffer.close()


TINY = {
    "catch": ["algorithm.size.codes=64"],
    "boxing": ["algorithm.size.tokens=16", "algorithm.size.codes=512"],
}
LENGTHS = ["algorithm.tokenizer.batch_length=8", "algorithm.world_model.batch_length=16"]


def composed(options: argparse.Namespace, words: Sequence[str]) -> tuple[Any, Any]:
    tiny = ["debug=tiny", *TINY[options.set], *LENGTHS] if options.tiny else []
    own = [f"experiment.device={options.device}", f"experiment.seed={options.seed}"]
    config = compose_config([*SETS[options.set].words, *tiny, *own, *words])
    spec = environment_spec(config)
    return resolve_config(config, spec), spec


# ---------------------------------------------------------------- one variant


SHOWN = (1, 5, 10, 15)  # steps whose frames are shown


class Lab:
    """The parts of one variant, their updates and measurements."""

    def __init__(self, options: argparse.Namespace, words: Sequence[str], stored: Stored) -> None:
        self.options, self.stored = options, stored
        self.device = resolve_device(options.device)
        self.config, spec = composed(options, words)
        torch.manual_seed(options.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # random weights of the perceptual loss: the note says so
            self.workflow = assemble_workflow(self.config, spec, self.device)
        empty = np.zeros(0)
        self.frames: tuple[np.ndarray, np.ndarray] = (empty, empty)  # true and shown, (n, C, H, W)

    def train(self, part: str, buffer: Any, updates: int) -> tuple[list[float], float]:
        """Milliseconds of each update, and the largest memory of one in MB."""
        options, hook = self.options, self.workflow.hooks()[f"update_{part}"]
        runner = HookRunner(
            part,
            hook,
            device=self.device,
            generator=torch.Generator(self.device).manual_seed(options.seed),
            capture=not options.eager,
            tensor_float=asks_for_tensor_float(self.config.training.precision),
        )
        stream = BatchStream(
            buffer, hook.batch, torch.Generator().manual_seed(options.seed), device=self.device
        )
        times, cuda = [], self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        memory = 0.0 if cuda else self.saved_bytes(part, stream.next()) / 1e6
        for done in range(updates):
            begin = time.perf_counter()
            runner.run(stream, {"progress": 0.0, "set": {}}, {"updates": done}, key=None)
            if cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1000)
        if cuda:
            memory = torch.cuda.max_memory_allocated() / 1e6
        return times, memory

    def saved_bytes(self, part: str, batch: Batch) -> int:
        """Bytes that autograd saves for one loss, and those of weights, gradients and Adam's moments."""
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        module = self.module(part)
        arguments = () if part == "tokenizer" else (self.workflow.tokenizer,)
        options = {"learn": False} if part == "tokenizer" else {}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module.compute_loss(batch, *arguments, **options)
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        saved = sum(size for address, size in seen.items() if address not in weights)
        tensors = [*module.parameters(), *module.buffers()]
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        return saved + sum(t.numel() * t.element_size() for t in tensors) + 3 * 4 * trained

    def module(self, part: str) -> Any:
        return getattr(self.workflow, part)

    def parameters(self, part: str) -> int:
        return sum(p.numel() for p in self.module(part).parameters() if p.requires_grad)

    @torch.no_grad()
    def measure_tokenizer(self, batch: Batch) -> dict[str, float]:
        tokenizer, frames, real = self.workflow.tokenizer, *self.pixels(batch)
        with self.workflow.autocast():
            tokens = tokenizer.encode(frames.flatten(0, 1))
            made = tokenizer.decode(tokens).float().unflatten(0, frames.shape[:2])
        row, places = self.shown(real)
        self.frames = (frames[row, places].cpu().numpy(), made[row, places].cpu().numpy())
        measured = {"pixel_error": float((made - frames).square().mean((-3, -2, -1))[real].mean())}
        if tokenizer.vocab:
            used = tokens.unflatten(0, frames.shape[:2])[real].flatten()
            shares = code_shares(used, tokenizer.vocab, None)[1]
            measured["codes_used"] = float((shares > 0).float().mean())
            measured["code_bits"] = float(entropy_bits(shares))
        return measured

    @torch.no_grad()
    def measure_world_model(self, batch: Batch) -> dict[str, float]:
        """Losses and open-loop errors on held-out sequences."""
        model, tokenizer = self.workflow.world_model, self.workflow.tokenizer
        model.eval()
        with self.workflow.autocast():
            losses, _ = model.compute_loss(batch, tokenizer)
            errors, _ = self.open_loop(batch)
        model.train()
        named = losses.intermediate_losses
        measured = {
            "token_ce": float(named["tokens"]) / model.weights["tokens"],
            "frame_ce": float(named["tokens"]) / model.weights["tokens"] * tokenizer.num_tokens,
            "reward_ce": float(named["reward"]) / model.weights["reward"],
        }
        if not tokenizer.vocab:
            del measured["frame_ce"]
        return measured | {f"open_{step}": errors[step] for step in STEPS}

    @torch.no_grad()
    def open_loop(self, batch: Batch) -> tuple[dict[int, float], torch.Tensor]:
        """Errors by step, and the frames (B, steps, …) imagined from the first row with the real actions."""
        model, tokenizer = self.workflow.world_model, self.workflow.tokenizer
        frames, real = self.pixels(batch)
        steps = min(max(STEPS), frames.shape[1] - 1, model.blocks - 1)
        generator = torch.Generator(self.device).manual_seed(self.options.seed)
        state = model.begin(tokenizer, frames[:, :1], batch.action[:, :1])
        made, errors = [], dict.fromkeys(STEPS, float("nan"))
        for step in range(1, steps + 1):
            noise = torch.rand(len(frames), model.step_noise, generator=generator, device=self.device)
            state, _ = model.step(tokenizer, state, batch.action[:, step - 1], noise)
            made.append(state["frame"].float())
            if step in errors:
                error = (made[-1] - frames[:, step]).square().mean((-3, -2, -1))
                errors[step] = float(error[real[:, step]].mean())
        return errors, torch.stack(made, 1)

    def pixels(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Frames (B, T, C, H, W) in [0, 1], and which are real (B, T)."""
        real = torch.ones_like(batch.is_first) if batch.mask is None else batch.mask
        return to_frames(batch.obs[self.workflow.tokenizer.key]), real

    def shown(self, real: torch.Tensor) -> tuple[int, list[int]]:
        """Return the first of the longest sequences, and the steps of it that are shown."""
        lengths = real.sum(1)
        row = int(lengths.argmax())
        return row, [min(step, int(lengths[row]) - 1) for step in SHOWN]
