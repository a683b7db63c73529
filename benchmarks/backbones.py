"""Variants of IRIS' world model on the same tokens of the same stored and held-out episodes, at equal updates.

    rl-lab bench backbones --set catch                     # small images, on a CPU
    rl-lab bench backbones --set boxing --updates 250      # 64×64, on a GPU
    rl-lab bench backbones --language-model FOLDER         # with a pretrained model, in all its modes, and its controls

One tokenizer is trained first and is the same for all. `rl-lab bench tokenizers --help` and its docstring explain the
options and what is measured; here ms and memory are of the world model's update, `parameters` are trained, `weights`
all. `copy` predicts the frame that it starts from; `real_environment` is the upper bound: the true frames,
seen through the tokenizer. Without --language-model its rows use a small GPT-2 with random weights, which is written
to a temporary folder: architecture only.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rl_lab.errors import MissingPackageError, install_line
from rl_lab.tools.bench import ResultFile, load_benchmark

shared: Any = load_benchmark("tokenizers")

BACKBONE = "components/backbone@components.world_model.backbone"
ONCE = "components/world_model@components.world_model=iris_frame_at_once"


def backbone_variants(language_model: str, real: bool, layers: int | None) -> dict[str, Any]:
    def language(*words: str, note: str = "") -> Any:
        options = [f"components.world_model.backbone.{word}" for word in (f"path={language_model}", *words)]
        options += [f"components.world_model.backbone.layers={layers}"] if layers else []
        return shared.Variant([f"{BACKBONE}=pretrained", *options], note=note or kind)

    kind = "pretrained weights" if real else "architecture only"
    return {
        "transformer": shared.Variant(note="IRIS"),
        **{name: shared.Variant([f"{BACKBONE}={name}"]) for name in ("gru", "lstm", "state_space", "cfc")},
        "frame_at_once": shared.Variant([ONCE], note="transformer, one position per step"),
        "frame_at_once_cfc": shared.Variant([ONCE, f"{BACKBONE}=cfc"], note="CfC, one position per step"),
        "lm_frozen": language("trained=frozen"),
        "lm_norms": language("trained=norms"),
        "lm_last": language("trained=last"),
        "lm_lora": language("trained=lora"),
        "lm_all": language("trained=all"),
        "lm_own_positions": language("trained=norms", "positions=false"),
        "lm_random_frozen": language("trained=frozen", "weights=random", note="control: random weights"),
        "lm_random_all": language("trained=all", "weights=random", note="control: random weights"),
    }


def run(argv: list[str], file: ResultFile | None = None) -> list[dict[str, Any]]:
    parser = shared.make_parser("backbones")
    parser.add_argument("--language-model", help="folder of a language model, or its name on the hub")
    parser.add_argument(
        "--tokenizer-updates", type=int, help="of the tokenizer that all share; default: --updates"
    )
    parser.add_argument("--language-layers", type=int, help="only the first so many blocks of it")
    options = shared.filled(parser.parse_args(argv))
    with tempfile.TemporaryDirectory() as folder:
        language_model = options.language_model or str(Path(folder, "gpt2"))
        variants = backbone_variants(language_model, bool(options.language_model), options.language_layers)
        results = shared.Results("backbones", parser, options, variants, file)
        missing = results.missing()
        if not options.language_model and any(name.startswith("lm_") for name in missing):
            small_language_model(Path(language_model))
        stored = shared.Stored(options, Path(folder))
        tokenizer = shared_tokenizer(options, stored, results)
        for name, variant in missing.items():
            results.add(
                name,
                shared.attempt(name, lambda chosen=variant: one_row(options, chosen, stored, tokenizer)),
            )
        stored.close()
    return results.rows()


def shared_tokenizer(options: Any, stored: Any, results: Any) -> dict[str, torch.Tensor]:
    """Train the tokenizer and measure the bounds, or take both from the file of an earlier call."""
    place = "tokenizer/"
    if "real_environment" in results.found:
        return {k.removeprefix(place): v for k, v in results.tensors.items() if k.startswith(place)}
    lab = shared.Lab(options, [], stored)
    lab.train("tokenizer", stored.buffer("train"), options.tokenizer_updates or options.updates)
    tokenizer: dict[str, torch.Tensor] = lab.workflow.tokenizer.state_dict()
    results.tensors |= {place + name: value for name, value in tokenizer.items()}
    for name, row in bounds(lab, stored).items():
        results.add(name, row)
    return tokenizer


def one_row(options: Any, variant: Any, stored: Any, tokenizer: Any) -> dict[str, Any]:
    """Train and measure one variant."""
    begin = time.perf_counter()
    lab = shared.Lab(options, variant.words, stored)
    lab.workflow.tokenizer.load_state_dict(tokenizer)
    times, memory = lab.train("world_model", stored.buffer("train"), options.updates)
    batch = stored.held_out(lab)
    measured = lab.measure_world_model(batch)
    model = lab.workflow.world_model
    measured |= {
        "ms": statistics.median(times),
        "memory_mb": memory,
        "parameters": lab.parameters("world_model"),
        "weights": sum(tensor.numel() for tensor in (*model.parameters(), *model.backbone.buffers())),
        "seconds": time.perf_counter() - begin,
    }
    return {**measured, "note": variant.note, "frames": imagined(lab, batch)}


@torch.no_grad()
def imagined(lab: Any, batch: Any) -> tuple[Any, Any]:
    """True and imagined frames of one whole sequence, at the steps of `SHOWN`."""
    lab.workflow.world_model.eval()
    frames, real = lab.pixels(batch)
    with lab.workflow.autocast():
        made = lab.open_loop(batch)[1]
    lab.workflow.world_model.train()
    row, places = lab.shown(real)
    places = [min(max(place, 1), made.shape[1]) for place in places]
    return frames[row, places].cpu().numpy(), made[row, [place - 1 for place in places]].cpu().numpy()


@torch.no_grad()
def bounds(lab: Any, stored: Any) -> dict[str, dict[str, Any]]:
    """Rows of the copied first frame and of the real environment behind the tokenizer."""
    batch = stored.held_out(lab)
    frames, real = lab.pixels(batch)
    tokenizer = lab.workflow.tokenizer
    with lab.workflow.autocast():
        flat = tokenizer.decode(tokenizer.encode(frames.flatten(0, 1))).float()
    seen = flat.unflatten(0, frames.shape[:2])
    row, places = lab.shown(real)
    rows = {}
    for name, made in (("copy", frames[:, :1].expand_as(frames)), ("real_environment", seen)):
        errors = (made - frames).square().mean((-3, -2, -1))
        rows[name] = {
            f"open_{step}": float(errors[:, step][real[:, step]].mean())
            for step in shared.STEPS
            if step < frames.shape[1]
        }
        rows[name] |= {
            "note": "bound",
            "frames": (frames[row, places].cpu().numpy(), made[row, places].cpu().numpy()),
        }
    return rows


def small_language_model(folder: Path) -> None:
    """Write a small GPT-2 with random weights."""
    try:
        from transformers import GPT2Config, GPT2Model
    except ImportError as error:
        raise MissingPackageError(
            f"bench backbones needs the package transformers: {install_line('hf')}"
        ) from error
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=16, n_positions=512, n_embd=256, n_layer=4, n_head=4)
    GPT2Model(config).save_pretrained(folder)
