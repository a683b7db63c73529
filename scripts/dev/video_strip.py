"""A run's open-loop film (`media/reconstructions/*.gif`) as a picture: moments side by side; truth, model, error below.

From the repository's root:
    python scripts/dev/video_strip.py RUN/media/reconstructions/report_open_loop_image_000050000.gif docs/images/NAME.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageSequence
from world_model_images import save

ROWS = ("truth", "model", "error")  # side by side in the film, which has one sequence below the other


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("film", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--sequence", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=6, help="below one another in the film")
    parser.add_argument("--moments", type=int, default=12, help="evenly over the film")
    options = parser.parse_args()
    frames = np.stack([np.array(f.convert("RGB")) for f in ImageSequence.Iterator(Image.open(options.film))])
    height, width = frames.shape[1] // options.sequences, frames.shape[2] // len(ROWS)
    at = np.linspace(0, len(frames) - 1, options.moments).round().astype(int)
    chosen = torch.from_numpy(frames[at]).permute(0, 3, 1, 2)  # (n, 3, H, W)
    chosen = chosen[:, :, options.sequence * height : (options.sequence + 1) * height]
    save(options.picture, dict(zip(ROWS, chosen.split(width, -1))))


if __name__ == "__main__":
    main()
